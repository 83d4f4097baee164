"""Stance errors planted in a log are found about as often as the exam of the judge says, and an
exam tells a judge that errs in one direction alone.
"""

import importlib.util
from pathlib import Path

import pytest

_FILE = Path(__file__).parents[2] / "benchmarks" / "bench_stance.py"
_SPEC = importlib.util.spec_from_file_location("bench_stance", _FILE)
bench_stance = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(bench_stance)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_by_the_two_commands_each_share_on_the_log_lies_in_the_exams_interval(tmp_path):
    table = bench_stance.measured(30, 0, tmp_path)
    assert len(table) == 20 and table["inside"].sum() >= 19, table.to_string()
    verdicts = table.groupby("judge")["verdict"].first()
    assert verdicts["misreads none"] == "passed"
    assert verdicts["reads corrects as follows"] == "failed"


@pytest.mark.parametrize("name", bench_stance.JUDGES)
def test_over_many_draws_the_exam_holds_what_happens_on_a_log(name):
    row = bench_stance.by_draws(name, each=60, draws=40, seed=0)
    del row["judge"]
    assert min(row.values()) >= 80, row
