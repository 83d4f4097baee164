"""What a training run leaves behind, for comparing it with another one."""

import json
from pathlib import Path

import torch

from memcalib.trainer.checkpoints import find_checkpoint
from memcalib.training import CreditTrainer


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in a row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rows(out: Path) -> list[dict]:
    """The rows of `steps.jsonl`."""
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def newest_checkpoint(out: Path) -> Path | None:
    """The folder that a run would go on from, or None."""
    checkpoint = find_checkpoint(out, True)
    return checkpoint.folder if checkpoint else None


def timeless(out: Path, *prefixes: str) -> list[dict]:
    """The rows without seconds, and without fields whose names begin with one of the prefixes."""
    left_out = ("seconds", *prefixes)
    return [
        {name: value for name, value in row.items() if not name.startswith(left_out)}
        for row in rows(out)
    ]


def assert_same(
    run: tuple[CreditTrainer, Path], expected: tuple[CreditTrainer, Path], *prefixes: str
) -> None:
    """Two runs, each a trainer and its folder, are the same to the bit:
    weights, rows, thresholds.
    """
    trainer, out = run
    expected_trainer, expected_out = expected
    assert torch.equal(weights(trainer.model), weights(expected_trainer.model))
    assert timeless(out, *prefixes) == timeless(expected_out, *prefixes)
    assert trainer.thresholds.state_dict() == expected_trainer.thresholds.state_dict()
