"""A logger as the base trainer knows them: registered by name, made by the trainer,
told every number.
"""

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK


class Notes(TrainerCallback):
    """Keeps what it is told, and at which update."""

    heard: list[tuple[int, dict]] = []  # noqa: RUF012 (of all instances: the trainer makes its own)

    def on_log(self, args, state, control, logs=None, **_):
        self.heard.append((state.global_step, dict(logs)))


class Missing(TrainerCallback):
    """A logger whose package is not there."""

    def __init__(self):
        raise RuntimeError("needs a package that is not installed")


def hear(monkeypatch) -> list[tuple[int, dict]]:
    """`report_to: notes` is a logger, `report_to: missing` one that is not installed;
    returns what `notes` hears.
    """
    monkeypatch.setattr(Notes, "heard", [])
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "notes", Notes)
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "missing", Missing)
    return Notes.heard
