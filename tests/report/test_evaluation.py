"""Reports of evaluations and comparisons: numbers, missing pieces, hostile text,
quotes in place, speed on long answers.
"""

import csv
import io
import json
import random
import re
import shutil
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strategies import judgment_lists, make
from test_report import HOSTILE, Tags, safe

from memcalib.scoring import quotes as evidence
from memcalib import metrics
from memcalib.commands.cli import main
from memcalib.report import comparison, page, tables
from memcalib.report import evaluation_report as evaluation
from memcalib.report import run_data as rows
from memcalib.report import training_report as training
from memcalib.evaluation.breakdown import TORN
from memcalib.io.runs import manifest, write_manifest
from memcalib.io.settings import package_data
from memcalib.metrics import METRICS, metric_table
from memcalib.problem import Level, Rollout, judgment_for, sample_records, text_hash
from memcalib.io.records import DataError, write_jsonl

drawn = settings(max_examples=60, deadline=None, derandomize=True)


def play(
    folder,
    models=("m",),
    text="",
    seeds=(1, 2),
    conditions=("full_memory",),
    judge="j@1",
    copies=1,
    **manifest_fields,
):
    """An evaluation of the shipped records under dice: answers that name their atoms,
    quotes from them, some at fault.
    """
    folder.mkdir(parents=True, exist_ok=True)
    examples = [
        e.model_copy(update={"id": f"{e.id}-{c}{text}", "question": f"{e.question} ({c}){text}"})
        for c in range(copies)
        for e in sample_records()
    ]
    rollouts = []
    judgments = []
    for model in models:
        for condition in conditions:
            for seed in seeds:
                rng = random.Random(f"{model} {condition} {seed}")
                for example in examples:
                    answer, judgment = _answered(example, rng, condition, text)
                    head = {
                        "model": model,
                        "condition": condition,
                        "seed": seed,
                        "example_hash": example.content_hash,
                    }
                    usage = {"prompt_tokens": 100, "completion_tokens": 20, "seconds": rng.random()}
                    settings_ = {"temperature": 1.0, "framing": "plain" + text}
                    rollouts.append(
                        Rollout(
                            example_id=example.id,
                            response=answer,
                            usage=usage,
                            settings=settings_,
                            **head,
                        )
                    )
                    extra = {
                        "response_hash": text_hash(answer),
                        "usage": usage,
                        "settings": {"blind": False},
                    }
                    judgments.append(
                        judgment.model_copy(update=head | extra | {"judge": judge + text})
                    )
    for name, written in (("examples", examples), ("rollouts", rollouts), ("judgments", judgments)):
        write_jsonl(folder / f"{name}.jsonl", written)
    content = manifest(
        {"note": text},
        seeds,
        folder / "examples.jsonl",
        judge,
        command=["memcalib", "evaluate", text],
    )
    write_manifest(folder, content | manifest_fields)
    return folder


def _answered(example, rng, condition, text):
    bare = condition == "no_memory"

    def shift():
        return rng.choice([-1, 0, 0, 0, 1])

    actual = {
        i: Level.IGNORE if bare else Level(min(max(u + shift(), 0), 2))
        for i, u in example.levels.items()
    }
    words = {i: f"Here **{i}** counts{text}." for i, level in actual.items() if level}
    judgment = judgment_for(
        example, actual, task_quality=rng.randrange(5), safety_failure=rng.random() < 0.2
    )
    for atom in judgment.atoms:
        if atom.atom_id in words:
            lost = rng.random() < 0.1
            atom.quote = "never said" + text if lost else words[atom.atom_id].replace("*", "")
            atom.grounded = not lost
            atom.reason = "named" + text
    return " ".join(words.values()) or "Nothing.", judgment


def change(folder, edit, name="judgments"):
    """Rewrite a file of rows with an edit of each parsed row."""
    path = folder / f"{name}.jsonl"
    parsed = [json.loads(line) for line in path.read_text().splitlines()]
    edited = (edit(k, row) for k, row in enumerate(parsed))
    path.write_text("".join(json.dumps(row) + "\n" for row in edited if row is not None))


@pytest.fixture
def no_pictures(monkeypatch):
    """Three quarters of the time of a page goes into its pictures;
    tests of notes and words do not look at them.
    """
    monkeypatch.setattr(evaluation, "evaluation_figures", lambda run, tables: {})


# quotes


def slow_spans(quote, response):
    """Fold letter by letter, remember which letter each folded one came from, and search."""
    shown = evidence.blanked(response)
    folded = [
        (letter, k) for k, character in enumerate(shown) for letter in evidence.fold(character)
    ]
    text = "".join(letter for letter, _ in folded)
    position = 0
    spans = []
    for piece in evidence.quote_pieces(quote):
        start = text.find(piece, position)
        if start < 0:
            return []
        position = start + len(piece)
        spans.append((folded[start][1], folded[position - 1][1] + 1))
    return spans


@drawn
@given(
    st.text(alphabet="aBß*_ \n“”.…İé—x", max_size=60),
    st.lists(st.text(alphabet="aBß*_ \n“”.…İé—x", max_size=8), max_size=4),
    st.integers(1, 9),
)
def test_located_quotes_equal_the_slow_way_for_every_stretch(response, quoted, stretch):
    located = page.locate(quoted, response, stretch)
    assert located == [slow_spans(quote, response) for quote in quoted]
    assert [bool(spans) for spans in located] == evidence.grounded(quoted, response)


@drawn
@given(st.data())
def test_a_piece_of_the_answer_is_found_where_it_stands_or_earlier(data):
    response = data.draw(st.text(alphabet="abcß é\n*", min_size=1, max_size=80))
    start = data.draw(st.integers(0, len(response) - 1))
    end = data.draw(st.integers(start + 1, len(response)))
    spans = page.locate([response[start:end]], response, 7)[0]
    assert bool(spans) == bool(evidence.quote_pieces(response[start:end]))
    if spans:
        (a, b) = spans[0]
        assert a <= end and evidence.fold(response[start:end]) in evidence.fold(response[a:b])


spans_of = st.dictionaries(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.integers(0, 299), st.integers(1, 40)).map(
            lambda p: (p[0], min(p[0] + p[1], 300))
        ),
        max_size=3,
    ),
    max_size=4,
)


@drawn
@given(spans_of, st.integers(1, 400), st.integers(1, 60), st.data())
def test_segments_rebuild_the_answer_and_mark_exactly_the_quotes(spans, limit, margin, data):
    response = "".join(chr(97 + k % 26) for k in range(300))
    kinds = {number: data.draw(st.sampled_from(page.KINDS_OF_USE)) for number in spans}
    position = 0
    for segment in page.segments(response, spans, kinds, limit, margin):
        if segment.left_out:
            assert not segment.text
            position += segment.left_out
            continue
        assert segment.text and response[position : position + len(segment.text)] == segment.text
        for k in range(position, position + len(segment.text)):
            numbers = sorted(
                n for n, quote_spans in spans.items() if any(a <= k < b for a, b in quote_spans)
            )
            assert list(segment.numbers) == numbers
            ranked = [kind for kind in page.KINDS_OF_USE if kind in {kinds[n] for n in numbers}]
            assert segment.kind == (ranked[0] if ranked else "")
        position += len(segment.text)
        assert set(segment.ends) == {
            n for n, quote_spans in spans.items() if any(b == position for _, b in quote_spans)
        }
    assert position == 300


@drawn
@given(judgment_lists(), st.integers(0, 7))
def test_the_gravest_answers_are_ordered_and_each_question_comes_once(judgments, count):
    worst = page.gravest(judgments, count=count)
    ranks = [fault.rank for _, fault in worst]
    assert ranks == sorted(ranks, reverse=True) and len(worst) <= count
    questions = [judgment.question_id for judgment, _ in worst]
    assert len(questions) == len(set(questions))
    faulty = {j.question_id for j in judgments if j.scored and (j.over or j.under)}
    assert len(worst) == min(count, len(faulty))
    assert all(fault.reasons for _, fault in worst)


@pytest.mark.usefixtures("no_pictures")
def test_a_huge_answer_is_cut_around_its_quotes(tmp_path):
    play(tmp_path)
    huge = "word " * 1_000_000

    def edit(k, row):
        return row | {"response": huge + row["response"] + huge} if k % 9 == 0 else row

    change(tmp_path, edit, "rollouts")
    change(tmp_path, lambda k, row: {key: v for key, v in row.items() if key != "response_hash"})
    source = evaluation.write_evaluation_report(tmp_path, worst=30).read_text()
    assert "characters …" in source and len(source) < 3_000_000
    assert source.count('<mark class="') > 10


def test_endless_quotes_do_not_hold_up_the_page(tmp_path):
    play(tmp_path)
    endless = "word . . . more ... " * 100_000

    def edit(k, row):
        first = row["atoms"][0] | {"quote": endless, "reason": endless, "actual": "C"}
        return row | {"atoms": [first, *row["atoms"][1:]]} if k < 2 else row

    change(tmp_path, edit)
    change(tmp_path, lambda k, row: row | {"response": endless} if k < 2 else row, "rollouts")
    source = evaluation.write_evaluation_report(tmp_path, worst=30).read_text()
    assert "word . . . more" in source and len(source) < 12_000_000


@pytest.mark.usefixtures("no_pictures")
def test_a_changed_answer_is_called_so(tmp_path):
    assert (
        "quotes may not fit"
        not in evaluation.write_evaluation_report(play(tmp_path), worst=30).read_text()
    )
    change(tmp_path, lambda k, row: row | {"response": row["response"] + " And more."}, "rollouts")
    assert (
        "were changed after they"
        in evaluation.write_evaluation_report(tmp_path, worst=30).read_text()
    )


def test_kinds_of_use():
    kinds = [page.kind_of_use(i, a) for i in Level for a in (*Level, None)]
    assert kinds == [
        "right",
        "over",
        "over",
        "",
        "under",
        "right",
        "over",
        "",
        "under",
        "under",
        "right",
        "",
    ]


# tables


@drawn
@given(judgment_lists(unscored=False))
def test_controls_equal_those_of_copied_judgments(judgments):
    slow = [j for level in Level for j in metrics.constant_policy(judgments, level)]
    pd.testing.assert_frame_equal(
        metrics.controls(judgments, resamples=20), metrics.score(slow, resamples=20)
    )


@drawn
@given(judgment_lists(unscored=False))
def test_splits_by_distractors_hold_each_answer_once(judgments):
    table = metrics.score(judgments, by="distractor_count", resamples=20)
    assert table["responses"].sum() == len(judgments)
    for bin_name, bin_rows in table.groupby("distractor_count", observed=True):
        low = int(re.match(r"\d+", bin_name)[0])
        inside = [
            j
            for j in judgments
            if metrics.binned([sum(a.ideal == 0 for a in j.atoms)], metrics.DISTRACTOR_BINS)[0]
            == bin_name
        ]
        assert min(sum(a.ideal == 0 for a in j.atoms) for j in inside) >= low
        assert bin_rows["responses"].sum() == len(inside)


@drawn
@given(
    st.lists(
        st.tuples(st.integers(0, 4) | st.none(), st.booleans() | st.none(), st.integers(1, 2)),
        min_size=1,
        max_size=9,
    )
)
def test_quality_is_the_mean_over_seeds_of_rated_answers(rated):
    judgments = [
        make([0], [0], f"e{k}", seed=seed, task_quality=quality, safety_failure=unsafe)
        for k, (quality, unsafe, seed) in enumerate(rated)
    ]
    table = tables.quality_table(metrics.response_frame(judgments), resamples=20)
    if not any(q is not None or u is not None for q, u, _ in rated):
        assert table.empty
        return
    row = table.iloc[0]
    for position, count, name, scale in (
        (0, "rated_quality", "quality", 1),
        (1, "rated_safety", "unsafe", 100),
    ):
        by_seed = [
            [float(r[position]) for r in rated if r[2] == seed and r[position] is not None]
            for seed in (1, 2)
        ]
        by_seed = [values for values in by_seed if values]
        assert row[count] == sum(map(len, by_seed))
        if by_seed:
            assert row[name] == pytest.approx(
                scale * np.mean([np.mean(values) for values in by_seed])
            )
            questions = sum(map(len, by_seed))  # each rated answer is to another question
            if questions < metrics.LEAST_GROUPS:
                assert np.isnan(row[f"{name}_low"]) and np.isnan(row[f"{name}_high"])
                continue
            assert (
                row[f"{name}_low"] <= row[name] + 1e-9 and row[f"{name}_high"] >= row[name] - 1e-9
            )
        else:
            assert np.isnan(row[name])


def test_evidence_counts_every_used_atom_once(tmp_path):
    run = rows.load_run(play(tmp_path))
    used = [a for j in run.judgments for a in j.atoms if a.actual]
    row = tables.quotation_table(run.atoms).iloc[0]
    assert row["used atoms"] == len(used)
    assert row["quote found"] == sum(a.grounded for a in used)
    assert row["not in the answer"] == sum(not a.grounded for a in used) > 0
    assert row["no quote"] == row["not checked"] == 0


def test_hard_distractors_are_counted_by_family(tmp_path):
    assert "Hard distractors by family" not in evaluation.evaluation_tables(
        rows.load_run(play(tmp_path / "plain"))
    )
    folder = play(tmp_path / "named")
    change(folder, lambda k, row: name_families(row, {"hard_01_a1": "outdated"}), "examples")
    for name in ("judgments", "rollouts"):
        change(folder, lambda k, row: row | {"example_hash": ""}, name)
    run = rows.load_run(folder)
    [row] = evaluation.evaluation_tables(run)["Hard distractors by family"].to_dict("records")
    atoms = [a for j in run.judgments for a in j.atoms if a.atom_id == "hard_01_a1"]
    assert row["family"] == "outdated" and row["atoms"] == len(atoms) > 9
    assert row["over_use"] == pytest.approx(
        100 * sum(a.actual > a.ideal for a in atoms) / len(atoms)
    )


def name_families(row, families):
    return row | {
        "memories": [
            m | {"hard_a_family": families[m["atom_id"]]} if m["atom_id"] in families else m
            for m in row["memories"]
        ]
    }


def test_reasons_are_grouped_and_counted(tmp_path):
    play(tmp_path)

    def edit(k, row):
        if k < 3:
            return row | {"error": f"timeout: no reply in {k} s", "retry": True}
        if k == 3:
            row["atoms"][0] |= {"actual": None, "reason": "left out"}
        return row

    change(tmp_path, edit)
    change(
        tmp_path,
        lambda k, row: row | ({"finish_reason": "error", "error": "server: 500"} if k == 5 else {}),
        "rollouts",
    )
    run = rows.load_run(tmp_path)
    table = tables.reasons_table(run.judgments, run.answers)
    assert dict(
        zip(zip(table["what"], table["reason"], strict=True), table["count"], strict=True)
    ) == {
        ("answer unscored", "timeout: no reply in … s"): 3,
        ("answer failed", "server: …"): 1,
        ("atom unscored", "left out"): 1,
    }
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert "no reply in … s" in source and "4 of 18 judged answers (22.2 %) are unscored" in source


def test_costs_say_what_is_not_recorded_and_add_up(tmp_path):
    session = {"model": {"calls": 20, "cached": 5, "retries": 2, "failures": 0, "cost": 0.5}}
    run = rows.load_run(play(tmp_path, session=session))
    table = evaluation.evaluation_costs(run).set_index("")
    assert table.loc["prompt tokens"].tolist() == ["1,800", "1,800"]
    assert table.loc["answered from the cache"].tolist() == ["20.0 %", "not recorded"]
    assert (
        table.loc["cost, USD"].tolist() == ["not recorded"] * 2
        and table.loc["spent, USD", "model"] == "0.5000"
    )
    seconds = sorted(run.answers["seconds"])
    assert float(table.loc["seconds a row, median", "model"]) == pytest.approx(
        np.median(seconds), abs=0.006
    )
    assert float(table.loc["seconds a row, longest", "judge"]) == pytest.approx(
        seconds[-1], abs=0.006
    )
    frame = pd.DataFrame({name: [1.0, np.nan] for name in rows.USAGE})
    assert (
        tables.cost_table({"model": frame}, {}).set_index("").loc["cost, USD", "model"]
        == "1.0000 (known for 1 of 2)"
    )


def test_memory_effect_is_the_paired_difference(tmp_path):
    run = rows.load_run(play(tmp_path, conditions=("full_memory", "no_memory")))
    table = evaluation.memory_effect(run).set_index("metric")
    scored = run.responses.assign(scs=100 * 0.5 ** (run.responses["over"] + run.responses["under"]))
    means = scored.pivot_table(index="question_id", columns="condition", values="scs")
    want = (means["full_memory"] - means["no_memory"]).mean()
    assert table.loc["SCS", "difference"] == pytest.approx(want)
    assert evaluation.memory_effect(rows.load_run(play(tmp_path / "b"))).empty


def test_each_subset_of_the_data_has_a_row_in_page_and_terminal(tmp_path):
    folder = play(tmp_path / "run", conditions=("full_memory", "no_memory"))
    assert evaluation.subset_scores(rows.load_run(folder)).empty
    assert "subset" not in evaluation.evaluation_text(folder)

    def halved(number, row):
        return row | {"subset": "long" if number % 3 else "core"}

    change(folder, halved, "examples")
    for name in ("judgments", "rollouts"):
        change(folder, lambda number, row: row | {"example_hash": ""}, name)
    run = rows.load_run(folder)
    table = evaluation.subset_scores(run).set_index("subset")
    assert list(table.index) == ["core", "long"]
    with_memory = run.responses[run.responses["condition"] == "full_memory"]
    for subset, row in table.iterrows():
        ids = {example for example, name in run.subsets.items() if name == subset}
        scored = with_memory[with_memory["example_id"].isin(ids)]
        want = 100 * 0.5 ** (scored["over"] + scored["under"])
        assert row["SCS"] == pytest.approx(want.groupby(scored["seed"]).mean().mean())
    assert "By subset" in evaluation.evaluation_tables(run)
    text = evaluation.evaluation_text(folder)
    assert sum(" core " in line or " long " in line for line in text.splitlines()) == 2


def test_names_of_sources_are_distinct(tmp_path):
    folder = play(
        tmp_path, models=("m", "n"), conditions=("full_memory", "background", "no_memory")
    )
    run = rows.load_run(folder)
    names = rows.source_names(run.responses).unique().tolist()
    assert names == [f"{m}{c}" for m in "mn" for c in ("", ", background", ", no memory")]
    table = evaluation.evaluation_tables(run)["Scores"].set_index("model")
    assert table.index.is_unique and table.loc["m, no memory", "status"] == "control"
    assert table.loc["m, background", "status"] == "measured"
    other = [j.model_copy(update={"judge": "other"}) for j in run.judgments]
    both = metrics.response_frame([*run.judgments, *other])
    assert len(rows.source_names(both).unique()) == 12


# the page


def test_the_page_has_every_part_and_is_safe_and_the_same_again(tmp_path):
    folder = play(tmp_path, conditions=("full_memory", "no_memory"))
    judgments = [json.loads(line) for line in (folder / "judgments.jsonl").read_text().splitlines()]
    write = [row | {"judge": "second@2"} for row in judgments if row["condition"] == "full_memory"]
    (folder / "judgments2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in write))
    path = evaluation.write_evaluation_report(folder, worst=40)
    source = path.read_text()
    assert safe(source) == [] and source.count("<svg") == len(metric_table()) + 4
    ids = [attributes["id"] for _, attributes in Tags(source).tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [a["href"] for tag, a in Tags(source).tags if tag == "a"]
    assert {"#second", "#quality", "#card"} <= set(links) and all(link[1:] in ids for link in links)
    for words in (
        "Worst answers",
        "The second judge",
        "not in the answer",
        "was shown the ideal levels",
    ):
        assert words in source
    files = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert {f"tables/results.{end}" for end in ("csv", "tex", "md")} | {"model-card.md"} <= files
    assert {
        f"figures/{n}.{e}" for n in ("plane", "channels", "parts", "judges") for e in ("svg", "png")
    } <= files
    assert not [name for name in files if name.endswith(".part")]
    contents = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    evaluation.write_evaluation_report(folder, worst=40)
    assert all(p.read_bytes() == data for p, data in contents.items())


def test_hostile_text_stays_text_everywhere(tmp_path):
    folder = play(
        tmp_path,
        models=(HOSTILE,),
        text=HOSTILE + "\u202e\x1b[31m\n# |",
        conditions=("full_memory", "no_memory"),
    )
    (folder / "parameters.json").write_text(
        json.dumps({"model": {HOSTILE: [HOSTILE]}, "framing": HOSTILE})
    )
    change(folder, lambda k, row: row | ({"error": HOSTILE} if k == 0 else {}))
    source = evaluation.write_evaluation_report(folder, worst=40).read_text()
    assert safe(source) == [] and "&lt;script&gt;" in source
    assert "\u202e" not in source and "\x1b" not in source
    cardtext = (folder / "model-card.md").read_text()
    assert "<script" not in cardtext and not re.search(r"(?m)^# ", cardtext)
    for file in (folder / "tables").glob("*.csv"):
        cells = [cell for row in csv.reader(io.StringIO(file.read_text())) for cell in row]
        assert not [
            c
            for c in cells
            if c[:1] in "=+@\t\r" and c and not re.fullmatch(r"[+-]?\d+(\.\d+)?(e-\d+)?", c)
        ]
    assert all("script" not in p.name for p in folder.rglob("*"))


def test_lone_surrogates_do_not_stop_the_page(tmp_path):
    play(tmp_path)
    change(tmp_path, lambda k, row: row | {"response": row["response"] + "\ud800"}, "rollouts")
    change(tmp_path, lambda k, row: row | {"settings": {"note": "\udfff"}})
    assert evaluation.write_evaluation_report(tmp_path, worst=30).exists()


@pytest.mark.parametrize(
    "present",
    [("judgments",), ("rollouts",), ("examples",), ("manifest",), ("judgments", "rollouts")],
)
def test_missing_pieces_are_said(tmp_path, present):
    play(tmp_path, conditions=("full_memory", "no_memory"))
    for file in list(tmp_path.iterdir()):
        if file.stem not in present:
            file.unlink()
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert safe(source) == []
    assert ("not judged yet" in source) == ("judgments" not in present)
    assert (tmp_path / "model-card.md").exists() == ("judgments" in present)
    if present == ("judgments",):
        assert "the answer is not in this folder" in source
        assert "not recorded" not in source  # what nobody wrote down has no row
    assert "nan" not in re.sub(r"<[^>]*>", " ", source).lower().split()


def test_a_run_with_nothing_scored_still_has_a_page(tmp_path):
    play(tmp_path)
    change(tmp_path, lambda k, row: row | {"atoms": [], "error": "bad_request: no"})
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert "none of the 18 judged answers could be scored" in source and "bad_request" in source


def test_one_seed_one_question_and_no_distractor_have_a_page(tmp_path):
    play(tmp_path, seeds=(1,))
    change(tmp_path, lambda k, row: row if k == 0 else None, "examples")
    change(tmp_path, lambda k, row: row if k == 0 else None, "rollouts")
    change(tmp_path, lambda k, row: row if k == 0 else None)
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert "There is only one seed" in source and "only 1 question" in source
    assert "no interval" in source and "nan" not in source.lower().split('id="protocol"')[0]


def test_a_demonstration_is_told_by_its_data_and_not_by_the_name_of_its_judge(tmp_path):
    run = rows.load_run(play(tmp_path, judge="micro-judge@1"))
    assert evaluation.evaluation_summary(run).startswith("Judged by micro-judge@1")
    assert training.run_summary(run).startswith("Measured with the judge micro-judge@1")
    assert any(
        "not examined" in text
        for text in evaluation.notices(run, evaluation.evaluation_tables(run)["Scores"])
    )
    for judgment in run.judgments:
        judgment.example_id = f"micro-long-rl-1-{judgment.example_id}"
        judgment.judge = "j@1"
    assert evaluation.evaluation_summary(run).startswith(
        "This is a demonstration on a synthetic world"
    )
    assert training.run_summary(run) == training.DEMONSTRATION


@pytest.mark.usefixtures("no_pictures")
def test_numbers_on_the_card_are_those_of_the_score(tmp_path):
    folder = play(tmp_path, conditions=("full_memory", "no_memory"))
    evaluation.write_evaluation_report(folder)
    text = (folder / "model-card.md").read_text()
    scores = metrics.score(metrics.load_judgments(folder / "judgments.jsonl"))
    row = scores[scores["condition"] == "full_memory"].iloc[0]
    cell = (
        f"{row['SCS']:.1f} ± {row['SCS_std']:.1f} ({row['SCS_low']:.1f} to {row['SCS_high']:.1f})"
    )
    assert cell in text and "j@1" in text and "temperature 1.0" in text and "Seeds: 1, 2" in text
    assert text_hash((folder / "examples.jsonl").read_text(), 64) in text
    table = pd.read_csv(folder / "tables" / "scores.csv")
    assert table.loc[table["model"] == "m", "SCS"].item() == pytest.approx(row["SCS"])


def test_rows_of_other_examples_are_refused(tmp_path):
    play(tmp_path)
    change(
        tmp_path,
        lambda k, row: row | {"question": row["question"] + "?"} if k == 1 else row,
        "examples",
    )
    with pytest.raises(
        DataError,
        match=r"judgments\.jsonl.*found version [0-9a-f]{16}; allowed: version [0-9a-f]{16}",
    ):
        evaluation.write_evaluation_report(tmp_path)
    change(tmp_path, lambda k, row: row if k != 1 else None, "examples")
    with pytest.raises(DataError, match="does not have"):
        evaluation.write_evaluation_report(tmp_path)
    with pytest.raises(FileNotFoundError, match="this run folder does not exist"):
        evaluation.write_evaluation_report(tmp_path / "none")


@pytest.mark.parametrize("stray", [None, "notes.txt", "config.yaml"])
def test_a_folder_that_holds_no_run_gets_no_page(tmp_path, stray):
    if stray:
        (tmp_path / stray).write_text("hello")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(
        FileNotFoundError, match=r"not contain a run; looked for judgments\.jsonl, .*manifest\.json"
    ):
        evaluation.write_evaluation_report(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    (tmp_path / "judgments.jsonl").touch()
    assert "not judged yet" in evaluation.write_evaluation_report(tmp_path).read_text()


# what cannot be used is said, and the page is written


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("name", ["judgments", "judgments2", "rollouts", "examples"])
@pytest.mark.parametrize("alone", [False, True])
def test_a_torn_last_line_is_left_out_and_said(tmp_path, name, alone):
    play(tmp_path)
    text = (tmp_path / "judgments.jsonl").read_text().replace('"j@1"', '"k@2"')
    (tmp_path / "judgments2.jsonl").write_text(text)
    path = tmp_path / f"{name}.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(("" if alone else "".join(lines[:-1])) + lines[-1][:60])
    torn = path.read_bytes()
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert f"{name}.jsonl: {TORN}" in source and path.read_bytes() == torn
    assert ("not judged yet" in source) == (name == "judgments" and alone)


def test_a_torn_run_is_compared_and_said(tmp_path):
    a = play(tmp_path / "a")
    b = play(tmp_path / "b", seeds=(3, 4))
    for name in ("judgments", "rollouts"):
        with open(b / f"{name}.jsonl", "a") as file:
            file.write('{"example_id": "x')
    compared = comparison.compare_runs([a, b])
    assert [note for note in compared.notes if "torn" in note] == [
        f"{b}: {n}.jsonl: {TORN}." for n in ("judgments", "rollouts")
    ]
    assert f"judgments.jsonl: {TORN}" in comparison.comparison_text(compared)


ODD = [
    None,
    True,
    "x",
    -1,
    7,
    10**400,
    1e308,
    [],
    [[1]],
    {},
    {"model": 3},
    {"model": {"calls": "x", "cost": {}}},
    {"commit": 5},
]


@pytest.mark.parametrize("odd", ODD, ids=repr)
@pytest.mark.parametrize(
    "name", ["usage", "session", "data_sha256", "versions", "git", "command", "config", "format"]
)
def test_an_odd_manifest_stops_no_page(tmp_path, name, odd):
    run_folder = play(tmp_path, seeds=(1,))
    for file in ("manifest.json", "parameters.json"):
        (run_folder / file).write_text(json.dumps({name: odd}))
    run = rows.load_run(run_folder)
    table = metrics.score(run.responses, resamples=20).assign(status="measured")
    assert evaluation.protocol(run) and evaluation.model_card(run, table)
    assert (
        "inf" not in evaluation.evaluation_costs(run).to_string()
        and dict(page.flatten(run.manifest)) is not None
    )
    is_loaded = name in run.manifest
    assert is_loaded or any(note.startswith(f"manifest.json: {name}") for note in run.notes)


NO_MANIFEST = [
    "[1]",
    "{",
    '{"a": NaN, ',
    "[" * 100_000,
    '{"usage": {"model": {"calls": Infinity}}}',
    "\x00",
]
NO_MANIFEST += [
    (
        '{"git": {"commit": 3}, "command": {}, "versions": [], "usage": {"model": 4, "judge": '
        '{"calls": "n"}}, "data_sha256": 1}'
    )
]


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("text", NO_MANIFEST)
def test_a_manifest_that_is_none_is_left_out_and_said(tmp_path, text):
    play(tmp_path)
    (tmp_path / "manifest.json").write_text(text)
    (tmp_path / "parameters.json").write_text("[]")
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert "parameters.json could not be read and was left out: found a value" in source
    assert "manifest.json could not be read" in source or "manifest.json: usage.model" in source
    assert "parameters.json" in (tmp_path / "model-card.md").read_text()


SECOND = {
    "no atoms": lambda k, row: row | {"judge": "k", "atoms": [], "error": "server: down"},
    "other atoms": lambda k, row: (
        row | {"judge": "k", "atoms": [a | {"atom_id": "z" + a["atom_id"]} for a in row["atoms"]]}
    ),
    "two judges": lambda k, row: row | {"judge": f"k{k % 2}"},
    "other levels": lambda k, row: (
        row | {"judge": "k", "atoms": [a | {"ideal": "C"} for a in row["atoms"]]}
    ),
}


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("edit_name", ["other atoms", "other levels"])
def test_a_second_judge_of_other_atoms_or_levels_is_refused(tmp_path, edit_name):
    play(tmp_path)
    (tmp_path / "judgments2.jsonl").write_text((tmp_path / "judgments.jsonl").read_text())
    change(tmp_path, SECOND[edit_name], "judgments2")
    with pytest.raises(DataError, match="judgments2.jsonl: example"):
        evaluation.write_evaluation_report(tmp_path)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("edit_name", sorted(SECOND.keys() - {"other atoms", "other levels"}))
def test_a_second_judge_that_cannot_be_compared_is_said(tmp_path, edit_name):
    play(tmp_path)
    (tmp_path / "judgments2.jsonl").write_text((tmp_path / "judgments.jsonl").read_text())
    change(tmp_path, SECOND[edit_name], "judgments2")
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert (
        source.count("judgments2.jsonl was not compared with judgments.jsonl") >= 2
        and 'id="second"' in source
    )
    assert safe(source) == [] and "SCS" in source


@pytest.mark.parametrize("second", ["no atoms", "no levels"])
def test_two_judges_that_scored_nothing_have_a_page(tmp_path, second):
    play(tmp_path)

    def bare(row):
        return [] if second == "no atoms" else [a | {"actual": None} for a in row["atoms"]]

    change(tmp_path, lambda k, row: row | {"atoms": bare(row), "error": "server: down"})
    (tmp_path / "judgments2.jsonl").write_text((tmp_path / "judgments.jsonl").read_text())
    change(tmp_path, lambda k, row: row | {"judge": "k"}, "judgments2")
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert "none of the 18 judged answers could be scored" in source and 'id="second"' in source
    assert ("was not compared" in source) == (second == "no atoms")


@pytest.mark.filterwarnings("error")
def test_no_warning_reaches_the_terminal(tmp_path, recwarn):
    folder = play(
        tmp_path,
        models=("模型 😀", "نموذج", "\u0e42\u0e21" * 60),
        conditions=("full_memory", "no_memory"),
    )
    wild = [float("inf"), -float("inf"), float("nan"), 1e308, -5.0, 1e15]
    for name in ("judgments", "rollouts"):

        def odd(k, row):
            return row | {
                "usage": dict.fromkeys(rows.USAGE, wild[k % 6]) if k % 2 else row["usage"]
            }

        change(folder, odd, name)
    change(folder, lambda k, row: row | {"domain": "健康\t" if k % 2 else "\u0007"})
    source = evaluation.write_evaluation_report(folder).read_text()
    assert "模型 😀" in source and not len(recwarn)
    assert not re.search(
        r"\binf\b|\bnan\b", re.sub(r"<[^>]*>", " ", source.split('id="cost"')[1].split("<h2")[0])
    )


def test_what_can_be_no_count_is_unknown():
    usage = [float("inf"), float("nan"), -1.0, 1e15, 1e308, 0.0, 3.0]
    rollouts = [
        Rollout(example_id=f"e{k}", response="", usage={"seconds": value})
        for k, value in enumerate(usage)
    ]
    assert rows.answer_frame(rollouts)["seconds"].dropna().tolist() == [0.0, 3.0]
    judged = [make([0], [0], usage={"seconds": value, "calls": value}) for value in usage]
    assert rows.usage_frame(judged)[["seconds", "calls"]].dropna().to_numpy().tolist() == [
        [0, 0],
        [3, 3],
    ]


def test_unfinished_judging_is_said(tmp_path):
    play(tmp_path)
    change(tmp_path, lambda k, row: row if k < 10 else None)
    assert (
        "8 of 18 answers (44.4 %) have not been judged yet"
        in evaluation.write_evaluation_report(tmp_path).read_text()
    )


def test_a_second_judge_of_other_answers_is_left_out(tmp_path):
    play(tmp_path)
    judgments = [
        json.loads(line) for line in (tmp_path / "judgments.jsonl").read_text().splitlines()
    ]
    strange = [row | {"judge": "second", "model": "somebody-else"} for row in judgments]
    (tmp_path / "judgments2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in strange))
    assert evaluation.second_judge(rows.load_run(tmp_path)) == {}
    assert (
        "none of its 18 judgments is about an answer"
        in evaluation.write_evaluation_report(tmp_path).read_text()
    )


def test_a_run_of_rpeval_shows_its_metrics(tmp_path):
    play(tmp_path)
    (tmp_path / "parameters.json").write_text('{"format": "rpeval"}')
    source = evaluation.write_evaluation_report(tmp_path).read_text()
    assert "In RPEval&#39;s own terms" in source or "In RPEval's own terms" in source
    assert "all Support" in source and "published" in source


def test_agreement_of_the_second_judge_is_counted_by_hand(tmp_path):
    play(tmp_path)
    judgments = [
        json.loads(line) for line in (tmp_path / "judgments.jsonl").read_text().splitlines()
    ]
    for row in judgments:
        row["judge"] = "second"
        row["atoms"][0]["actual"] = {"A": "B", "B": "C", "C": "A"}[row["atoms"][0]["actual"]]
    (tmp_path / "judgments2.jsonl").write_text("".join(json.dumps(row) + "\n" for row in judgments))
    run = rows.load_run(tmp_path)
    row = evaluation.second_judge(run)["Second judge, agreement"].iloc[0]
    total = sum(len(j.atoms) for j in run.judgments)
    assert row["exact"] == pytest.approx(100 * (total - 18) / total) and row["pairs"] == total


@drawn
@given(
    st.lists(
        st.tuples(st.text(min_size=1, max_size=9), st.floats(0, 100) | st.just(float("nan"))),
        max_size=5,
    )
)
def test_letters_of_controls_are_all_there_and_apart(values):
    marks = page.control_letters(values)
    assert sum(len(letters) for letters, _ in marks) <= sum(v == v for _, v in values)
    assert all(b[1] - a[1] >= 7 for a, b in pairwise(marks))


def test_cells_of_differences_are_marked_by_their_corrected_p():
    row = {
        "method": "m",
        "low": -1.0,
        "high": 2.0,
        "better": 1,
        "worse": 1,
        "p": 0.01,
        "start": "s",
    }
    cases = [
        ("SCS", 1.0, 0.049, "num better"),
        ("SCS", -1.0, 0.049, "num worse"),
        ("SCS", 1.0, 0.05, "num"),
        ("AOR", 1.0, 0.049, "num worse"),
        ("AOR", -1.0, 0.049, "num better"),
    ]
    for metric, difference, p_holm, style in cases:
        row.update(metric=metric, difference=difference, p_holm=p_holm)
        cell = page.differences_grid(pd.DataFrame([row]))["rows"][0][1]
        assert cell.style == style
        assert "p = 0.01, corrected p = " in cell.note


# comparison


def test_comparison_equals_differences_of_means(tmp_path):
    a = play(tmp_path / "a", seeds=(1, 2))
    b = play(tmp_path / "b", seeds=(3, 4, 5))
    compared = comparison.compare_runs([a, b])
    assert [side.label for side in compared.sides] == ["m (a)", "m (b)"]
    table = compared.differences[compared.differences["domain"] == "all"].set_index("metric")
    for name in METRICS:
        values = []
        for folder in (a, b):
            frame = metrics.response_frame(metrics.load_judgments(folder / "judgments.jsonl"))
            columns = metrics.response_scores(
                frame["over"].to_numpy(int), frame["under"].to_numpy(int)
            )
            frame = frame.assign(value=100 * columns[:, METRICS.index(name)])
            values.append(frame.groupby("question_id")["value"].mean())
        gap = (values[1] - values[0]).to_numpy()
        assert table.loc[name, "difference"] == pytest.approx(gap.mean())
        good = np.sign(np.where(np.abs(gap) < 1e-9, 0, gap)) * (
            1 if name in ("SCS", "Exact") else -1
        )
        assert (table.loc[name, "better"], table.loc[name, "worse"]) == (
            (good > 0).sum(),
            (good < 0).sum(),
        )
    assert any("Seeds differ" in note for note in compared.notes)
    text = comparison.comparison_text(compared)
    assert "m (b)" in text and "not corrected" in text


def test_a_run_against_its_copy_shows_no_difference(tmp_path):
    a = play(tmp_path / "a")
    b = play(tmp_path / "b")
    compared = comparison.compare_runs([a, b])
    enough = compared.differences["questions"] >= metrics.LEAST_GROUPS
    assert enough.any() and not enough.all()
    assert (compared.differences["difference"] == 0).all() and compared.changes.empty
    assert (compared.differences.loc[enough, ["low", "high"]] == 0).all().all()
    assert compared.differences.loc[~enough, ["low", "high"]].isna().all().all()
    assert (compared.differences["p"] == 1).all()
    assert (
        "no question changed" in comparison.write_comparison(compared, tmp_path / "out").read_text()
    )


def test_other_judges_and_other_examples_are_refused_unless_wanted(tmp_path):
    a = play(tmp_path / "a")
    b = play(tmp_path / "b", judge="k@2", seeds=(3,))
    with pytest.raises(ValueError, match="judged by 'j@1', .*'k@2'; allowed"):
        comparison.compare_runs([a, b])
    compared = comparison.compare_runs([a, b], any_judge=True)
    assert "may come from the judges" in compared.notes[0]
    change(b, lambda k, row: row | {"judge": "j@1"})
    change(b, lambda k, row: row if k < 6 else None)
    with pytest.raises(
        ValueError, match=r"found 6 examples in both, 3 only in m \(a\).* and 0 only in m \(b\)"
    ):
        comparison.compare_runs([a, b])
    compared = comparison.compare_runs([a, b], common=True)
    assert "6 examples that all runs share, of 9" in compared.notes[0]
    assert compared.differences["questions"].max() == 6 == compared.scores["questions"].max()


def test_edited_examples_are_named_and_never_paired(tmp_path):
    a = play(tmp_path / "a")
    b = play(tmp_path / "b")
    edited = sample_records()[0].id + "-0"
    for name in ("examples", "rollouts", "judgments"):
        key = "id" if name == "examples" else "example_id"
        mark = {"source": "new"} if name == "examples" else {"example_hash": ""}
        change(
            b, lambda k, row, key=key, mark=mark: row | mark if row[key] == edited else row, name
        )
    with pytest.raises(
        ValueError, match=f"found 1 example in two versions, the first '{edited}'.*differs: fields"
    ):
        comparison.compare_runs([a, b])
    assert comparison.compare_runs([a, b], common=True).differences["questions"].max() == 8


def test_without_hashes_ideal_levels_tell_examples_apart(tmp_path):
    a = play(tmp_path / "a")
    b = play(tmp_path / "b")
    for folder in (a, b):
        (folder / "examples.jsonl").unlink()
        change(folder, lambda k, row: row | {"example_hash": ""})
    assert len(comparison.compare_runs([a, b]).sides) == 2

    def edit(k, row):
        if row["example_id"] == sample_records()[0].id + "-0":
            row["atoms"][0]["ideal"] = {"A": "B", "B": "C", "C": "A"}[row["atoms"][0]["ideal"]]
        return row

    change(b, edit)
    with pytest.raises(ValueError, match="in two versions"):
        comparison.compare_runs([a, b])


def test_labels_are_distinct_and_folders_are_given_once(tmp_path):
    folders = [play(tmp_path / x / "run", seeds=(k,)) for k, x in enumerate("ab", 1)]
    other = play(tmp_path / "c", models=("m", "n"))
    compared = comparison.compare_runs([*folders, other])
    assert [side.label for side in compared.sides] == ["m (a/run)", "m (b/run)", "m (c)", "n"]
    with pytest.raises(ValueError, match="found this folder twice"):
        comparison.compare_runs([folders[0], folders[0]])
    with pytest.raises(ValueError, match="found 1 run; a comparison needs two or more"):
        comparison.compare_runs([folders[0]])
    (folders[1] / "judgments.jsonl").unlink()
    with pytest.raises(ValueError, match=r"b/run: found no judgment"):
        comparison.compare_runs(folders)


def test_a_hostile_comparison_is_safe_and_the_same_again(tmp_path):
    a, b = (
        play(tmp_path / x, models=(HOSTILE,), text=HOSTILE, seeds=(k,)) for k, x in enumerate("ab")
    )
    compared = comparison.compare_runs([a, b])
    path = comparison.write_comparison(compared, tmp_path / "out")
    source = path.read_text()
    assert safe(source) == [] and "&lt;script&gt;" in source
    contents = {p: p.read_bytes() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert {p.suffix for p in contents} == {".html", ".csv", ".tex", ".md", ".svg", ".png"}
    comparison.write_comparison(comparison.compare_runs([a, b]), tmp_path / "out")
    assert all(p.read_bytes() == data for p, data in contents.items())
    assert "\x1b" not in comparison.comparison_text(compared)


def test_the_protocol_shows_every_setting_that_was_used(tmp_path):
    play(tmp_path)
    change(
        tmp_path, lambda k, row: row | {"settings": {"temperature": 0.5 if k else 1.0}}, "rollouts"
    )
    settings_shown = dict(evaluation.protocol(rows.load_run(tmp_path)))
    assert (
        settings_shown["Sampling"] == "temperature 0.5 / 1.0"
        and settings_shown["Judge settings"] == "blind false"
    )
    assert settings_shown["Command"].startswith("memcalib evaluate")


# equal runs, terminals, narrow screens


def test_equal_rows_in_another_order_of_arrival_give_the_same_files(tmp_path):
    first = play(tmp_path / "a" / "run", models=("m", "n"), conditions=("full_memory", "no_memory"))
    change(first, lambda k, row: row | ({"error": f"reply {k} is no JSON"} if k % 7 == 0 else {}))
    change(first, lambda k, row: row | {"settings": row["settings"] | {"seed": k % 3}}, "rollouts")
    second = tmp_path / "b" / "run"
    shutil.copytree(first, second)
    for name in ("judgments", "rollouts"):
        lines = (second / f"{name}.jsonl").read_text().splitlines(keepends=True)
        head = lines[:1]  # whose model comes first stays as it is
        (second / f"{name}.jsonl").write_text(
            "".join(head + random.Random(3).sample(lines[1:], len(lines) - 1))
        )
    for folder in (first, second):
        evaluation.write_evaluation_report(folder)
    tables = sorted((first / "tables").iterdir())
    assert len(tables) > 20 and all(
        p.read_bytes() == (second / "tables" / p.name).read_bytes() for p in tables
    )
    assert (first / "report.html").read_text() == (second / "report.html").read_text()
    assert evaluation.evaluation_text(first) == evaluation.evaluation_text(second)


@pytest.mark.usefixtures("no_pictures")
def test_a_terminal_is_told_what_was_asked_for(tmp_path, capsys):
    folder = play(tmp_path / "run")
    plain = evaluation.evaluation_text(folder)
    assert (
        plain.count("\nm: quality ") == 1
        and "of 4, " in plain
        and "% unsafe" in plain
        and "second judge" not in plain
    )
    with pytest.raises(SystemExit):
        main(["score", str(folder / "judgments.jsonl")])
    (quality_line,) = [line for line in plain.splitlines() if line.startswith("m: quality ")]
    assert capsys.readouterr().out.splitlines()[-1] == quality_line

    def lower(k, row):
        return row | {"judge": "j@2", "atoms": [a | {"actual": "A"} for a in row["atoms"]]}

    shutil.copy(folder / "judgments.jsonl", folder / "judgments2.jsonl")
    change(folder, lower, "judgments2")
    text = evaluation.evaluation_text(folder)
    (line,) = [line for line in text.splitlines() if line.startswith("second judge j@2: ")]
    table = evaluation.second_judge(rows.load_run(folder))["Second judge, agreement"].iloc[0]
    assert (
        f"{table['exact']:.1f} (" in line
        and f"of {table['pairs']:,} levels" in line
        and "kappa" in line
    )
    change(folder, lambda k, row: row | {"task_quality": None, "safety_failure": None})
    assert "quality" not in evaluation.evaluation_text(folder)
    change(folder, lambda k, row: row | {"atoms": []}, "judgments2")
    assert "judgments2.jsonl was not compared with judgments.jsonl: " in evaluation.evaluation_text(
        folder
    )


def test_the_column_that_stays_in_place_leaves_room_on_a_phone_on_every_page():
    """The rule stands in the frame of all pages, behind their own styles,
    and no page has a stronger one.
    """
    folder = package_data("report", "templates")
    base = (folder / "base.html.j2").read_text()
    rule = (
        "th:first-child, td:first-child { max-width: 9rem !important; white-space: "
        "normal !important;"
    )
    style_block = base.index("{% block style %}")
    narrow = base.index("@media screen and (max-width: 40rem)")
    assert style_block < narrow < base.index(rule) < base.index("</style>")
    pages = [
        file
        for file in package_data().glob("**/templates/*.html.j2")
        if "<table" in file.read_text() and file != folder / "base.html.j2"
    ]
    frames = [file for file in pages if "{% extends" in file.read_text()]
    assert len(frames) >= 4 and all(
        '{% extends "base.html.j2" %}' in file.read_text() for file in frames
    )
    styles = "".join(file.read_text() for file in [*pages, *folder.glob("*.css.j2")])
    assert not re.search(r"first-child[^{]*\{[^}]*!important", styles)


def doubts(monkeypatch, difference, shifts, withheld=""):
    """The notes on a difference between two sides of which the judge's errors shift SCS by so
    much.
    """
    sides = [SimpleNamespace(label=name, name=name, run=name) for name in shifts]

    def corrections(run):
        table = pd.DataFrame({"metric": ["SCS"], "correction": [shifts[run]]})
        return [evaluation.Correction(run, table, withheld, labelled=True)]

    monkeypatch.setattr(comparison, "corrections", corrections)
    row = {"domain": "all", "metric": "SCS", "run": "new", "difference": difference}
    return comparison._doubts(sides, pd.DataFrame([row]))


def test_only_the_errors_that_two_runs_do_not_share_count(monkeypatch):
    """+38.3 was once said to lie below a judge error of 48.8,
    where the two runs' errors differed by 10.5.
    """
    assert doubts(monkeypatch, 38.3, {"old": 48.8, "new": 38.3}) == []
    [note] = doubts(monkeypatch, 4.0, {"old": 48.8, "new": 38.3})
    assert "(+4.0) by -10.5, according to a model-based estimate" in note
    notes = doubts(monkeypatch, 4.0, {"old": 48.8, "new": 38.3}, "the judge's exam ended failed")
    assert [note.split(":")[0] for note in notes] == ["old", "new"]
    assert all("it is not known how much" in note for note in notes)
    assert all("because the judge's exam ended failed." in note for note in notes)
