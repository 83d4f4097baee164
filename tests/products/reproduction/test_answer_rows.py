"""The rows that experiments keep of their answers give back metrics and confusions."""

import numpy as np

from memcalib.products.exam.exam import misread_judgments
from memcalib.metrics import summary
from memcalib.products.micro.world import exact_judge, make_examples
from memcalib.problem import Level, judgment_for
from memcalib.products.reproduction.seed_tables import answer_rows

EXAMPLES = make_examples("short", 20, 3)
TRUTH = [exact_judge(example, "Plan it soon.") for example in EXAMPLES]


def test_metrics_follow_from_the_letters():
    judged = misread_judgments(TRUTH, np.full((3, 3), 1 / 3), seed=1)
    rows = answer_rows(judged, arm="GDPO", train_seed=7)
    again = []
    for example, row in zip(EXAMPLES, rows.to_dict("records"), strict=True):
        assert row["example_id"] == example.id and row["arm"] == "GDPO" and row["train_seed"] == 7
        assert list(row["ideal"]) == [level.wire for level in example.levels.values()]
        levels = dict(zip(example.levels, map(Level.parse, row["actual"]), strict=True))
        again.append(judgment_for(example, levels))
    assert summary(again) == summary(judged)


def test_an_unscored_atom_is_no_level():
    judgment = TRUTH[0].model_copy(deep=True)
    judgment.atoms[0].actual = None
    [row] = answer_rows([judgment]).to_dict("records")
    assert row["actual"][0] == "-" and "-" not in row["actual"][1:] + row["ideal"]
    assert answer_rows([]).empty
