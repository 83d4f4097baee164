"""`mc.evaluate` and `mc.plot` as somebody types them first: judges that return levels, and what is
said to a name in the place of a model.
"""

import subprocess
import sys

import pytest

import memcalib as mc
from memcalib.io.records import DataError, ForeseenError
from memcalib.problem import Level, judgment_of
from memcalib.products.micro.world import make_examples

EXAMPLES = make_examples("short", 6, 0, "test")
ONCE = {"seeds": [1]}


def silent(messages):
    return "I do not know."


def everything_bound(example, response):
    return {atom_id: "Bound" for atom_id in example.levels}


def test_a_judge_function_may_return_levels(tmp_path):
    judgments = mc.evaluate(
        EXAMPLES, model=silent, judge=everything_bound, sampling=ONCE, out=tmp_path
    )
    assert len(judgments) == 6 and all(judgment.scored for judgment in judgments)
    assert {judgment.judge for judgment in judgments} == {"everything_bound"}
    assert {atom.actual for judgment in judgments for atom in judgment.atoms} == {Level.BOUND}
    again = mc.evaluate(EXAMPLES, model=silent, judge=everything_bound, sampling=ONCE, out=tmp_path)
    assert again == judgments


def test_levels_may_be_missing_and_are_then_unscored():
    def first_atom(example, response):
        return {next(iter(example.levels)): "C"}

    judgments = mc.evaluate(EXAMPLES, model=silent, judge=first_atom, sampling=ONCE)
    assert not any(judgment.scored for judgment in judgments)


@pytest.mark.parametrize("level", ["Control", "control", "C", 2, Level.CONTROL])
def test_a_level_is_given_by_name_letter_or_number(level):
    example = mc.Example.of("Plan a dinner.", {"Is vegan.": "control"})
    if isinstance(level, int) and not isinstance(level, Level):
        level = Level(level)
    judgment = judgment_of(example, dict.fromkeys(example.levels, level), "me")
    assert judgment.atoms[0].actual is Level.CONTROL and judgment.judge == "me"


def test_answers_of_a_log_take_a_judge_that_returns_levels():
    row = {"query": "Bake?", "memories": [{"text": "No nuts.", "level": "C"}], "answer": "A cake."}
    judgments = mc.evaluate([row], judge=everything_bound, log={"consent": "terms"})
    assert judgments[0].under == 1
    unlabelled = {**row, "memories": [{"text": "No nuts."}]}
    (footprint,) = mc.evaluate([unlabelled], judge=everything_bound, log={"consent": "terms"})
    assert footprint.atoms[0].actual is Level.BOUND


def test_rows_without_consent_say_what_to_pass_from_python():
    row = {"query": "Bake?", "memories": [{"text": "No nuts.", "level": "C"}], "answer": "A cake."}
    with pytest.raises(DataError, match=r'log=\{"consent": NAME\}'):
        mc.evaluate([row], judge=everything_bound)


def test_other_judges_are_named_with_what_is_allowed():
    with pytest.raises(ForeseenError, match="a mapping from atom id to level"):
        mc.evaluate(EXAMPLES, model=silent, judge=lambda example, response: "A", sampling=ONCE)
    with pytest.raises(DataError, match="found 'zz'; allowed: an atom of the example"):
        mc.evaluate(EXAMPLES, model=silent, judge=lambda e, r: {"zz": "A"}, sampling=ONCE)
    with pytest.raises(TypeError, match=r"judge: found 'gpt-4o'; allowed: mc.Endpoint"):
        mc.evaluate(EXAMPLES, model=silent, judge="gpt-4o")


def test_the_name_of_a_model_is_answered_with_an_endpoint():
    with pytest.raises(TypeError, match=r"allowed: mc.Endpoint\(model='gpt-4o'\)"):
        mc.evaluate(EXAMPLES, model="gpt-4o", judge=everything_bound)


def test_plot_draws_judgments_and_files(tmp_path):
    judgments = mc.evaluate(
        EXAMPLES, model=silent, judge=everything_bound, sampling=ONCE, out=tmp_path
    )
    plane = mc.plot(tmp_path / "judgments.jsonl")
    assert plane.axes[0].get_xlabel().startswith("sMOS")
    assert mc.plot(judgments, "channels").axes
    with pytest.raises(ValueError, match="kind: found 'bars'; allowed: plane, channels"):
        mc.plot(judgments, "bars")


def test_a_readable_table_is_printed_whole_in_a_terminal():
    code = (
        "import memcalib as mc\n"
        "e = mc.Example.of('Plan a dinner.', {'Is vegan.': 'control'})\n"
        "j = mc.judgment_for(e, e.levels, model='a model with a name that takes much room')\n"
        "print(mc.readable(mc.score([j])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "..." not in done.stdout and "unscored" in done.stdout.splitlines()[0], done.stderr


def test_dir_shows_what_is_public():
    assert dir(mc) == sorted(mc.__all__) and "plot" in dir(mc)
