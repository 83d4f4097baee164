"""Training with DeepSpeed on two processes of the CPU:
the launch folders' own settings, on the answers of `given`.

`DS_BUILD_OPS=0 pip install deepspeed` in any environment that has the package;
without it these tests are left out.
"""

import json
from importlib.resources import files

import given_answers
import pytest
import test_distributed as distributed
import torch

pytest.importorskip(
    "deepspeed", reason="DeepSpeed is not installed: it is no extra of this package"
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SHARED = ["token", "skipped", "gkd"]
SHARDED = [
    "gdpo",
    "token",
    "skipped",
    "adapter",
    "pg-long",
    "gkd",
    "gkd-parts",
    "gkd-teacher",
    "gkd-copy",
    "gkd-adapter",
]


def launch(folder, case: str, stage: int, killed: bool = False):
    """The launch folders' settings at a stage; one case a start:
    stage 3 changes how models are loaded after it.
    """
    settings = json.loads((files("memcalib") / "data/launch/qwen3-8b/deepspeed.json").read_text())
    settings["zero_optimization"]["stage"] = stage
    (folder / "deepspeed.json").write_text(json.dumps(settings))
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "deepspeed.json"),
    }
    return distributed.launch(folder, case, killed=killed, DS_ACCELERATOR="cpu", **variables).get(
        case
    )


@pytest.mark.parametrize(
    "stage, case", [*((2, case) for case in SHARED), *((3, case) for case in SHARDED)]
)
def test_deepspeed_on_two_processes_is_one_process_without(stage, case, tmp_path):
    """DeepSpeed computes in float32, the single process in float64."""
    torch.set_num_threads(1)
    ranks = launch(tmp_path, case, stage)
    alone = given_answers.observe(case, tmp_path / "one", 1)
    assert distributed.gaps(alone, ranks, most=2e-5) == {}
    assert alone["moved"] > 1e-3
    assert ranks[0].get("lost", 0) < 1e-6


@pytest.mark.parametrize("stage", [2, 3])
def test_a_killed_run_goes_on_bit_for_bit(stage, tmp_path):
    launch(tmp_path, "cut", stage, killed=True)
    straight_ranks = launch(tmp_path, "straight", stage)
    resumed_ranks = launch(tmp_path, "resumed", stage)
    for straight, resumed in zip(straight_ranks, resumed_ranks, strict=True):
        assert straight["resumed"] is None
        assert resumed["resumed"] == 4
        assert straight["losses"] == resumed["losses"]
        assert len(straight["losses"]) == 4
        for name in ("weights", "optimizer", "thresholds"):
            assert torch.equal(straight[name], resumed[name]), name
