"""The trace viewer: values, colours, escaping, what is picked, and the widget."""

import html
import re
from html.parser import HTMLParser
from importlib import resources

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import load_policy
from memcalib.io.records import DataError
from memcalib.trainer.train_config import world_config
from memcalib.trainer.traces import SCHEMA, TraceWriter, sample_credit
from memcalib.trainer.trace_files import read_traces, trace_of
from memcalib.commands.cli import app
from memcalib.report.credit_viewer import (
    MEASURES,
    REASONS,
    TraceViewer,
    credit_html,
    answer_view,
    fallback_counts,
    heat_class,
    heat_spans,
    pick_answers,
    token_values,
    visible_token,
    write_trace_page,
)

EVIL = '<script>alert("x")</script>&amp;\x1b[31m\u202e\'"'
numbers = st.floats(-5, 5)


@st.composite
def traces(draw):
    tokens = draw(st.lists(st.text(max_size=5), min_size=1, max_size=8))
    ends = [sum(map(len, tokens[: k + 1])) for k in range(len(tokens))]

    def values():
        return draw(st.lists(numbers, min_size=len(tokens), max_size=len(tokens)))

    channels = {}
    for name in draw(st.lists(st.sampled_from(["C+", "B+", "CA-"]), unique=True)):
        moved = draw(st.booleans())
        facts = {
            "reward": draw(numbers),
            "advantage": draw(numbers),
            "strength": 0.75 * moved,
            "threshold": 0.02,
        }
        gates = {
            "localized": moved,
            "fallback": None if moved else draw(st.sampled_from(list(REASONS))),
        }
        lists = {"d": values(), "q": values(), "m": values()}
        channels[name] = (
            {"atom_ids": ["a"], "atoms": [draw(st.text(max_size=5))]} | facts | gates | lists
        )
    texts = {
        "example_id": draw(st.text(min_size=1, max_size=9)),
        "question": draw(st.text(max_size=9)),
        "response": "".join(tokens),
    }
    scored = draw(st.booleans())
    judged = scored and draw(
        st.booleans()
    )  # a method without a judge has advantages and no rewards
    final = {
        "advantage": values() if scored else [None] * len(tokens),
        "reward": draw(numbers) if judged else float("nan"),
    }
    return (
        {"step": 1, "row": 2, "tokens": tokens, "ends": ends, "sequence": 0.5, "channels": channels}
        | texts
        | final
    )


class Reader(HTMLParser):
    """Collects tags, and the text and title of each span."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.spans = []
        self.open = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag == "span":
            self.open = True
            self.spans.append([dict(attrs), ""])

    def handle_endtag(self, tag):
        self.open = self.open and tag != "span"

    def handle_data(self, data):
        if self.open:
            self.spans[-1][1] += data


@given(traces())
def test_spans_hold_the_tokens_and_nothing_else(trace):
    for channel in (None, *trace["channels"]):
        text, scale = heat_spans(trace, channel)
        read_page = Reader(text)
        assert set(read_page.tags) == {"span"} and len(read_page.spans) == len(trace["tokens"])
        values = token_values(trace, channel)
        assert scale == max((abs(v) for v in values if v is not None), default=0)
        for (attributes, shown), token, value in zip(
            read_page.spans, trace["tokens"], values, strict=True
        ):
            class_name = heat_class(value, scale)
            assert set((attributes["class"] or "").split()) - {"name"} == set(class_name.split())
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e]", shown)
            if token.isascii() and token.isprintable():
                assert shown == token


@given(traces())
def test_the_push_is_the_formula(trace):
    for name, channel in trace["channels"].items():
        eta = channel["strength"]
        expected = [channel["advantage"] * ((1 - eta) + eta * m) for m in channel["m"]]
        assert token_values(trace, name) == pytest.approx(expected)
        assert token_values(trace, name, "m") == pytest.approx([m - 1 for m in channel["m"]])
        assert (
            token_values(trace, name, "d") == channel["d"]
            and token_values(trace, name, "q") == channel["q"]
        )


@given(st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True)), st.floats(0, 10))
def test_classes_are_signed_bins(value, scale):
    heat_name = heat_class(value, scale)
    if value is None or value != value or value == 0 or scale == 0:
        assert heat_name == ""
    else:
        assert re.fullmatch(r"[pn](10|[1-9])", heat_name) and (heat_name[0] == "p") == (value > 0)


def test_unknown_channels_and_measures_are_named():
    trace = {
        "advantage": [0.0],
        "channels": {"C+": {"advantage": 1, "strength": 0, "m": [1], "q": [0], "d": [0]}},
    }
    with pytest.raises(KeyError, match=r"channel 'B\+'; allowed: C\+"):
        token_values(trace, "B+")
    with pytest.raises(KeyError, match="measure 'z'; allowed: push, m, q, d"):
        token_values(trace, "C+", "z")
    with pytest.raises(KeyError, match="none: this answer has no scored channel"):
        token_values(trace | {"channels": {}}, "B+")


@given(traces())
def test_views_name_the_reason_and_mark_even_credit(trace):
    view = answer_view(trace)
    assert [panel["name"] for panel in view["panels"]] == ["all channels", *trace["channels"]]
    for panel in view["panels"][1:]:
        channel = trace["channels"][panel["name"]]
        assert panel["even"] == (not channel["localized"])
        assert ("credit moved" in panel["note"]) == channel["localized"]
        assert channel["localized"] or REASONS[channel["fallback"]] in panel["note"]
    note = view["panels"][0]["note"]
    credited = None not in trace["advantage"]
    assert ("reward" in note) == (trace["reward"] == trace["reward"])
    assert ("not scored" in note) == (trace["reward"] != trace["reward"] and not credited)
    assert ("no judge" in note) == (trace["reward"] != trace["reward"] and credited)
    assert ("advantage +0.500" in note) == credited


WORDS = {
    "push": ("discouraged -{:.3f}", "+{:.3f} encouraged"),
    "d": ("less likely with the atoms -{:.3f}", "+{:.3f} more likely with the atoms"),
    "m": ("less credit -{:.3f}", "+{:.3f} more credit"),
    "q": ("weight 0", "{:.3f}"),
}


def legends(text):
    return re.findall(
        r'<div class="legend"><span>(.*?)</span><i(.*?)></i><span>(.*?)</span></div>', text
    )


@pytest.mark.parametrize("measure", MEASURES)
def test_the_legend_says_what_its_measure_means(measure):
    channel = {
        "atom_ids": ["a"],
        "atoms": ["Tea."],
        "reward": 1.0,
        "advantage": 0.5,
        "strength": 0.75,
    }
    channel |= {
        "localized": True,
        "fallback": None,
        "d": [-1.25, 0.5],
        "q": [0.0, 0.75],
        "m": [0.25, 1.75],
    }
    trace = {
        "step": 1,
        "row": 2,
        "tokens": ["a", "b"],
        "ends": [1, 2],
        "advantage": [-2.0, 1.0],
        "sequence": 1.0,
    }
    trace |= {
        "example_id": "e",
        "question": "q",
        "response": "ab",
        "reward": 1.0,
        "channels": {"CB-": channel},
    }
    every, (low, style, high) = legends(credit_html(trace, [None, "CB-"], measure))
    assert every == ("discouraged -2.000", "", "+2.000 encouraged")  # whatever colours a channel
    scale = {"push": 0.5 * (1 + 0.75 * 0.75), "d": 1.25, "m": 0.75, "q": 0.75}[measure]
    assert (low, high) == tuple(words.format(scale) for words in WORDS[measure])
    assert ("weights" in style) == (measure == "q")


def test_nothing_on_a_page_runs():
    channel = {
        "atom_ids": [EVIL],
        "atoms": [EVIL],
        "reward": 1,
        "advantage": 1,
        "strength": 0,
        "threshold": 0.02,
    }
    channel |= {"localized": False, "fallback": EVIL, "d": [0.1], "q": [0.1], "m": [1]}
    trace = {
        "step": 1,
        "row": 2,
        "tokens": [EVIL],
        "ends": [5],
        "advantage": [1.0],
        "sequence": 1.0,
        "reward": 1.0,
    }
    trace |= {"example_id": EVIL, "question": EVIL, "response": EVIL, "channels": {"C+": channel}}
    page = credit_html(trace)
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
    assert html.escape("<script>") in page


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with traces of two steps, and the frame of them."""
    folder = tmp_path_factory.mktemp("run")
    model, tokenizer = load_policy("cold-short")
    examples = make_examples("short", 3, 0, "test")
    config = world_config(WORLDS["short"])
    evil = examples[0].model_copy(update={"id": f"evil {EVIL}"})
    for step in (2, 11):
        batch = sample_credit(model, tokenizer, [evil, *examples[1:]], exact_judge, config, step)
        TraceWriter(folder / "traces").write(
            step, *batch, tokenizer, method=EVIL if step == 2 else "memcalib-rl"
        )
    return folder, read_traces(folder)


def test_the_page_is_one_safe_file(run, tmp_path):
    folder, frame = run
    file = write_trace_page(folder, tmp_path / "page.html", limit=1000)
    text = file.read_text(encoding="utf-8")
    assert "default-src 'none'" in text and "<script" not in text and "\x1b" not in text
    assert not re.search(r"(src|href)=\"(?!#)", text) and "http://" not in text
    assert text.count('<details class="answer"') == frame["channel"].isna().sum()
    assert "All are shown." in text and html.escape("<script>alert(") in text
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]


def test_identifiers_on_the_page_are_unique_and_every_label_has_its_button(run, tmp_path):
    text = write_trace_page(run[0], tmp_path / "page.html").read_text()
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'for="([^"]+)"', text)) <= set(names)
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(names)


def test_what_is_left_out_is_said(run, tmp_path):
    folder, frame = run
    text = write_trace_page(folder, tmp_path / "page.html", steps=[11], limit=3).read_text()
    total = int((frame["channel"].isna() & (frame["step"] == 11)).sum())
    assert (
        f"{total:,} answers. This page shows 3 answers with the most localized channels, and "
        f"leaves out the other {total - 3:,}." in text
    )
    assert (
        text.count('<details class="answer"') == 3
        and 'id="step-11"' in text
        and 'id="step-2"' not in text
    )


@pytest.mark.parametrize("channel", [None, "C+"])
def test_the_answers_with_most_localized_channels_are_picked(run, channel):
    frame = run[1]

    def count(s, r):
        return sum(
            c["localized"]
            for name, c in trace_of(frame, s, r)["channels"].items()
            if channel in (None, name)
        )

    answers = frame[frame["channel"].isna()]
    every = {(s, r): count(s, r) for s, r in zip(answers["step"], answers["row"], strict=True)}
    chosen = pick_answers(frame, 5, channel)
    least = min(every[key] for key in chosen)
    assert chosen == sorted(chosen) and len(chosen) == 5
    assert all(every[key] <= least for key in every if key not in chosen)
    assert channel is None or least > 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 40))
def test_answers_without_channels_are_spread_over_the_steps(sizes, limit):
    answer_keys = [(step, row) for step, size in enumerate(sizes, 1) for row in range(size)]
    frame = pd.DataFrame(answer_keys, columns=["step", "row"]).assign(channel=None, localized=None)
    chosen = pick_answers(frame, limit)
    assert chosen == sorted(set(chosen)) and len(chosen) == min(limit, len(answer_keys))
    at = [answer_keys.index(answer_key) for answer_key in chosen]
    gaps = [b - a for a, b in zip(at, [*at[1:], len(answer_keys)], strict=True)]
    assert at[0] == 0 and max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("template", "wide"),
    [
        ("report.html.j2", ("plane", "channels", "curves", "rates")),
        ("evaluation.html.j2", ("parts",)),
        ("comparison.html.j2", ("comparison-plane", "comparison-differences")),
    ],
)
def test_figures_of_several_panels_keep_their_size_and_scroll(template, wide):
    """On a narrow screen such a figure is read by moving it in its box;
    on paper it is as wide as the page.
    """
    data = resources.files("memcalib") / "report" / "templates"
    base, style = ((data / name).read_text() for name in ("base.html.j2", template))
    assert (
        re.search(r"^figure { [^}]*overflow-x: auto; }", base, re.M)
        and "figure svg { max-width: 100%;" in base
    )
    (rule,) = re.findall(r"@media screen { (.*?) { max-width: none; } }", style)
    assert rule.split(", ") == [f"figure.{name} svg" for name in wide]


def test_picking_nothing_is_an_error(run):
    with pytest.raises(ValueError, match="limit is 0; it must be at least 1"):
        pick_answers(run[1], 0)
    with pytest.raises(ValueError, match=r"no answer with A\+ localized; allowed: AB-"):
        pick_answers(run[1], 5, "A+")


def test_counts_are_those_of_the_frame(run):
    counts = fallback_counts(run[1]).set_index("channel")
    pairs = run[1].dropna(subset="channel")
    for name, row in counts.iterrows():
        channel_pairs = pairs[pairs["channel"] == name]
        assert row["pairs"] == len(channel_pairs) and row["localized %"] == pytest.approx(
            100 * channel_pairs["localized"].mean()
        )
        assert all(row[reason] == (channel_pairs["fallback"] == reason).sum() for reason in REASONS)
    assert fallback_counts(run[1][run[1]["channel"].isna()]).empty


def test_a_method_without_channels_has_a_page(tmp_path):
    model, tokenizer = load_policy("cold-short")
    config = world_config(WORLDS["short"], method="gdpo")
    batch = sample_credit(
        model, tokenizer, make_examples("short", 1, 0, "test"), exact_judge, config
    )
    TraceWriter(tmp_path).write(1, *batch, tokenizer)
    text = write_trace_page(tmp_path).read_text()
    assert (
        "assigns no credit by channel" in text and "not recorded" in text and "all channels" in text
    )
    assert "8 answers. All are shown." in text and "no judge" not in text
    assert (
        "8 answers. This page shows 3 answers at equal distances, and leaves out the other 5."
        in write_trace_page(tmp_path, limit=3).read_text()
    )


def test_a_method_without_a_judge_says_so(run, tmp_path):
    (source,) = run[0].rglob("step-000002.parquet")
    table = pq.read_table(source)
    rows = [row | {"reward": None} for row in table.to_pylist() if row["channel"] is None]
    rows[1]["token_advantage"] = None  # not even credit: this one is unscored
    pq.write_table(
        pa.Table.from_pylist(rows, SCHEMA.with_metadata(table.schema.metadata)),
        tmp_path / source.name,
    )
    text = write_trace_page(tmp_path, limit=len(rows)).read_text()
    assert text.count("</b>no judge, advantage") == len(rows) - 1
    assert text.count("</b>not scored, ") == 1 and "not scored, advantage" not in text
    labels = [label for label, _ in TraceViewer(tmp_path).answer.options]
    assert sum("no judge" in label for label in labels) == len(rows) - 1
    assert "not scored" in labels[1]


def test_a_link_leads_into_an_answer_and_paper_says_what_is_missing(run, tmp_path):
    text = write_trace_page(run[0], tmp_path / "page.html", limit=2).read_text()
    for shown_answer in text.split('<details class="answer">')[1:]:
        assert re.search(
            r'</summary>\s*<div id="answer-\d+-\d+">', shown_answer
        )  # a browser opens what holds the aim of a link
    assert "when the page was printed" in text and '<b class="printed">all channels: </b>' in text
    style = text.split("</style>")[0]
    assert (
        "rgba(47, 109" not in style and style.count("--more: ") == 2
    )  # one definition of a colour for each theme


def test_the_widget_follows_its_lists(run):
    folder, frame = run
    viewer = TraceViewer(folder)
    assert list(viewer.step.options) == [2, 11] and viewer.measure.disabled
    viewer.step.value = 11
    assert set(viewer.frame["step"]) == {11}
    for row in (0, 5):
        viewer.answer.value = row
        expected = trace_of(frame, 11, row)
        assert viewer.trace["tokens"] == expected["tokens"]
        assert [value for _, value in viewer.channel.options] == ["", *expected["channels"]]
        name = list(expected["channels"])[-1]
        viewer.channel.value = name
        for measure, words in MEASURES.items():
            viewer.measure.value = measure
            assert words in viewer._body.value and not viewer.measure.disabled
    assert "<script" not in viewer._body.value


def test_the_widget_keeps_the_channel_where_the_next_answer_has_it(run):
    viewer = TraceViewer(run[0])
    rows = run[1][(run[1]["step"] == 2) & (run[1]["channel"] == "C+")]["row"].tolist()
    viewer.answer.value = rows[0]
    viewer.channel.value = "C+"
    viewer.answer.value = rows[1]
    assert viewer.channel.value == "C+" and viewer.trace["row"] == rows[1]


def test_folders_without_traces_and_torn_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace files"):
        TraceViewer(tmp_path)
    (tmp_path / "step-000001.parquet").write_bytes(b"PAR1torn")
    with pytest.raises(DataError, match="a complete Parquet file"):
        write_trace_page(tmp_path)
    assert not (tmp_path / "traces.html").exists()


def invoke(*arguments):
    return CliRunner().invoke(app, ["traces", *map(str, arguments)])


def test_the_verb_writes_the_page(run, tmp_path):
    done = invoke(
        run[0], "--out", tmp_path / "page.html", "--steps", "2,11", "--limit", 2, "--channel", "C+"
    )
    assert done.exit_code == 0 and done.output.strip() == str(tmp_path / "page.html")
    assert "The page shows 2 with C+ localized" in (tmp_path / "page.html").read_text()


def test_the_page_needs_a_file_and_makes_its_folder(run, tmp_path):
    assert invoke(run[0], "--out", tmp_path / "new" / "page.html").exit_code == 0
    assert (tmp_path / "new" / "page.html").is_file()
    done = invoke(run[0], "--out", tmp_path)
    assert isinstance(done.exception, IsADirectoryError) and "traces.html" in str(done.exception)
    assert not tmp_path.with_name(tmp_path.name + ".part").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "two"], "--steps: found 'two'; allowed: whole numbers"),
        (["--steps", "3"], r"no traces of step 3; allowed: \[2, 11\]"),
        (["--limit", "0"], "limit is 0; it must be at least 1"),
        (["--channel", "Q"], "no answer with Q localized; allowed: AB-"),
    ],
)
def test_the_verb_names_what_is_wrong(run, tmp_path, arguments, message):
    done = invoke(run[0], "--out", tmp_path / "page.html", *arguments)
    assert done.exit_code != 0 and re.search(message, str(done.exception))
    assert not (tmp_path / "page.html").exists()


ODD = [
    *(
        "<script>alert(1)</script>",
        '"',
        "'",
        "&amp;",
        "</span></p></details>",
        "<!--",
        "{{ 7 * 7 }}",
        "\N{TEACUP WITHOUT HANDLE}",
    ),
    *(
        "\u05e9\u05dc\u05d5\u05dd",
        "\u202e",
        "\u2066",
        "\u200b",
        "\u200d",
        "\ufeff",
        "\x00",
        "\x1b[31m",
        "\n",
        "\t",
    ),
    *(" word", "\u0301"),
]


@pytest.fixture(scope="module")
def odd(run, tmp_path_factory):
    """The folder of the run, with 5,000 tokens of the kind above in its first answer."""
    import numpy as np

    (source,) = run[0].rglob("step-000002.parquet")
    folder = tmp_path_factory.mktemp("odd")
    table = pq.read_table(source)
    rng = np.random.default_rng(0)
    rows = table.to_pylist()
    tokens = [ODD[k] for k in rng.integers(len(ODD), size=5000)]
    odd_row = next(row["row"] for row in rows if row["channel"] and row["localized"])
    lists = {
        "tokens": tokens,
        "ends": np.cumsum([*map(len, tokens)]).tolist(),
        "token_ids": list(range(5000)),
    }
    for row in rows:
        if row["row"] == odd_row and row["channel"]:
            row |= {name: rng.random(5000).tolist() for name in "dqm"} | {
                "atoms": [ODD[0] + ODD[9]]
            }
        elif row["row"] == odd_row:
            row |= lists | {
                "response": "".join(tokens),
                "question": "".join(ODD),
                "example_id": ODD[0],
            }
            row["token_advantage"] = (rng.random(5000) - 0.5).tolist()
    pq.write_table(
        pa.Table.from_pylist(rows, SCHEMA.with_metadata(table.schema.metadata)),
        folder / source.name,
    )
    return folder, odd_row, tokens


class Links(HTMLParser):
    """Ids, what refers to them, what would be loaded, and the text of the spans of each panel."""

    def __init__(self, text):
        super().__init__()
        self.ids = []
        self.links = []
        self.loads = []
        self.handlers = []
        self.heat = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.ids += [attributes["id"]] if "id" in attributes else []
        self.links += [
            attributes[name].removeprefix("#") for name in ("href", "for") if name in attributes
        ]
        self.loads += [
            value for name, value in attrs if name in ("src", "srcset", "data", "action", "poster")
        ]
        self.loads += (
            [tag]
            if tag in ("script", "link", "iframe", "object", "embed", "img", "form", "base")
            else []
        )
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag == "p" and "heat" in (attributes.get("class") or ""):
            self.heat.append([])
            self.inside = True
        elif tag == "span" and self.inside:
            self.heat[-1].append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != "p"

    def handle_data(self, data):
        if self.inside and self.heat[-1]:
            self.heat[-1][-1] += data


def test_a_long_answer_of_odd_texts_stays_text(odd):
    folder, odd_row, tokens = odd
    text = write_trace_page(folder).read_text(encoding="utf-8")
    page = Links(text)
    assert not page.loads and not page.handlers and "url(" not in text and "@import" not in text
    assert len(page.ids) == len(set(page.ids)) and set(page.links) <= set(page.ids)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", text)
    assert [span for span in page.heat if len(span) == 5000][0] == [
        visible_token(token) for token in tokens
    ]
    assert (
        f'id="answer-2-{odd_row}"' in text
        and "{{ 7 * 7 }}" in text
        and "49" not in html.unescape(text)[:200]
    )


@given(st.text(max_size=6))
def test_a_token_shows_something_and_loses_nothing(token):
    shown = visible_token(token)
    assert bool(shown) == bool(token) and not re.search(
        "[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", shown
    )
    assert shown.count("\n") == token.count("\n") == shown.count("↵\n")
    if token.isprintable() and token.strip():
        assert shown == token
    if set(token) & set("\u200b\ufeff\u2060") == set(token):
        assert shown == token.encode("unicode_escape").decode()


def test_a_page_reads_the_long_columns_of_chosen_steps_only(run, tmp_path, monkeypatch):
    reads = []

    def read(folder, steps=None, columns=None):
        reads.append((steps, columns))
        return read_traces(folder, steps, columns)

    monkeypatch.setattr("memcalib.report.credit_viewer.read_traces", read)
    write_trace_page(run[0], tmp_path / "page.html", limit=1)
    (first, light), *others = reads
    assert first is None and not {"tokens", "response", "d", "q", "m"} & set(light)
    assert len(others) == 1 and len(others[0][0]) == 1 and others[0][1] is None
