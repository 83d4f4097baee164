"""RPEval: the loader under damage, and every metric against slow, obvious loops."""

import json
import math
import threading
import warnings
from collections import defaultdict
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import judgment_lists, levels, make
from memcalib.evaluation import rpeval
from memcalib.judge import LLMJudge
from memcalib.scoring.judge_runs import judge_rollouts
from memcalib.inference.client import Endpoint
from memcalib.metrics import LEAST_GROUPS, constant_policy, load_judgments
from memcalib.problem import Level, check_example, judgment_for
from memcalib.io.records import DataError
from memcalib.inference.rollout import EndpointBackend, generate
from memcalib.evaluation.rpeval import RPEVAL_FILES, RPEVAL_METRICS, load_rpeval
from memcalib.settings.judges import RPEVAL_JUDGE, RPEVAL_SAMPLING
from memcalib.judge import load_prompt, prompt_names

drawn = settings(max_examples=60, deadline=None, derandomize=True)
FIVE = [("AAA", "AAA"), ("ABC", "ABB"), ("ACB", "CAA"), ("BBCA", "CBAB"), ("AC", "CC")]


def answers(*pairs, **fields):
    return [
        make([Level.parse(x) for x in gold], [Level.parse(x) for x in actual], f"e{k}", **fields)
        for k, (gold, actual) in enumerate(pairs)
    ]


def slow(judgments):
    """The definitions with fractions, one preference at a time;
    balanced accuracy is None when a target is missing.
    """
    rows = right = over = under = inter = total = whole = 0
    target_counts = defaultdict(int)
    hit = defaultdict(int)
    for j in judgments:
        rows += 1
        whole += all(a.ideal == a.actual for a in j.atoms)
        for a in j.atoms:
            total += 1
            target_counts[a.ideal.wire] += 1
            hit[a.ideal.wire] += a.ideal == a.actual
            right += a.ideal == a.actual
            over += a.actual.wire == "C" and a.ideal.wire in "AB"
            under += a.actual.wire == "A" and a.ideal.wire in "BC"
            inter += a.actual.wire == "B" and a.ideal.wire in "AC"
    metrics = {"Macro": Fraction(whole, rows)}
    metrics |= {
        "Micro": Fraction(right, total),
        "OPB": Fraction(over, total),
        "UPB": Fraction(under, total),
    }
    metrics["RII"] = Fraction(inter, total)
    metrics["Balanced"] = (
        sum(Fraction(hit[u], target_counts[u]) for u in "ABC") / 3
        if len(target_counts) == 3
        else None
    )
    return {name: None if value is None else 100 * value for name, value in metrics.items()}


def same(value, want):
    return math.isnan(value) if want is None else value == pytest.approx(float(want), abs=1e-9)


# --- metrics


def test_five_answers_worked_by_hand():
    counts = rpeval.usage_counts(answers(*FIVE))
    assert counts.shape == (5, 3, 3) and counts.sum() == 15
    got = rpeval.rpeval_metrics(counts)
    assert (got["Macro"], got["OPB"], got["UPB"]) == (20, 20, 20)
    assert got["Micro"] == pytest.approx(700 / 15) and got["RII"] == pytest.approx(200 / 15)
    assert got["Balanced"] == pytest.approx(100 * (4 / 7 + 1 / 2 + 1 / 4) / 3)


@pytest.mark.parametrize(
    ("row", "right", "over", "under", "inter"),
    [(0, 3, 0, 0, 0), (1, 2, 0, 0, 1), (2, 0, 1, 2, 0), (3, 1, 1, 1, 1), (4, 1, 1, 0, 0)],
)
def test_each_of_the_five_rows(row, right, over, under, inter):
    got = rpeval.rpeval_metrics(rpeval.usage_counts(answers(FIVE[row])))
    size = len(FIVE[row][0])
    assert [got[m] * size / 100 for m in RPEVAL_METRICS[1:]] == pytest.approx(
        [right, over, under, inter]
    )
    assert got["Macro"] == 100 * (right == size)


@drawn
@given(judgment_lists(unscored=False))
def test_metrics_equal_the_loop(judgments):
    got = rpeval.rpeval_metrics(rpeval.usage_counts(judgments))
    want = slow(judgments)
    assert got.keys() == want.keys()
    assert all(same(got[name], want[name]) for name in got)
    assert got["Micro"] == pytest.approx(100 - got["OPB"] - got["UPB"] - got["RII"])


@drawn
@given(judgment_lists())
def test_table_equals_the_loop_over_seeds(judgments):
    scored = [j for j in judgments if all(a.actual is not None for a in j.atoms)]
    if not scored:
        with pytest.raises(ValueError, match="the metrics are undefined"):
            rpeval.score_rpeval(judgments, resamples=5)
        return
    seeds = sorted({j.seed for j in scored})
    by_seed = [slow([j for j in scored if j.seed == seed]) for seed in seeds]
    row = rpeval.score_rpeval(judgments, resamples=20).iloc[0]
    for name in (*RPEVAL_METRICS, "Balanced"):
        values = [values[name] for values in by_seed]
        mean = None if None in values else sum(values) / len(values)
        assert same(row[name], mean)
        if mean is None or len(values) == 1:
            assert math.isnan(row[f"{name}_std"])
            continue
        assert row[f"{name}_std"] == pytest.approx(
            float(sum((v - mean) ** 2 for v in values) / len(values)) ** 0.5
        )
    assert row["unscored_responses"] == len(judgments) - len(scored)
    assert row["unscored_preferences"] == sum(a.actual is None for j in judgments for a in j.atoms)
    assert (row["responses"], row["seeds"]) == (len(judgments), len({j.seed for j in judgments}))


@drawn
@given(judgment_lists(unscored=False), st.integers(0, 9))
def test_intervals_equal_a_loop_that_draws_questions(judgments, seed):
    row = rpeval.score_rpeval(judgments, resamples=30, seed=seed).iloc[0]
    questions = sorted({j.question_id for j in judgments})
    if len(questions) < LEAST_GROUPS:
        assert all(math.isnan(row[f"{name}_low"]) for name in RPEVAL_METRICS)
        return
    draws = np.random.default_rng(seed).integers(len(questions), size=(30, len(questions)))
    means = defaultdict(list)
    for draw in draws:
        per_seed = defaultdict(list)
        for s in {j.seed for j in judgments}:
            drawn_judgments = [
                j for k in draw for j in judgments if j.seed == s and j.question_id == questions[k]
            ]
            if not drawn_judgments:
                continue
            for name, value in slow(drawn_judgments).items():
                per_seed[name].append(value)
        for name in RPEVAL_METRICS:
            means[name].append(sum(map(float, per_seed[name])) / len(per_seed[name]))
    for name in RPEVAL_METRICS:
        want = np.percentile(means[name], [2.5, 97.5])
        assert [row[f"{name}_low"], row[f"{name}_high"]] == pytest.approx(list(want), abs=1e-9)


def test_balanced_interval_averages_the_three_recalls():
    pairs = [("ABC", "ABA"), ("ABC", "AAC"), ("CBA", "CBB")]
    judged = answers(*pairs, *pairs, seed=1)
    row = rpeval.score_rpeval(judged, resamples=50).iloc[0]
    draws = np.random.default_rng(0).integers(6, size=(50, 6))
    values = [float(slow([judged[k] for k in draw])["Balanced"]) for draw in draws]
    assert [row["Balanced_low"], row["Balanced_high"]] == pytest.approx(
        list(np.percentile(values, [2.5, 97.5]))
    )


def test_ddof_is_an_option():
    judged = answers(("AB", "AB"), seed=1) + answers(("AB", "BB"), seed=2)
    population, sample = (rpeval.score_rpeval(judged, ddof=d).iloc[0] for d in (0, 1))
    assert (population["Macro_std"], population["Micro_std"]) == (50, 25)
    assert sample["Macro_std"] == pytest.approx(50 * 2**0.5)


def test_repeated_questions_widen_the_interval():
    rng = np.random.default_rng(0)
    luck = rng.random(20) < 0.5
    judged = [make([0], [0 if luck[k // 5] else 1], f"e{k}", f"q{k // 5}") for k in range(100)]
    alone = [j.model_copy(update={"question_id": j.example_id}) for j in judged]
    wide, narrow = (rpeval.score_rpeval(rows).iloc[0] for rows in (judged, alone))
    assert wide["Macro"] == narrow["Macro"] == 100 * luck.mean()
    assert wide["Macro_high"] - wide["Macro_low"] > 1.8 * (
        narrow["Macro_high"] - narrow["Macro_low"]
    )


def test_unscored_answers_change_only_the_counts():
    judged = answers(*FIVE)
    lost = [make([0, 2], [None, 2], "e9"), make([0], [0], "e8", error="the judge gave up")]
    before, after = (rpeval.score_rpeval(rows).iloc[0] for rows in (judged, judged + lost))
    assert all(before[m] == after[m] for m in (*RPEVAL_METRICS, "Balanced"))
    assert (after["unscored_responses"], after["unscored_preferences"], after["preferences"]) == (
        2,
        1,
        18,
    )
    with pytest.raises(ValueError, match="unscored judgment of 'e9'"):
        rpeval.usage_counts(lost)


def test_metric_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="the metrics are undefined"):
        rpeval.rpeval_metrics(rpeval.usage_counts([]))
    with pytest.raises(ValueError, match="the metrics are undefined"):
        rpeval.score_rpeval([])


def test_models_and_judges_are_kept_apart():
    judged = answers(*FIVE, judge="one") + answers(("AB", "AB"), judge="two")
    table = rpeval.score_rpeval(judged).set_index("judge")
    assert table["Macro"].to_dict() == {"one": 20.0, "two": 100.0}
    with pytest.raises(ValueError, match="judged twice"):
        rpeval.score_rpeval(judged + judged[:1])


# --- constants


@pytest.fixture(scope="module")
def published_shape():
    """Judgments with the published file's 150 rows, 641/79/83 targets and 60 rows of only
    Ignore.
    """
    needed = ["BC"] * 72 + ["B"] * 7 + ["C"] * 11 + [""] * 60
    targets = ["A" * (4 + (k < 41)) + needed[k] for k in range(150)]
    rows = [
        make([Level.parse(x) for x in t], [Level.parse(x) for x in t], f"e{k}", f"q{k // 3}")
        for k, t in enumerate(targets)
    ]
    counts = rpeval.usage_counts(rows).sum(axis=(0, 2)).tolist()
    assert counts == [641, 79, 83] and sum(set(t) == {"A"} for t in targets) == 60
    return rows


def test_constant_predictors(published_shape):
    table = rpeval.rpeval_controls(published_shape).set_index("model")
    want = {
        "all Ignore": (40.00, 79.83, 0, 20.17, 0),
        "all Support": (0, 9.84, 0, 0, 90.16),
        "all Dominate": (0, 10.34, 89.66, 0, 0),
    }
    assert list(table.index) == list(want)
    for model, cells in want.items():
        assert tuple(table.loc[model, list(RPEVAL_METRICS)].astype(float).round(2)) == cells
    assert table["Balanced"].tolist() == pytest.approx([100 / 3] * 3)
    assert table["questions"].tolist() == [50] * 3


@drawn
@given(judgment_lists())
def test_constants_depend_on_targets_only(judgments):
    table = rpeval.rpeval_controls(judgments, resamples=5)
    for level, (_, row) in zip(Level, table.iterrows(), strict=True):
        want = slow(constant_policy(judgments, level))
        assert all(same(row[name], want[name]) for name in RPEVAL_METRICS)
        assert row["unscored_responses"] == 0


# --- published


def test_published_rows_obey_the_identity():
    table = rpeval.published_rpeval()
    assert (
        table["method"].tolist()[0] == "Base"
        and table["method"].tolist()[-1] == "MemCalib-RL"
        and len(table) == 8
    )
    assert (table[["Micro", "OPB", "UPB", "RII"]].sum(axis=1) - 100).abs().max() < 0.025
    last = table.iloc[-1]
    assert (last["Macro"], last["Macro_std"], last["RII"], last["RII_std"]) == (
        33.78,
        1.02,
        9.63,
        0.26,
    )


def test_measured_stands_beside_published(published_shape):
    two = [
        j.model_copy(update={"model": "perfect", "seed": seed})
        for j in published_shape
        for seed in (1, 2)
    ]
    none = make([0, 1], [None, None], model="silent", error="no answer")
    table = rpeval.rpeval_table([*two, none], resamples=50)
    assert table["source"].tolist() == ["measured"] * 2 + ["constant"] * 3 + ["published"] * 8
    rows = table.set_index("model")
    assert (
        rows.loc["perfect", "Macro ↑"] == "100.00 ± 0.00"
        and rows.loc["perfect", "unscored"] == "0 of 300"
    )
    assert set(rows.loc["silent", ["Macro ↑", "RII ↓", "Balanced ↑", "Micro 95 %"]]) == {
        "not scored"
    }
    assert rows.loc["silent", "unscored"] == "1 of 1"
    assert rows.loc["Qwen3-8B, Base", "UPB ↓"] == "3.53 ± 0.80"
    assert rows.loc["Qwen3-8B, Base", "Micro 95 %"] == "not published"
    assert not table.isna().any().any()


def test_the_table_divides_by_n_minus_one_unless_told():
    judged = answers(("AB", "AB"), seed=1) + answers(("AB", "BB"), seed=2)
    assert rpeval.rpeval_table(judged, resamples=20).loc[0, "Macro ↑"] == "50.00 ± 70.71"
    assert (
        rpeval.rpeval_table(judged, resamples=20, ddof=0, digits=1).loc[0, "Macro ↑"]
        == "50.0 ± 50.0"
    )


def test_bounds_are_missing_where_no_resample_has_every_target():
    judged = answers(*[("A", "A")] * 4, ("B", "B"), ("C", "C"))
    draws = {seed: np.random.default_rng(seed).integers(6, size=6) for seed in range(20)}
    without_last = next(seed for seed, draw in draws.items() if 5 not in draw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        row = rpeval.score_rpeval(judged, resamples=1, seed=without_last).iloc[0]
    assert row["Balanced"] == 100 and math.isnan(row["Balanced_low"]) and row["Micro_low"] == 100


def test_table_says_undefined_where_a_target_is_missing():
    table = rpeval.rpeval_table(answers(("AB", "AB"), ("AA", "AB")), resamples=20)
    assert table.loc[0, "Balanced ↑"] == table.loc[0, "Balanced 95 %"] == "undefined"
    assert table.loc[0, "Micro ↑"] == "75.00"


# --- loading

ROW = {
    "question": "晚饭吃什么？",
    "persona": ["用户对花生过敏。", "用户会弹吉他。"],
    "intent_type": "CA",
}


def write(path, rows, encoding="utf-8", **options):
    path.write_text(json.dumps(rows, ensure_ascii=False, **options), encoding=encoding)
    return path


def test_every_setting_loads_from_a_folder(tmp_path):
    chat = ["用户：我不能碰花生。\n助手：记下了。", "用户：练琴到很晚。\n助手：辛苦了。"]
    one = {
        "question": ROW["question"],
        "persona": ROW["persona"][0],
        "intent_type": "dominate",
        "reason": "…",
    }
    files = {
        "explicit-multi": [ROW],
        "implicit-multi": [ROW | {"implicit_persona": chat, "reason": ["…", "…"]}],
        "explicit-single": [one],
        "implicit-single": [
            one | {"implicit_persona": chat[0], "intent": "…", "intent_type": "支持性偏好"}
        ],
    }
    for setting, rows in files.items():
        (tmp_path / RPEVAL_FILES[setting]).parent.mkdir(exist_ok=True)
        write(tmp_path / RPEVAL_FILES[setting], rows)
    loaded = {setting: load_rpeval(tmp_path, setting)[0] for setting in files}
    assert [e.id for e in loaded.values()] == [f"rpeval-{setting}-0" for setting in files]
    letters = {
        setting: "".join(level.wire for level in e.levels.values()) for setting, e in loaded.items()
    }
    assert letters == dict(zip(files, ("CA", "CA", "C", "B"), strict=True))
    assert [b.memory_text for b in loaded["implicit-multi"].blocks] == chat
    assert [a.text for a in loaded["implicit-multi"].atoms] == ROW["persona"]
    assert loaded["implicit-multi"].reason == ["…", "…"] and loaded["implicit-single"].intent == "…"
    assert load_rpeval(tmp_path) == [loaded["explicit-multi"]]
    for example in loaded.values():
        assert example.domain == "rpeval" and example.question == ROW["question"]
        assert [
            v for v in check_example(json.loads(example.to_json())) if v.severity == "error"
        ] == []
        assert (
            all(len(b.atom_ids) == 1 for b in example.blocks)
            and example.atoms[0].usage_rubric is None
        )


@pytest.mark.parametrize(
    ("word", "level"),
    [
        ("ignore", "A"),
        ("support", "B"),
        ("supportive", "B"),
        ("支持性偏好", "B"),
        (" dominate ", "C"),
    ],
)
def test_words_for_one_preference(tmp_path, word, level):
    row = {"question": "?", "persona": "用户养猫。", "intent_type": word}
    (example,) = load_rpeval(write(tmp_path / "f.json", [row]))
    assert [read_level.wire for read_level in example.levels.values()] == [level]


text = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=12).filter(str.strip)


@drawn
@given(
    st.lists(
        st.tuples(text, st.lists(st.tuples(text, levels), min_size=1, max_size=5)),
        min_size=1,
        max_size=4,
    )
)
def test_loading_keeps_every_text_and_label(tmp_path_factory, drawn_rows):
    rows = [
        {
            "question": q,
            "persona": [t for t, _ in pairs],
            "intent_type": "".join("ABC"[u] for _, u in pairs),
        }
        for q, pairs in drawn_rows
    ]
    path = write(tmp_path_factory.mktemp("rpeval") / "f.json", rows)
    for (question, pairs), example in zip(drawn_rows, load_rpeval(path), strict=True):
        assert example.question == question
        assert [(a.text, int(a.ideal)) for a in example.atoms] == pairs
        assert [b.memory_text for b in example.blocks] == [t for t, _ in pairs]
        assert check_example(json.loads(example.to_json())) == [] or not any(u for _, u in pairs)


def test_a_byte_order_mark_is_fine(tmp_path):
    (example,) = load_rpeval(write(tmp_path / "f.json", [ROW], encoding="utf-8-sig"))
    assert example.atoms[1].text == "用户会弹吉他。"


def change(**fields):
    return [ROW, {k: v for k, v in (ROW | fields).items() if v is not ...}]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (
            change(intent_type="C"),
            "row 1: lengths: found persona 2, intent_type 1; allowed: 2 in each",
        ),
        (change(intent_type="CD"), "row 1: intent_type[1]: found 'D'; allowed: A, B, C"),
        (change(intent_type="ca"), "row 1: intent_type[0]: found 'c'; allowed: A, B, C"),
        (
            change(intent_type=["C", "A"]),
            "row 1: intent_type: found ['C', 'A']; allowed: a non-empty text",
        ),
        (change(intent_type=...), "row 1: intent_type: found nothing; allowed: a non-empty text"),
        (
            change(persona="用户会弹吉他。"),
            "row 1: persona: found '用户会弹吉他。'; allowed: a non-empty list of strings",
        ),
        (change(persona=[]), "row 1: persona: found []; allowed: a non-empty list of strings"),
        (
            change(persona=["用户会弹吉他。", " "]),
            "row 1: persona[1]: found ' '; allowed: a non-empty text",
        ),
        (
            change(persona=["用户会弹吉他。", 7]),
            "row 1: persona[1]: found 7; allowed: a non-empty text",
        ),
        (change(question=""), "row 1: question: found ''; allowed: a non-empty text"),
        (change(question=...), "row 1: question: found nothing; allowed: a non-empty text"),
        (change(question="\ud800"), "row 1: question: found '\\ud800'; allowed: a non-empty text"),
        (
            change(reason=["…"]),
            "row 1: lengths: found persona 2, intent_type 2, reason 1; allowed: 2 in each",
        ),
        ([ROW, "ROW"], "row 1: row: found 'ROW'; allowed: an object"),
        ([], "file: found list of 0; allowed: a JSON array of at least one row"),
        ({"rows": [ROW]}, "file: found dict of 1; allowed: a JSON array of at least one row"),
        (None, "file: found None; allowed: a JSON array of at least one row"),
        (
            [{"question": "?", "persona": "x", "intent_type": "Support"}],
            "allowed: ignore, 忽略偏好, support",
        ),
        (
            [ROW | {"implicit_persona": ["x"]}],
            "row 0: lengths: found persona 2, intent_type 2, implicit_persona 1",
        ),
    ],
)
def test_damaged_rows_are_named(tmp_path, rows, words):
    path = tmp_path / "multi_testset.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    with pytest.raises(DataError) as caught:
        load_rpeval(path)
    assert words in str(caught.value) and str(path) in str(caught.value)


def test_all_faults_of_a_file_are_listed(tmp_path):
    path = write(
        tmp_path / "f.json",
        [ROW | {"question": "", "persona": [1, 2]}, ROW, ROW | {"intent_type": "DE"}],
    )
    with pytest.raises(DataError) as caught:
        load_rpeval(path)
    violations = [(v.example_id, v.item, v.rule) for v in caught.value.violations]
    assert [rule for *_, rule in violations] == [
        "question",
        "persona[0]",
        "persona[1]",
        "intent_type[0]",
        "intent_type[1]",
    ]
    assert violations[-1][:2] == ("rpeval-explicit-multi-2", "row 2")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("[]".encode("utf-16"), "encoding: found byte 0xff at offset 0; allowed: UTF-8"),
        ("用户".encode("gb18030"), "encoding: found byte"),
        (b'[{"question": "?",\n oops}]', ":2: json: found"),
        (b"[" * 100_000, "allowed: one JSON array"),
        (b"", "allowed: one JSON array"),
    ],
)
def test_files_that_are_no_json(tmp_path, data, words):
    path = tmp_path / "f.json"
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        load_rpeval(path)
    assert words in str(caught.value)


def test_wrong_file_setting_or_path(tmp_path):
    path = write(tmp_path / "f.json", [ROW])
    with pytest.raises(DataError, match="found explicit-multi rows; allowed: implicit-multi rows"):
        load_rpeval(path, "implicit-multi")
    with pytest.raises(
        ValueError, match="found 'explicit'; allowed: explicit-multi, explicit-single"
    ):
        load_rpeval(path, "explicit")
    with pytest.raises(FileNotFoundError, match="multi_testset"):
        load_rpeval(tmp_path)


# --- statistics


@drawn
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.lists(st.tuples(st.integers(0, 3), levels), min_size=1, max_size=4),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_statistics_equal_the_loop(tmp_path_factory, rows):
    file_rows = [
        {
            "question": f"问题{q}",
            "persona": [f"偏好{p}" for p, _ in ps],
            "intent_type": "".join("ABC"[u] for _, u in ps),
        }
        for q, ps in rows
    ]
    statistics = rpeval.preference_statistics(
        load_rpeval(write(tmp_path_factory.mktemp("stats") / "f.json", file_rows))
    )
    assert (statistics["rows"], statistics["preferences"]) == (
        len(rows),
        sum(len(ps) for _, ps in rows),
    )
    assert statistics["distinct questions"] == len({q for q, _ in rows})
    assert [statistics[n] for n in ("Ignore", "Support", "Dominate")] == [
        sum(u == k for _, ps in rows for _, u in ps) for k in range(3)
    ]
    assert statistics["rows with only Ignore"] == sum(all(u == 0 for _, u in ps) for _, ps in rows)
    assert statistics["rows without Ignore"] == sum(all(u > 0 for _, u in ps) for _, ps in rows)
    twins = [
        sum(
            1
            for other in rows
            if other[0] == row[0] and sorted(p for p, _ in other[1]) == sorted(p for p, _ in row[1])
        )
        for row in rows
    ]
    assert statistics["rows that repeat a question with the same preferences"] == sum(
        n > 1 for n in twins
    )
    assert statistics["groups of such rows"] == pytest.approx(sum(1 / n for n in twins if n > 1))
    pairs = {
        (q, p): {u2 for q2, ps2 in rows for p2, u2 in ps2 if (q2, p2) == (q, p)}
        for q, ps in rows
        for p, _ in ps
    }
    assert statistics["distinct pairs of question and preference"] == len(pairs)
    assert statistics["pairs with more than one target"] == sum(
        len(us) > 1 for us in pairs.values()
    )
    assert sum(count for name, count in statistics.items() if name.startswith("rows of K")) == len(
        rows
    )


def test_repeats_are_found_in_any_order(tmp_path):
    turned = ROW | {"persona": ROW["persona"][::-1], "intent_type": "AC"}
    other = ROW | {"persona": ["用户对花生过敏。", "用户会吹笛子。"]}
    statistics = rpeval.preference_statistics(
        load_rpeval(write(tmp_path / "f.json", [ROW, turned, other]))
    )
    assert (
        statistics["rows that repeat a question with the same preferences"] == 2
        and statistics["groups of such rows"] == 1
    )
    assert (
        statistics["distinct pairs of question and preference"],
        statistics["most rows of one question"],
    ) == (3, 3)


def test_perfect_judgments_of_a_loaded_file(tmp_path):
    examples = load_rpeval(write(tmp_path / "f.json", [ROW, ROW | {"intent_type": "AB"}]))
    row = rpeval.score_rpeval([judgment_for(e, e.levels) for e in examples]).iloc[0]
    assert (row["Macro"], row["Micro"], row["Balanced"], row["questions"]) == (100, 100, 100, 1)


# --- asking and judging over HTTP


@pytest.fixture
def stub():
    """A server whose model repeats its second memory and whose judge calls what is repeated
    Support; it keeps requests.
    """
    received = []

    def say(request):
        text = request["messages"][-1]["content"]
        if request["model"] == "model":
            return next(line[3:] for line in text.splitlines() if line.startswith("2. "))
        data = json.loads(text)
        if isinstance(data, list) or "乱" in data["current_query"]:
            return "这不是 JSON"
        rows = [
            (a["atom_id"], a["text"] in data["model_response"], a["text"])
            for a in data["atomic_rubrics"]
        ]

        def verdict(used, text):
            return {
                "predicted_usage_level": "AB"[used],
                "evidence_quote": text if used else "",
                "reason": "",
            }

        return json.dumps(
            {"atom_judgments": [{"atom_id": i} | verdict(used, text) for i, used, text in rows]}
        )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.append(request)
            repair = len([m for m in request["messages"] if m["role"] == "user"]) > 1
            message = {"role": "assistant", "content": "还是不行" if repair else say(request)}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            head = {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": request["model"],
                "usage": usage,
            }
            body = json.dumps(head | {"choices": [choice]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def at(model):
        return Endpoint(
            model=model,
            base_url=f"http://127.0.0.1:{server.server_port}/v1",
            key_env="",
            attempts=1,
            concurrency=2,
        )

    yield at, received
    server.shutdown()
    server.server_close()


def test_from_file_to_table_over_http(tmp_path, stub):
    at, received = stub
    rows = [
        ROW,
        ROW | {"question": "乱不乱？"},
        ROW | {"question": "中午呢？", "intent_type": "AB"},
    ]
    examples = load_rpeval(write(tmp_path / "f.json", rows))
    answers = tmp_path / "rollouts.jsonl"
    verdicts = tmp_path / "judgments.jsonl"

    def run():
        generate(examples, EndpointBackend(at("model")), RPEVAL_SAMPLING, answers)
        judge_rollouts(examples, answers, LLMJudge(at("judge"), RPEVAL_JUDGE), verdicts)
        return load_judgments(verdicts)

    judgments = run()
    model_requests, judging = (
        [request for request in received if request["model"] == model]
        for model in ("model", "judge")
    )
    assert sorted(request["seed"] for request in model_requests) == sorted([42, 43, 44] * 3)
    assert {request["temperature"] for request in received} == {1.0}
    assert {request["top_p"] for request in received} == {1.0}, "the model's and the judge's"
    assert all(request["chat_template_kwargs"]["enable_thinking"] is False for request in received)
    data = json.loads(judging[0]["messages"][1]["content"])
    assert {a["text"] for a in data["atomic_rubrics"]} == set(ROW["persona"])
    assert not any("u_star" in atom or "usage_rubric" in atom for atom in data["atomic_rubrics"])
    assert load_prompt("rpeval-1") in judging[0]["messages"][0]["content"]
    row = rpeval.score_rpeval(judgments).iloc[0]
    assert (row["responses"], row["unscored_responses"], row["unscored_preferences"]) == (9, 3, 6)
    assert (row["Macro"], row["Micro"], row["RII"], row["UPB"]) == (50, 50, 25, 25)
    levels = {j.example_id: [a.actual for a in j.atoms] for j in judgments if j.scored}
    assert levels == {f"rpeval-explicit-multi-{k}": [Level.IGNORE, Level.BOUND] for k in (0, 2)}
    before = len(received)
    assert run() == judgments and len(received) == before


def test_settings_are_the_papers():
    assert (RPEVAL_SAMPLING.temperature, RPEVAL_SAMPLING.top_p, RPEVAL_SAMPLING.thinking) == (
        1,
        1,
        False,
    )
    assert len(RPEVAL_SAMPLING.seeds) == 3 and RPEVAL_SAMPLING.prompt_template == "plain"
    assert (RPEVAL_JUDGE.temperature, RPEVAL_JUDGE.top_p) == (1, 1)
    assert (RPEVAL_JUDGE.blind, RPEVAL_JUDGE.prompt) == (
        True,
        "rpeval-1",
    )
    assert "rpeval-1" in prompt_names()


def test_prompt_names_the_three_levels_once_each():
    rules = load_prompt("rpeval-1")
    assert [
        rules.count(f"- `{letter}`, {name}.")
        for letter, name in zip("ABC", ("Ignore", "Support", "Dominate"), strict=True)
    ] == [1] * 3
    assert max(map(len, rules.splitlines())) <= 130
