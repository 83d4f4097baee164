"""What failed is counted once: a failed answer has no text, and is not an empty answer."""

from memcalib.io.records import write_jsonl
from memcalib.problem import Rollout, sample_records
from memcalib.report.run_data import load_run
from memcalib.report.tables import failures_table


def test_a_failed_answer_is_not_counted_as_empty(tmp_path):
    rows = [
        ("stop", ""),
        ("stop", " "),
        ("stop", "Pack a jar."),
        ("length", "Pack a"),
        *[("error", "")] * 3,
    ]
    rollouts = []
    for example, (finish, text) in zip(sample_records(), rows, strict=False):
        error = "timeout: late" if finish == "error" else None
        rollouts.append(
            Rollout(
                example_id=example.id, model="m", response=text, finish_reason=finish, error=error
            )
        )
    write_jsonl(tmp_path / "examples.jsonl", sample_records())
    write_jsonl(tmp_path / "rollouts.jsonl", rollouts)
    (row,) = failures_table(load_run(tmp_path)).to_dict("records")
    assert (row["answers"], row["cut off"], row["empty"], row["failed"]) == (7, 1, 2, 3)


def test_withheld_answers_have_columns_of_their_own(tmp_path):
    ends = ["content_filter", "content_filter", "tool_calls", "stop"]
    rollouts = [
        Rollout(example_id=example.id, model="m", response="Pack" * (k == 1), finish_reason=finish)
        for k, (example, finish) in enumerate(zip(sample_records(), ends, strict=False))
    ]
    write_jsonl(tmp_path / "examples.jsonl", sample_records())
    write_jsonl(tmp_path / "rollouts.jsonl", rollouts)
    (row,) = failures_table(load_run(tmp_path)).to_dict("records")
    assert (row["content filter"], row["tool calls"], row["empty"], row["failed"]) == (2, 1, 1, 0)
