"""Files of traces are read, and drawn, without the library that computed them."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from memcalib.problem import CHANNELS, ORDERED_SIGN, RIGHT_OR_OVER, UNDER
from memcalib.io.records import DataError
from memcalib.trainer.trace_files import SCHEMA, read_traces, trace_files, trace_of


def answer_row(step: int, row: int) -> dict:
    """A made-up answer of three tokens."""
    return {
        "step": step,
        "row": row,
        "example_id": f"e{row}",
        "reward": 1.0,
        "scored": True,
        "question": "When?",
        "response": "In July.",
        "token_ids": [5, 6, 7],
        "tokens": ["In", " July", "."],
        "advantage": 0.5,
        "ends": [2, 7, 8],
        "token_advantage": [0.25, 1.0, 0.25],
    }


def channel_row(step: int, row: int) -> dict:
    """One channel of the made-up answer; credit is moved in every second row."""
    return {
        "step": step,
        "row": row,
        "example_id": f"e{row}",
        "reward": 1.0,
        "scored": True,
        "atom_ids": ["a1"],
        "atoms": ["The trip is in July."],
        "channel": "C+",
        "advantage": 0.7,
        "localized": row % 2 == 0,
        "above_gate": True,
        "opened": True,
        "strength": 0.75,
        "threshold": 0.1,
        "d": [0.0, 2.0, 0.0],
        "q": [0.0, 1.9, 0.0],
        "m": [0.5, 2.0, 0.5],
    }


def write_step(folder: Path, step: int, answers: int = 2) -> Path:
    """A file of made-up answers, each with one channel."""
    rows = []
    for row in range(answers):
        rows += [answer_row(step, row), channel_row(step, row)]
    metadata = {"memcalib": json.dumps({"version": 1, "head": {"method": "memcalib-rl"}})}
    path = folder / f"step-{step:06d}.parquet"
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA.with_metadata(metadata)), path)
    return path


def test_a_page_is_drawn_without_torch(tmp_path):
    write_step(tmp_path, 1)
    script = (
        "import sys\nfrom memcalib.report.credit_viewer import write_trace_page\n"
        "print(write_trace_page(sys.argv[1]))\n"
        "print([name for name in ('torch', 'transformers', 'trl') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    page = done.stdout.splitlines()[0]
    loaded = done.stdout.splitlines()[-1]
    assert loaded == "[]"
    assert "July" in (tmp_path / "traces.html").read_text()
    assert "traces.html" in page


def test_steps_and_answers_are_found(tmp_path):
    files = [write_step(tmp_path, number) for number in (3, 12)]
    assert trace_files(tmp_path) == files
    assert trace_files(tmp_path, [12]) == files[1:]
    (tmp_path / "run").mkdir()
    (tmp_path / "traces").mkdir()
    assert write_step(tmp_path / "traces", 1) not in trace_files(tmp_path), (
        "files in the folder itself come first"
    )
    frame = read_traces(tmp_path, [12])
    assert len(frame) == 4
    assert set(frame["step"]) == {12}
    assert set(frame["method"]) == {"memcalib-rl"}
    channel = trace_of(frame, 12, 1)["channels"]["C+"]
    assert channel["m"] == [0.5, 2.0, 0.5]
    assert not channel["localized"]
    with pytest.raises(KeyError, match="step 12, row 9: found 0 answers"):
        trace_of(frame, 12, 9)
    two_columns = read_traces(tmp_path, columns=["channel", "localized"])
    assert list(two_columns.columns) == ["channel", "localized", "method"]


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="trace_every above 0"):
        trace_files(tmp_path)
    write_step(tmp_path, 1)
    with pytest.raises(ValueError, match=r"no traces of step 2; allowed: \[1\]"):
        trace_files(tmp_path, [1, 2])
    with pytest.raises(ValueError, match="unknown column 'colour'"):
        read_traces(tmp_path, columns=["colour"])
    (tmp_path / "step-000002.parquet").write_bytes(b"half")
    pq.write_table(pa.table({"step": [3]}), tmp_path / "step-000003.parquet")
    with pytest.raises(DataError) as error:
        read_traces(tmp_path)
    files = {Path(violation.file).name for violation in error.value.violations}
    assert files == {"step-000002.parquet", "step-000003.parquet"}


def test_the_groups_of_channels_are_those_of_the_signs():
    assert len(CHANNELS) == len(ORDERED_SIGN) == 9
    assert {*RIGHT_OR_OVER, *UNDER, "A+"} == set(CHANNELS)
    assert not set(RIGHT_OR_OVER) & set(UNDER)
    assert all(name[0] > name[1] for name in UNDER), "used less than it should have been"
