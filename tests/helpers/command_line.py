"""A command as somebody types it, in this process."""

import pytest

from memcalib.commands.cli import main


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output and errors of `memcalib ARGUMENTS`, which never end in a traceback."""
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    output, errors = capsys.readouterr()
    assert "Traceback" not in output + errors
    return exit_.value.code or 0, output, errors
