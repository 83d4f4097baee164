"""A command as somebody types it, in this process."""

import pytest

from memcalib.commands.cli import main


def run(capsys, *arguments) -> tuple[int, str, str]:
    """Exit code, output and errors of `memcalib ARGUMENTS`, which never end in a traceback."""
    with pytest.raises(SystemExit) as exit:
        main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    return exit.value.code or 0, out, err
