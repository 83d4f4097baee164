"""Reports: missing pieces, hostile text, escaping, reproducible bytes."""

import csv
import io
import json
import random
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.io import runs
from memcalib.report import credit_viewer, figures, page, tables
from memcalib.products.reproduction import diagrams
from memcalib.report import training_report as report
from memcalib.report.run_data import load_run
from memcalib.problem import Level, Rollout, judgment_for, sample_records
from memcalib.io.records import DataError, printable, write_jsonl

HOSTILE = (
    '<script>alert(1)</script>"><img src=http://x.example/a onerror=alert(1)>{{7*7}}$x_1$=cmd|A1'
)
drawn = settings(max_examples=60, deadline=None, derandomize=True)


class Tags(HTMLParser):
    """Every tag and attribute of a page, as a browser would see them."""

    def __init__(self, source: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def safe(source: str) -> list[str]:
    """What on a page could run or reach outside."""
    bad = []
    for tag, attributes in Tags(source).tags:
        if tag in ("script", "iframe", "object", "embed", "link", "img", "base", "form"):
            bad.append(tag)
        bad += [name for name in attributes if name.startswith("on")]
        links = [attributes.get(name) or "" for name in ("href", "src", "xlink:href", "action")]
        bad += [link for link in links if link and not link.startswith("#")]
    return bad + re.findall(r"url\((?!#)[^)]*\)|@import", source)


def play(folder, models=("Cold-start", "GRPO"), text="", unscored=False, seeds=(1, 2)):
    """A small run with the right shape: answers to the nine records under seeded dice."""
    examples = [e.model_copy(update={"question": e.question + text}) for e in sample_records()]
    rollouts = []
    judgments = []
    for model in models:
        for seed in seeds:
            rng = random.Random(f"{model} {seed}")
            for example in examples:
                actual = {
                    i: Level(min(max(u + rng.choice([-1, 0, 0, 1]), 0), 2))
                    for i, u in example.levels.items()
                }
                if unscored and rng.random() < 0.4:
                    actual.popitem()
                fields = {"model": model, "seed": seed}
                rollouts.append(
                    Rollout(example_id=example.id, response=f"An answer.{text}", **fields)
                )
                judgments.append(judgment_for(example, actual, judge="dice", **fields))
    steps = [
        {"method": m, "seed": 1, "step": t, "reward": t / 9, "trigger/AB-": 0.1}
        for m in models
        for t in range(9)
    ]
    words = ["An", " answer", ".", text]
    share = {
        "atom_ids": [next(iter(examples[0].levels)), text],
        "reward": 1.0,
        "advantage": 0.5,
        "m": [1.0] * 4,
    }
    trace = {
        "method": models[-1],
        "example_id": examples[0].id,
        "seed": 1,
        "response": f"An answer.{text}",
    }
    trace |= {
        "tokens": words,
        "advantage": [0.1, -0.2, 0.0, None],
        "channels": {f"AB-{text}": share},
    }
    write_jsonl(folder / "examples.jsonl", examples)
    write_jsonl(folder / "rollouts.jsonl", rollouts)
    write_jsonl(folder / "judgments.jsonl", judgments)
    for name, rows in (("steps", steps), ("traces", [trace])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"profile": "played" + text, "methods": [*models, "SFT"]}
    runs.write_manifest(folder, runs.manifest(config, seeds=seeds, judge=text or "dice"))
    return folder


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        ({"world": "short"}, "<dt>world</dt><dd>short</dd>"),
        (
            {
                "models": {
                    "a": {"settings": {"data.world": {"name": "short"}}},
                    "b": {"settings": {"data.world": {"name": "long"}}},
                    "c": {"settings": {}},
                }
            },
            "<dt>world</dt><dd>short, long</dd>",
        ),
        ({"models": {"a": {"settings": {"data": {"train": "own.jsonl"}}}}}, None),
    ],
)
def test_the_world_of_a_run_is_named_and_questions_from_files_have_none(tmp_path, config, shown):
    play(tmp_path)
    runs.write_manifest(tmp_path, runs.manifest(config, seeds=[1], judge="dice"))
    source = report.write_report(tmp_path).read_text()
    assert shown in source if shown else "<dt>world</dt>" not in source


def test_a_full_run_gives_a_safe_page_and_the_same_bytes_again(tmp_path):
    path = report.write_report(play(tmp_path), published_model="Qwen3-8B")
    source = path.read_text()
    assert safe(source) == [] and source.count("<svg") == 3
    ids = [attributes["id"] for _, attributes in Tags(source).tags if "id" in attributes]
    named = {attributes["for"] for _, attributes in Tags(source).tags if "for" in attributes}
    assert len(ids) == len(set(ids)) and named and named <= set(ids)
    assert "79.54 ± 0.77" in source and "published" in source
    assert {p.suffix for p in (tmp_path / "tables").iterdir()} == {".csv", ".tex", ".md"}
    drawn = {p: p.read_bytes() for p in [path, *(tmp_path / "figures").iterdir()]}
    assert {p.suffix for p in drawn} == {".html", ".svg", ".png"}
    report.write_report(tmp_path, published_model="Qwen3-8B")
    assert all(p.read_bytes() == data for p, data in drawn.items())


def test_hostile_text_stays_text(tmp_path):
    models = ("Cold-start", HOSTILE, "_private")
    source = report.write_report(play(tmp_path, models, HOSTILE), title=HOSTILE).read_text()
    assert safe(source) == []
    assert "&lt;script&gt;" in source and "49" not in re.findall(
        r"\{\{.*?\}\}|onerror=alert\(1\)&gt;(\d+)", source
    )
    for file in (tmp_path / "tables").glob("*.csv"):
        cells = [cell for row in csv.reader(io.StringIO(file.read_text())) for cell in row]
        assert not [
            c
            for c in cells
            if c[:1] in "=+@\t\r" and c and not re.fullmatch(r"[+-]?\d+(\.\d+)?(e-\d+)?", c)
        ]
    for file in (tmp_path / "tables").glob("*.tex"):
        assert not re.search(r"(?<!\\)\$x", file.read_text())
    assert all("/" not in p.name and "script" not in p.name for p in tmp_path.rglob("*"))


@pytest.mark.parametrize(
    "present", [(), ("judgments",), ("steps",), ("traces",), ("rollouts",), ("examples",)]
)
def test_missing_pieces_are_not_run(tmp_path, present):
    play(tmp_path)
    for file in tmp_path.iterdir():
        if file.stem not in present:
            file.unlink()
    run = load_run(tmp_path)
    held = {
        "judgments": run.judgments,
        "steps": run.steps,
        "traces": run.traces,
        "rollouts": run.answers,
    }
    assert all((rows is not None) == (name in present) for name, rows in held.items())
    source = report.write_report(tmp_path).read_text()
    assert "not run" in source and safe(source) == []


def test_no_folder_and_bad_rows_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="this run folder does not exist"):
        load_run(tmp_path / "none")
    play(tmp_path)
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(DataError, match=r"steps\.jsonl:19"):
        load_run(tmp_path)


def test_what_cannot_be_used_is_left_out_and_said(tmp_path):
    play(tmp_path)
    with (tmp_path / "judgments.jsonl").open("a") as file:
        file.write('{"example_id": "x')
    (tmp_path / "manifest.json").write_text('{"git": "abc", "config": {"methods": ["GRPO"]}}')
    run = load_run(tmp_path)
    assert len(run.judgments) == 36 and run.config == {"methods": ["GRPO"]} and len(run.notes) == 2
    source = report.write_report(tmp_path).read_text()
    assert (
        "judgments.jsonl: the last line is incomplete" in source
        and "git was left out" in source
        and safe(source) == []
    )


@pytest.mark.parametrize("needed", [(), ("judgments.jsonl", "manifest.json")])
def test_a_folder_without_the_needed_files_is_refused(tmp_path, needed):
    (tmp_path / "notes.txt").write_text("hello")
    if needed:
        with pytest.raises(
            FileNotFoundError, match="not contain a run; looked for judgments.jsonl, manifest.json"
        ):
            load_run(tmp_path, needed)
    else:
        assert load_run(tmp_path).judgments is None


def test_results_keep_measured_control_and_not_run_apart(tmp_path):
    table = tables.results_table(load_run(play(tmp_path))).set_index("model")
    assert table["status"].to_dict() == {
        "Cold-start": "measured",
        "GRPO": "measured",
        "all Ignore": "control",
        "all Bound": "control",
        "all Control": "control",
        "SFT": "not run",
        "No memory": "not run",
    }
    text = tables.results_frame(table.reset_index())
    assert (text[text["status"] == "not run"].iloc[:, 2:] == "not run").all().all()
    assert not table.loc[["SFT", "No memory"], ["SCS", "responses"]].notna().any().any()


def test_a_measured_no_memory_run_is_a_control(tmp_path):
    play(tmp_path)
    run = load_run(tmp_path)
    run.judgments += [
        j.model_copy(update={"condition": "no_memory"}) for j in run.judgments if j.model == "GRPO"
    ]
    table = tables.results_table(run).set_index("model")
    assert table.loc["GRPO, no memory", "status"] == "control" and "No memory" not in table.index
    assert tables.differences_table(run)["method"].unique().tolist() == ["GRPO"]


def test_unscored_counts_reach_the_page(tmp_path):
    run = load_run(play(tmp_path, unscored=True))
    missing = sum(not j.scored for j in run.judgments)
    assert missing and tables.failures_table(run)["unscored responses"].sum() == missing
    table = tables.results_table(run)
    assert table.loc[table["status"] == "measured", "unscored_responses"].sum() == missing
    assert ">not scored<" not in report.write_report(tmp_path).read_text()


def test_a_run_with_nothing_scored_still_has_a_page(tmp_path):
    run = load_run(play(tmp_path))
    failed = [j.model_copy(update={"atoms": [], "error": "timeout"}) for j in run.judgments]
    write_jsonl(tmp_path / "judgments.jsonl", failed)
    assert (
        "none of the 36 judged answers could be scored" in report.write_report(tmp_path).read_text()
    )


def test_intermediate_evaluations_become_the_path(tmp_path):
    play(tmp_path)
    rows = [
        {"method": "GRPO", "seed": 1, "step": s, "sMOS": 10 + s, "sMUS": 40 - s} for s in (0, 5, 10)
    ]
    (tmp_path / "path.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(tmp_path)
    axes = report.run_figures(run)["plane"].axes[0]
    assert max(len(line.get_xdata()) for line in axes.lines) == 4


def test_evaluations_logged_while_training_are_a_path_too(tmp_path):
    play(tmp_path)
    row = {"method": "grpo", "seed": 1, "reward": 0.1, "valid_sMOS": 10.0}
    rows = [row | {"step": s, "valid_sMUS": 40 - s} for s in (5, 10)]
    rows.append({"method": "grpo", "seed": 1, "step": 11, "reward": 0.1})
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = load_run(tmp_path)
    assert run.validation_steps["method"].tolist() == ["GRPO"] * 2 and run.validation_steps[
        "sMUS"
    ].tolist() == [35, 30]
    axes = report.run_figures(run)["plane"].axes[0]
    assert max(len(line.get_xdata()) for line in axes.lines) == 4


def axis_texts(figure) -> list[tuple[str, ...]]:
    """The numbers at the axes of a figure as drawn; the last text of an axis is what would be added
    or multiplied.
    """
    figure.draw_without_rendering()
    axes = [axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)]
    return [
        (*(t.get_text() for t in axis.get_ticklabels()), axis.get_offset_text().get_text())
        for axis in axes
    ]


@drawn
@given(st.floats(-1e6, 1e6), st.floats(0, 1e3))
def test_an_axis_keeps_its_values_and_is_a_tenth_of_the_largest_wide(low, width):
    high = low + width
    a, b = figures.wide_enough(low, high)
    assert a <= low <= high <= b and (b - a) * 1.000001 >= max(abs(low), abs(high)) / 10
    assert (a, b) == (low, high) or b - a <= max(abs(low), abs(high)) / 9


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.sampled_from([0.0, 1e-8, 3e-6, 0.02, 1.0, 2e5, 3e9]),
    st.sampled_from([0.0, 1e-12, 1e-6, 0.3, 2.0]),
    st.integers(1, 40),
)
def test_every_number_at_an_axis_is_the_whole_number(level, noise, count):
    values = [level * (1 + noise * (k % 3)) for k in range(count)]
    rows = [
        {"method": m, "seed": 1, "step": k, "reward": v, "end_rate": (k + 1) / 41}
        for m in ("GRPO", "b")
        for k, v in enumerate(values)
    ]
    figure = figures.curves_figure(pd.DataFrame(rows), {"reward": "reward"})
    (*steps, below), (*numbers, above), *_ = axis_texts(figure)
    assert below == above == "" and all(text.isdigit() or text[1:].isdigit() for text in steps)
    low, high = figure.axes[0].get_ylim()
    read = [float(text.replace("\N{MINUS SIGN}", "-")) for text in numbers]
    assert read == pytest.approx(
        list(figure.axes[0].get_yticks()), rel=0.01, abs=0.01 * (high - low)
    )
    assert high - low >= 0.1 * level
    shares = figures.curves_figure(pd.DataFrame(rows), {"end_rate": "share that ends"})
    assert shares.axes[0].get_ylim() == (-0.03, 1.03)


def test_a_single_point_is_seen():
    rows = [{"method": "GRPO", "seed": 1, "step": 3, "reward": 1.0, "trigger/AB-": 0.1}]
    (line,) = figures.curves_figure(pd.DataFrame(rows)).axes[0].lines
    assert line.get_marker() == figures.METHOD_STYLES["GRPO"].marker
    assert {
        line.get_marker() for line in figures.rates_figure(pd.DataFrame(rows), "GRPO").axes[0].lines
    } == {"^"}


def channel_rows(**columns) -> pd.DataFrame:
    """Steps of a method with columns `threshold/...` of every channel,
    each a function of step and channel number.
    """
    rows = [
        {"method": "MemCalib-RL", "seed": 1, "step": step}
        | {
            f"{kind}/{c}": value(step, k)
            for kind, value in columns.items()
            for k, c in enumerate(figures.CHANNEL_NAMES)
        }
        for step in range(60)
    ]
    return pd.DataFrame(rows)


def test_channels_on_one_line_can_be_told_apart_without_colour():
    axes = figures.rates_figure(channel_rows(trigger=lambda step, k: step / 60)).axes
    assert len(axes) == 3, "a panel for each ideal level"
    for ax in axes:
        assert len({(line.get_marker(), line.get_linestyle()) for line in ax.lines}) == 3
        assert len({line.get_markevery() for line in ax.lines}) == 3


def test_what_never_moves_is_said_and_not_drawn():
    steps = channel_rows(trigger=lambda step, k: step / 60, threshold=lambda step, k: 0.02)
    figure = figures.rates_figure(steps)
    assert len(figure.axes) == 3 and "threshold (0.02 throughout)" in figure.get_supxlabel()
    assert len(figures.rates_figure(channel_rows(threshold=lambda step, k: 0.02)).axes) == 3, (
        "the only row stays"
    )
    rows = [
        {"method": m, "seed": 1, "step": k, "reward": k, "end_rate": 1.0}
        for m in "ab"
        for k in range(30)
    ]
    figure = figures.curves_figure(pd.DataFrame(rows))
    assert [ax.get_title(loc="left") for ax in figure.axes] == [
        "reward"
    ] and "share that ends" in figure.get_supxlabel()
    marks = [line.get_markevery() for line in figure.axes[0].lines]
    assert len(set(marks)) == 2, "equal curves have their marks at different steps"


def test_no_figure_is_wider_than_a_page():
    methods = [f"m{k}" for k in range(5)]
    rows = [
        {"method": m, "seed": 1, "step": k} | dict.fromkeys(figures.CURVES, k)
        for m in methods
        for k in range(9)
    ]
    counts = {name: np.full((3, 3), 5) for name in "abc"}
    drawn = [figures.curves_figure(pd.DataFrame(rows)), figures.channel_figure(counts)]
    drawn.append(figures.rates_figure(channel_rows(trigger=lambda step, k: step)))
    assert max(figure.get_figwidth() for figure in drawn) <= figures.WIDTH


@pytest.mark.parametrize(
    ("ends", "shown"), [(((3, 5), (4, 6)), 2), (((3, 5), (30, 6)), 1), (((3, 5),), 1)]
)
def test_points_that_lie_close_together_are_enlarged(ends, shown):
    rows = [
        {"model": "Cold-start", "sMOS": 20.0, "sMUS": 40.0},
        *({"model": f"m{k}", "sMOS": x, "sMUS": y} for k, (x, y) in enumerate(ends)),
    ]
    table = pd.DataFrame(
        [
            row | {f"{m}_{end}": row[m] for m in ("sMOS", "sMUS") for end in ("low", "high")}
            for row in rows
        ]
    )
    axes = figures.plane_figure(table).axes
    assert len(axes) == shown and len(figures.plane_figure(table, enlarged=False).axes) == 1
    if shown == 2:
        (low_x, right) = axes[1].get_xlim()
        (down, up) = axes[1].get_ylim()
        assert all(
            low_x <= x <= right and down <= y <= up for x, y in ends
        ) and right - low_x == pytest.approx(up - down)


def test_two_figures_share_no_id(tmp_path):
    judgments = [judgment_for(e, e.levels, model="m") for e in sample_records()]
    svg = figures.save_figure(figures.channel_figure({"m": judgments}), tmp_path / "channels")[
        0
    ].read_text()
    parts = [figures.inline_svg(svg, name) for name in ("a", "b")]
    ids = [set(re.findall(r'id="([^"]+)"', svg_part)) for svg_part in parts]
    assert ids[0] and not ids[0] & ids[1]
    for svg_part, own_ids in zip(parts, ids, strict=True):
        assert set(re.findall(r'(?:href="|url\()#([^")]+)', svg_part)) <= own_ids


@drawn
@given(st.text(max_size=40))
def test_csv_cells_never_start_a_formula(text):
    cell = tables.csv_cell(text)
    written = printable(text, keep="\n\t")
    assert cell == written or cell == f"'{written}"
    if re.match(r"\s*[=+\-@]", text) and not re.fullmatch(r"[+-]?\d+(\.\d+)?", text):
        assert cell.startswith("'")


@drawn
@given(st.text(max_size=40))
def test_markdown_cells_stay_in_their_cell(text):
    cell = tables.markdown_cell(text)
    assert "\n" not in cell and "<" not in cell
    assert not re.search(r"(?<!\\)(\\\\)*\|", cell)


@pytest.mark.parametrize("text", [r"\input{/etc/passwd}", "50% & #1_a", "~^{}", "$x$"])
def test_latex_cells_hold_no_command(text):
    import pandas as pd

    cell = tables.to_latex(pd.DataFrame({"m": [text]})).split("\\midrule\n")[1].split(" \\\\")[0]
    bare = re.sub(r"\\(textbackslash|textasciitilde|textasciicircum) ?|\\[%&#_{}$]", "", cell)
    assert not re.search(r"[\\%&#_{}$~^]", bare)


def trace_row(tokens, response, **fields):
    return {
        "example_id": "e1",
        "response": response,
        "tokens": tokens,
        "advantage": [0.1] * len(tokens),
    } | fields


@drawn
@given(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=12))
def test_tokens_of_a_trace_rebuild_the_answer(tokens):
    trace = credit_viewer.whole_trace(trace_row(tokens, "".join(tokens)))
    assert "".join(trace["tokens"]) == "".join(tokens) and trace["ends"][-1] == len(
        trace["response"]
    )


@drawn
@given(st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=12))
def test_spaces_that_a_tokenizer_dropped_and_marks_that_it_added_have_their_place(words):
    trace = credit_viewer.whole_trace(trace_row([*words, "<end>"], " ".join(words)))
    assert "".join(trace["tokens"]) == " ".join(words) + "<end>"
    assert trace["ends"][-1] == trace["ends"][-2] == len(trace["response"])  # no text of its own


def test_a_row_of_any_age_is_shown_with_what_it_has(tmp_path):
    m = {"atom_ids": ["a1"], "advantage": -0.4, "m": [1.0, 3.0]}
    even = {"atom_ids": ["a2"], "reward": 1.0, "advantage": 0.5, "m": None}
    channels = {"AC-": m, "B+": even, "C+": m | {"localized": False}}
    trace = credit_viewer.whole_trace(
        trace_row(["a", " b"], "a b", channels=channels | {"CA-": m | {"strength": 0.75}})
    )
    assert credit_viewer.token_values(trace, "AC-") == pytest.approx(
        [-0.4, -1.2]
    )  # strength 1 where none is given
    assert credit_viewer.token_values(trace, "CA-") == pytest.approx([-0.4, -0.4 * 2.5])
    assert credit_viewer.token_values(trace, "B+") == [0.5, 0.5]
    view = credit_viewer.answer_view(trace)
    assert [panel["even"] for panel in view["panels"][1:]] == [False, True, True, False]
    text = credit_viewer.credit_html(trace)
    assert "nan" not in text and "a1" in text and "reward +1.00" in text


def test_a_trace_of_unequal_lengths_is_refused():
    with pytest.raises(ValueError, match="2 tokens, 1 advantages"):
        credit_viewer.whole_trace(trace_row(["a", " b"], "a b", advantage=[0.1]))


def test_published_tables_are_named_and_complete():
    assert len(tables.published("main_results")) == 3 * 8 * 6
    with pytest.raises(KeyError, match="allowed: alternative_judge"):
        tables.published("none")
    with pytest.raises(KeyError, match="Ministral"):
        tables.published_table("GPT-2")
    assert tables.published_table("Qwen3.5-35B-A3B").shape == (8, 7)


def test_the_manifest_knows_its_code_and_data(tmp_path, monkeypatch):
    data = tmp_path / "data.jsonl"
    data.write_text("{}\n")
    content = runs.manifest({"steps": 1}, [42], {"data": data}, "judge", cost=0.5)
    assert content["data_sha256"]["data"] == runs.file_hash(data) and content["cost"] == 0.5
    assert content["versions"]["python"] and "wall_seconds" in content
    monkeypatch.setenv("PATH", "")
    assert runs.git_state() == {"commit": None, "dirty": None}
    with pytest.raises(FileNotFoundError):
        runs.manifest({}, data={"data": tmp_path / "none"})


def test_an_installed_copy_does_not_borrow_a_commit(tmp_path):
    import subprocess

    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "__init__.py").write_text("")
    assert runs.git_state(tmp_path) == {"commit": None, "dirty": None}


def test_cells_of_a_page():
    import pandas as pd

    frame = pd.DataFrame({"m": ["a"], "x": [1.26], "x_low": [1.0], "x_high": [2.0], "n": [3]})
    cells = page.grid_html(frame)["rows"][0]
    assert [c.text for c in cells] == ["a", "1.3", "3"] and cells[1].note == "1.0 to 2.0"
    assert list(page.flatten({"a": {}, "b": {"c": [1, 2]}})) == [("a", "{}"), ("b.c", "1, 2")]


def test_the_legend_has_the_looks_of_the_lines_where_a_method_has_no_values():
    values = {"A": float("nan"), "B": 1.0}
    rows = [
        dict(method=name, seed=1, step=t, reward=value)
        for t in (0, 1)
        for name, value in values.items()
    ]
    figure = figures.curves_figure(pd.DataFrame(rows))
    drawn = figure.axes[0].lines
    legend = figure.legends[0]
    assert [text.get_text() for text in legend.get_texts()] == ["B"]
    assert {line.get_color() for line in drawn if line.get_xdata().size} >= {
        legend.get_lines()[0].get_color()
    }
    assert legend.get_lines()[0].get_color() == figures.method_styles(["A", "B"])["B"].colour


def test_a_caption_says_what_its_numbers_are_of(tmp_path):
    caption = tables.caption("50 % & more", n="7 pairs", seeds=(1, 2), interval=None, ddof=1)
    assert all(
        phrase in caption for phrase in ("n = 7 pairs", "seeds 1, 2", "ddof = 1", "no interval")
    )
    with pytest.raises(ValueError, match="n: found no number"):
        tables.caption("x", n=" ", seeds=None, interval=None, ddof=None)
    with pytest.raises(TypeError):
        tables.caption("x", n="7 pairs")
    one = {"a": pd.DataFrame({"x": [1]})}
    tables.write_tables(tmp_path, one, {"a": caption})
    tables.write_tables(tmp_path, {"b": one["a"]}, {"b": "=1+1"})
    rows = list(csv.reader((tmp_path / "captions.csv").open()))
    assert rows == [["table", "caption"], ["a", caption], ["b", "'=1+1"]], "of both calls, harmless"
    assert r"\caption{50 \% \& more." in (tmp_path / "a.tex").read_text()
    assert (tmp_path / "a.md").read_text().startswith("50 % &amp; more.")
    assert (tmp_path / "a.csv").read_text() == "x\n1\n"
    with pytest.raises(ValueError, match="caption of 'c'.*allowed: a"):
        tables.write_tables(tmp_path, one, {"c": caption})


def dots(**changes) -> pd.DataFrame:
    rows = [
        {"label": label, "series": s, "value": k, "low": k - 1, "high": None}
        for k, label in enumerate("ab")
        for s in ("x", "y")
    ]
    return pd.DataFrame(rows).assign(**changes)


def test_markers_of_one_line_do_not_cover_each_other():
    figure = figures.dots_figure(dots(value=1.0), "points")
    heights = [tuple(line.get_ydata()) for line in figure.axes[0].lines[:2]]
    assert not set(heights[0]) & set(heights[1]) and figure.get_figwidth() == figures.WIDTH
    alone = figures.dots_figure(dots().drop_duplicates("label"), "points")
    assert alone.axes[0].lines[0].get_ydata().tolist() == [0, 1] and not alone.legends


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (dots().drop(columns="low"), "column 'low'"),
        (dots().iloc[:0], "no rows"),
        (dots(panel=["one", None, "one", "one"]), "row 1, column 'panel': found no value"),
        (dots(series=["x", "y", None, "y"]), "row 2, column 'series': found no value"),
    ],
)
def test_dots_of_nothing_are_an_error(table, message):
    with pytest.raises(ValueError, match=message):
        figures.dots_figure(table, "points")


def test_published_values_are_hollow():
    figure = figures.dots_figure(dots(series=["measured", "published"] * 2), "points")
    measured, published = figure.axes[0].lines[:2]
    assert published.get_markerfacecolor() == figures.PAPER != measured.get_markerfacecolor()


def test_a_case_shows_shares_and_takes_no_text_as_markup(tmp_path):
    sentences = ["$x_1$ and " + "long " * 60, HOSTILE]
    atom_fields = {"title": "$C+$", "atoms": [HOSTILE], "question": "_q_"}
    figure = figures.case_figure(sentences, ["key", "irrelevant"], [3, 1], [10, 30], **atom_fields)
    assert [bar.get_width() for bar in figure.axes[1].patches] == [75, 25]
    figures.save_figure(figure, tmp_path / "case")
    with pytest.raises(ValueError, match="2 sentences, 1 roles"):
        figures.case_figure(sentences, ["key"], [1, 1], [1, 1], **atom_fields)
    with pytest.raises(ValueError, match="role 'main'; allowed: key, partial, irrelevant"):
        figures.case_figure(sentences, ["key", "main"], [1, 1], [1, 1], **atom_fields)
    for credit in ([0, 0], [2, -1]):
        with pytest.raises(ValueError, match="credit: found .*; allowed: no weight below 0"):
            figures.case_figure(sentences, ["key", "key"], credit, [1, 1], **atom_fields)


def test_scores_in_the_overview_are_computed():
    def answer(*ranks):
        return diagrams.OverviewAnswer("mine", "An answer.", ranks)

    memory = [("m", Level.CONTROL), ("n", Level.IGNORE)]
    content = diagrams.Overview("q", memory, [answer(2, 0), answer(0, 1)])
    texts = [text.get_text() for text in diagrams.overview_diagram(content).axes[0].texts]
    assert "SCS 100   over 0   under 0" in texts and "SCS 12   over 50   under 75" in texts
    with pytest.raises(
        ValueError, match="answer 'mine': found 1 levels; allowed: one for each of 2"
    ):
        diagrams.Overview("q", memory, [answer(2)])


def test_the_method_shows_a_suppressed_word_of_a_channel_of_under_use():
    """Around the word that memory made least likely, even where another was made likelier by
    more.
    """
    used = {"d": [0.0, 2.0, -1.0, 0.0], "m": [0.5, 2.5, 0.5, 0.5]}
    under = {"d": [9.0, 0.0, 0.0, -1.0], "m": [0.5, 0.5, 0.5, 2.5]}
    trace = {
        "tokens": ["Leave", "out", "$Thai", "beef"],
        "channels": {"AC-": used, "CB-": under},
    }
    figure = diagrams.method_diagram(trace, "AC-", under="CB-")
    bars = [[bar.get_height() for bar in ax.patches] for ax in figure.axes[2:]]
    assert bars == [used["d"], used["m"], under["d"], under["m"]]
    framed = [patch for patch in figure.axes[1].patches if patch.get_linewidth() > 1]
    assert [(round(patch.get_x()), round(patch.get_y())) for patch in framed] == [(2, 0), (1, 2)]
    narrow = diagrams.method_diagram(trace, "AC-", most=2, under="CB-")
    labels = [label.get_text() for label in narrow.axes[5].get_xticklabels()]
    assert labels == ["$Thai", "beef"]


def test_counts_that_are_not_known_are_not_drawn_as_zeros():
    counts = np.array([[3.0, 1.0, 0.0], [np.nan, 2.0, 1.0], [0.0, 0.0, 0.0]])
    figure = figures.channel_figure({"a": counts}, down="person", across="judge")
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert texts.count("not stated") == 1
    assert texts.count("no atoms") == 3  # a row of zeros has no share
    assert [text for text in texts if "%" in text] == ["75.0 %", "25.0 %", "0.0 %"]
    plain = figures.channel_figure({"a": np.nan_to_num(counts).astype(int)})
    assert "not stated" not in [text.get_text() for text in plain.axes[0].texts]


def test_the_method_is_drawn_from_a_trace():
    channel_trace = {"d": [0.0, 2.0, -1.0], "m": [0.5, 2.0, 0.5]}
    trace = {"tokens": ["Keep", " $Thai", "."], "channels": {"B+": channel_trace}}
    figure = diagrams.method_diagram(trace, "B+")
    bars = [[bar.get_height() for bar in ax.patches] for ax in figure.axes[2:]]
    assert bars == [channel_trace["d"], channel_trace["m"]]
    assert len(diagrams.method_diagram(trace, "B+", most=2).axes[2].patches) == 2
    with pytest.raises(ValueError, match=r"channel 'C\+': not found in this trace; allowed: B\+"):
        diagrams.method_diagram(trace, "C+")
    with pytest.raises(ValueError, match=r"channel 'CA-': not found in this trace; allowed: B\+"):
        diagrams.method_diagram(trace, "B+", under="CA-")
    with pytest.raises(ValueError, match="found 1 stages; allowed: six"):
        diagrams.data_diagram([("a", "b")])


def test_the_lowest_panel_of_each_column_shows_its_numbers():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 3, sharex=True, squeeze=False)
    figures.hide_unused(axes, 4)
    figure.canvas.draw()
    shown = [
        [any(label.get_visible() for label in ax.get_xticklabels()) for ax in row] for row in axes
    ]
    assert shown[0] == [False, True, True] and shown[1][0]
    assert [ax.axison for ax in axes.flat] == [True] * 4 + [False] * 2
    plt.close(figure)
