"""Several processes train to the same numbers as one on the same answers."""

import os
import subprocess
import sys
from pathlib import Path

import given_answers
import pytest
import torch
from run_files import timeless, weights

pytestmark = pytest.mark.slow
FINE_TUNED = ["taught", "taught-adapter"]
DISTILLED = [case for case in given_answers.CASES if case.startswith(("pg", "gkd"))]
ALONE = [case for case in given_answers.CASES if case != "half" and case not in DISTILLED]
SHARDED = ["gdpo", "skipped", "window", "centred", "parts", "adapter"]
ROOT = Path(__file__).parents[2]
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


def launch(
    folder: Path, *cases: str, killed: bool = False, **variables: str
) -> dict[str, list[dict]]:
    """Two processes with gloo between them on ports that nobody else uses:
    what each case gave on each of them.
    """
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "helpers" / "given_answers.py"), str(folder), *cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    if killed:
        assert done.returncode != 0
        assert "SIGKILL" in done.stderr
        return {}
    assert done.returncode == 0, done.stderr[-4000:]
    return {case: [torch.load(folder / f"{case}-{rank}.pt") for rank in (0, 1)] for case in cases}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), *ALONE)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("sharded"), *SHARDED, "half", *FINE_TUNED, SHARDED="1")


@pytest.fixture(scope="module")
def two_distilled(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), *DISTILLED)


@pytest.fixture(scope="module")
def sharded_distilled(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("sharded"), *DISTILLED, SHARDED="1")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process on a case, trained once for all comparisons."""
    torch.set_num_threads(1)
    observed = {}

    def run(case: str) -> dict:
        if case not in observed:
            observed[case] = given_answers.observe(case, tmp_path_factory.mktemp("one"), 1)
        return observed[case]

    return run


def joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    """The rows of several tensors, filled up to one width."""
    width = max(piece.size(1) for piece in pieces)
    pad = torch.nn.functional.pad
    return torch.cat([pad(piece, (0, width - piece.size(1))) for piece in pieces])


def gap(a, b) -> float:
    difference = torch.as_tensor(a).double() - torch.as_tensor(b).double()
    return difference.abs().max().item()


def gaps(alone: dict, ranks: list[dict], most: float = 1e-5) -> dict[str, float]:
    """Quantities in which one process and some rank differ by more than `most`;
    advantages beside the largest of them.
    """
    gap_by_name = {}
    for step, advantages in enumerate(alone["advantages"]):
        of_ranks = joined([rank["advantages"][step] for rank in ranks])
        scale = advantages.abs().max().clamp(min=1).item()
        gap_by_name[f"advantages {step}"] = gap(of_ranks, advantages) / scale
    for number, rank in enumerate(ranks):
        for name in ("losses", "rms", "distilled", "weights"):
            if name in alone:
                gap_by_name[f"{name} {number}"] = gap(alone[name], rank[name])
        for name, values in alone["thresholds"].items():
            of_rank = rank["thresholds"][name]
            gap_by_name[f"thresholds {name} {number}"] = gap(values, of_rank)
    return {name: value for name, value in gap_by_name.items() if not value < most}


@pytest.mark.parametrize("case", ALONE)
def test_two_processes_are_one(case, one, two):
    alone = one(case)
    assert len(alone["advantages"]) == len(two[case][0]["advantages"]) == 2
    assert gaps(alone, two[case]) == {}
    assert alone["moved"] > 1e-3
    assert alone["shards"] == two[case][0]["shards"] == 0


@pytest.mark.parametrize("case", SHARDED)
def test_a_sharded_model_is_a_whole_one(case, one, sharded):
    assert gaps(one(case), sharded[case]) == {}
    assert sharded[case][0]["shards"] > 4


@pytest.mark.parametrize("case", DISTILLED)
def test_two_processes_distil_as_one(case, one, two_distilled):
    """Batches are uneven: one process has no answer that counts, or none at all,
    and prompts differ in length.
    """
    alone = one(case)
    assert gaps(alone, two_distilled[case]) == {}
    assert alone["moved"] > 1e-3
    assert len(alone["distilled"]) == (9 if case.startswith("gkd") else 6)


@pytest.mark.parametrize("case", DISTILLED)
def test_a_sharded_model_is_distilled_like_a_whole_one(case, one, sharded_distilled):
    assert gaps(one(case), sharded_distilled[case]) == {}
    assert sharded_distilled[case][0]["shards"] > 4


def test_a_sharded_model_in_16_bits_gives_log_probabilities_in_float32(sharded):
    assert all(rank["dtypes"] == {"torch.float32"} for rank in sharded["half"])
    assert all(row["unscored"] for row in sharded["half"][0]["stats"][:1])


def test_a_sharded_policy_is_saved_whole(sharded):
    assert sharded["gdpo"][0]["lost"] == 0


@pytest.mark.parametrize("case", FINE_TUNED)
def test_a_sharded_model_is_taught_like_a_whole_one(case, sharded, tmp_path):
    alone = given_answers.teach(case, tmp_path)["weights"]
    start = weights(given_answers.load_policy("cold-short")[0])
    assert (sharded[case][0]["weights"] - alone).abs().max() < 1e-5
    assert (alone - start).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["whole", "sharded"])
def test_a_killed_run_of_two_processes_goes_on_bit_for_bit(tmp_path, layout):
    """Weights, both moments of AdamW, thresholds, rows: as in the run that nobody killed."""
    variables = {"SHARDED": "1"} if layout == "sharded" else {}
    launch(tmp_path, "cut", killed=True, **variables)
    runs = launch(tmp_path, "straight", "resumed", **variables)
    for straight, resumed in zip(runs["straight"], runs["resumed"], strict=True):
        assert straight["resumed"] is None
        assert resumed["resumed"] == 4
        assert straight["losses"] == resumed["losses"]
        assert len(straight["losses"]) == 4
        for name in ("weights", "optimizer", "thresholds"):
            assert torch.equal(straight[name], resumed[name]), name
        assert straight["optimizer"].count_nonzero() > straight["weights"].numel()
        assert (straight["shards"] > 4) == (layout == "sharded")
    rows = timeless(tmp_path / "straight")
    assert len(rows) == 4
    assert timeless(tmp_path / "cut") == rows
