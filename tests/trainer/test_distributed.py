"""Several processes train to the same numbers as one on the same answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import given_answers
import pytest
import torch
from run_files import timeless, weights

pytestmark = pytest.mark.slow
TAUGHT = ["taught", "taught-adapter"]
TOLD = [case for case in given_answers.CASES if case.startswith(("pg", "gkd"))]
ALONE = [case for case in given_answers.CASES if case != "half" and case not in TOLD]
SHARDED = ["gdpo", "skipped", "window", "centred", "parts", "adapter"]
ROOT = Path(__file__).parents[2]
QUIET = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TQDM_DISABLE": "1",
}


def launch(folder: Path, *cases: str, killed: bool = False, **more: str) -> dict[str, list[dict]]:
    """Two processes with gloo between them on ports that nobody else uses: what each case gave on each of them."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
    ]
    environment = os.environ | QUIET | {"PYTHONPATH": str(ROOT)} | more
    done = subprocess.run(
        [*command, str(ROOT / "tests" / "helpers" / "given_answers.py"), str(folder), *cases],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (done.returncode != 0) == killed, done.stderr[-4000:]
    assert not killed or "SIGKILL" in done.stderr
    return (
        {}
        if killed
        else {case: [torch.load(folder / f"{case}-{rank}.pt") for rank in (0, 1)] for case in cases}
    )


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), *ALONE)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("sharded"), *SHARDED, "half", *TAUGHT, SHARDED="1")


@pytest.fixture(scope="module")
def two_told(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("two"), *TOLD)


@pytest.fixture(scope="module")
def sharded_told(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("sharded"), *TOLD, SHARDED="1")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One process on a case, trained once for all comparisons."""
    torch.set_num_threads(1)
    known = {}

    def run(case: str) -> dict:
        if case not in known:
            known[case] = given_answers.observe(case, tmp_path_factory.mktemp("one"), 1)
        return known[case]

    return run


def joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    width = max(piece.size(1) for piece in pieces)
    return torch.cat(
        [torch.nn.functional.pad(piece, (0, width - piece.size(1))) for piece in pieces]
    )


def gaps(one: dict, ranks: list[dict]) -> dict[str, float]:
    """The largest difference of each quantity between one process and every rank; of advantages, beside the largest."""
    found = {}
    for step, mine in enumerate(one["advantages"]):
        theirs = joined([rank["advantages"][step] for rank in ranks])
        found[f"advantages {step}"] = (
            (theirs - mine).abs().max() / mine.abs().max().clamp(min=1)
        ).item()
    for rank in ranks:
        names = [name for name in ("losses", "rms", "told", "weights") if name in one]
        pairs = {name: (one[name], rank[name]) for name in names}
        pairs |= {
            f"thresholds {name}": (values, rank["thresholds"][name])
            for name, values in one["thresholds"].items()
        }
        for name, (a, b) in pairs.items():
            gap = (torch.as_tensor(a).double() - torch.as_tensor(b).double()).abs().max().item()
            found[name] = max(gap, found.get(name, 0.0))
    return found


@pytest.mark.parametrize("case", ALONE)
def test_two_processes_are_one(case, one, two):
    alone = one(case)
    assert len(alone["advantages"]) == len(two[case][0]["advantages"]) == 2
    assert {name: gap for name, gap in gaps(alone, two[case]).items() if not gap < 1e-5} == {}
    assert alone["moved"] > 1e-3 and alone["shards"] == two[case][0]["shards"] == 0


@pytest.mark.parametrize("case", SHARDED)
def test_a_sharded_model_is_a_whole_one(case, one, sharded):
    assert {
        name: gap for name, gap in gaps(one(case), sharded[case]).items() if not gap < 1e-5
    } == {}
    assert sharded[case][0]["shards"] > 4


@pytest.mark.parametrize("case", TOLD)
def test_two_processes_distil_as_one(case, one, two_told):
    """Batches are uneven: one process has no answer that counts, or none at all, and prompts differ in length."""
    alone = one(case)
    assert {name: gap for name, gap in gaps(alone, two_told[case]).items() if not gap < 1e-5} == {}
    assert alone["moved"] > 1e-3 and len(alone["told"]) == (9 if case.startswith("gkd") else 6)


@pytest.mark.parametrize("case", TOLD)
def test_a_sharded_model_is_distilled_like_a_whole_one(case, one, sharded_told):
    assert {
        name: gap for name, gap in gaps(one(case), sharded_told[case]).items() if not gap < 1e-5
    } == {}
    assert sharded_told[case][0]["shards"] > 4


def test_a_sharded_model_in_16_bits_gives_log_probabilities_in_float32(sharded):
    assert all(rank["kinds"] == {"torch.float32"} for rank in sharded["half"])
    assert all(row["unscored"] for row in sharded["half"][0]["stats"][:1])


def test_a_sharded_policy_is_saved_whole(sharded):
    assert sharded["gdpo"][0]["lost"] == 0


@pytest.mark.parametrize("case", TAUGHT)
def test_a_sharded_model_is_taught_like_a_whole_one(case, sharded, tmp_path):
    alone = given_answers.teach(case, tmp_path)["weights"]
    start = weights(given_answers.load_policy("cold-short")[0])
    assert (sharded[case][0]["weights"] - alone).abs().max() < 1e-5
    assert (alone - start).abs().max() > 1e-3


@pytest.mark.parametrize("how", ["whole", "sharded"])
def test_a_killed_run_of_two_processes_goes_on_bit_for_bit(tmp_path, how):
    """Weights, both moments of AdamW, thresholds, rows: as in the run that nobody killed."""
    more = {"SHARDED": "1"} if how == "sharded" else {}
    launch(tmp_path, "cut", killed=True, **more)
    found = launch(tmp_path, "straight", "resumed", **more)
    for straight, resumed in zip(found["straight"], found["resumed"], strict=True):
        assert straight.pop("resumed") is None and resumed.pop("resumed") == 4
        assert straight["losses"] == resumed["losses"] and len(straight["losses"]) == 4
        for name in ("weights", "optimizer", "thresholds"):
            assert torch.equal(straight[name], resumed[name]), name
        assert straight["optimizer"].count_nonzero() > straight["weights"].numel()
        assert (straight["shards"] > 4) == (how == "sharded")
    told = [timeless(tmp_path / name) for name in ("straight", "cut")]
    assert told[0] == told[1] and len(told[0]) == 4
