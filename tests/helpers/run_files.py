"""What a training run leaves behind, for comparing it with another one."""

import json
from pathlib import Path

import torch


def weights(model: torch.nn.Module) -> torch.Tensor:
    """All parameters in a row."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def rows(out: Path) -> list[dict]:
    """The rows of `steps.jsonl`."""
    return [json.loads(line) for line in (out / "steps.jsonl").read_text().splitlines()]


def timeless(out: Path, *starts: str) -> list[dict]:
    """The rows without seconds, and without fields whose names begin so."""
    return [
        {name: v for name, v in row.items() if not name.startswith(("seconds", *starts))}
        for row in rows(out)
    ]


def assert_same(one: tuple, other: tuple, *starts: str) -> None:
    """Two runs, each a trainer and its folder, are the same to the bit: weights, rows, thresholds."""
    (trainer, out) = one
    (whole, there) = other
    assert torch.equal(weights(trainer.model), weights(whole.model))
    assert timeless(out, *starts) == timeless(there, *starts)
    assert trainer.thresholds.state_dict() == whole.thresholds.state_dict()
