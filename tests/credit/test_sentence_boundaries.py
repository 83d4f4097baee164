"""Each rule of where a segment may start: a case it applies to, and one that it just misses."""

import logging
import sys
from collections import Counter
from itertools import pairwise
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memcalib.credit.sentences import (
    BLOCK_RULES,
    Parse,
    blocks,
    boundaries,
    inside_of,
    is_connector,
    is_label,
    line_kind,
    outline,
    protected,
    punctuated,
    segment,
    sentence_splitter,
    settle,
    spacy_splitter,
    speakers,
    splitter_name,
    splitter_version,
)

PYSBD = sentence_splitter("pysbd")


def no_sentences(text):
    """A splitter that finds nothing: what is cut then is cut by structure and punctuation."""
    return Parse()


def cut(text: str, sentences=no_sentences) -> list[str]:
    edges = [*boundaries(text, sentences).starts, len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@pytest.mark.parametrize("blank", ["\n\n", "  \n", "\r\n \n"])
def test_blank_lines_before_an_answer_move_its_blocks_and_change_nothing_else(blank):
    answer = "# Plan\n\nEat oats. Drink milk.\n\n- one\n- two\n"
    moved = [
        (block.kind, block.start - len(blank), block.end - len(blank))
        for block in blocks(blank + answer)
    ]
    assert moved == [(block.kind, block.start, block.end) for block in blocks(answer)]
    starts = [*boundaries(answer, no_sentences).starts]
    assert [*boundaries(blank + answer, no_sentences).starts] == [
        0,
        *(len(blank) + start for start in starts),
    ]


def test_pysbd_gives_the_start_of_every_sentence():
    assert PYSBD("Eat oats. Drink milk. Sleep well.").starts == [0, 10, 22]


CASES = {
    "heading joins": ["## Plan\n\nOats. ", "Milk."],
    "paragraphs": ["Oats\n\n", "Milk"],
    "rule joins the next": ["Oats.\n\n", "---\n\nMilk."],
    "html": ["Oats.\n\n", "<div>\na. B\n</div>\n\n", "Milk."],
    "label joins the list": ["You need:\n\n1. oats\n", "2. milk\n"],
    "bold label": ["**Food**\n\n- oats\n", "- milk\n"],
    "long colon is no label": [
        "One two three four five six seven eight nine ten one two three four five:\n\n",
        "- oats\n",
    ],
    "last line is a label": ["Eat well.\n", "You need:\n\n- oats\n", "- milk\n"],
    "label item": ["- Food:\n  1. oats\n  ", "2. milk\n", "- Sleep\n"],
    "plain item": ["- Food\n  ", "- oats\n", "- Sleep\n"],
    "label item without children": ["- Food:\n", "- Sleep\n"],
    "code ends": ["Run it.\n\n", "```\na. B\n\nc\n```\n", "Done."],
    "indented code": ["Run it.\n\n    ", "a. B\n    c\n\n", "Done."],
    "rows": ["| a | b |\n|---|---|\n", "| A. B | c |\n", "| d | e |\n"],
    "quoted paragraphs": ["> Oats.\n>\n", "> Milk.\n"],
    "quoted sentences": ["> Oats are good.\n", "> Milk is too.\n"],
    "wrapped quote": ["> Oats are\n> good.\n"],
    "item paragraphs": ["- Oats.\n\n  ", "Milk.\n"],
    "emoji line after a block": ["Done.\n\n🎉 🎉\n\n", "Next."],
    "emoji line in a paragraph": ["Done.\n🎉\n", "Next one."],
    "emoji at the end": ["Done! 🎉 ", "Next."],
    "emoji opens a line": ["Done!\n", "🎯 Next."],
    "emoji behind a heading": ["# Plan\n\n🎉\n\nOats."],
    "stage direction": ["I know\n", "[She laughs]\n", "and you do not."],
    "stage direction as a block": ["ANNA\n\n", "*[softly]*\n\n", "Hello there."],
    "footnote is no direction": ["I know\n[1]\nand you."],
    "fields": ["Name: Ann Lee\n", "Age: 34 years\n", "Town: Bern"],
    "one field": ["I say\nName: Ann Lee\nand more"],
    "quoted lines": ["“Come in now”\n", "“I will not”\n", "“Then stay”"],
    "half quoted lines": ['"Come in," he said, "or go"\n"I will not," she said, "go"'],
    "speaker with colon": ["Anna:\n\nHello there. ", "Come in.\n\n", "Ben:\n\nHi."],
    "speaker in capitals": ["ANNA\n\nHello there.\n\n", "BEN (aside)\n\nHi."],
    "speaker twice": ["Anna\n\nHello.\n\n", "Anna\n\nBye."],
    "name once": ["Paris\n\n", "A city."],
    "connector": ["Oats.\n\n", "or\n\nmilk."],
    "no connector": ["Oats.\n\n", "or not\n\n", "milk."],
    "abbreviations": ["See Dr. Lee, e.g. Monday, cf. Fig. 3 or No. 7. ", "Then rest."],
    "no": ["No. ", "I will not."],
    "initials": ["J. K. Lee and A. Bo wrote it. ", "We read."],
    "one letter word": ["So do I. ", "We read."],
    "lower case goes on": ["It is 5 min. or so... maybe. ", "Yes."],
    "closing quote": ["He said “Go now.” ", "She went. ", "(It was late.) ", "Then night."],
    "speech goes on": ['"Stop!" he said.'],
    "number of an item": ["3. Oats are good. ", "Milk too."],
    "year": ["It was in 2020. ", "Then it rained."],
    "arabic": ["هل تنام جيدا؟ ", "نعم."],
    "chinese": ["你好。", "再见！", "走"],
    "technical quote": ['Open "My files/A. Lee" now. ', "Then stop."],
    "plain quote": ['"Open it. ', 'Then stop" he said.'],
    "bold": ["It is **Very good. Really** so."],
    "long bold": ["It is **very good and " + "so " * 20 + "on. ", "Really** so."],
    "code": ["Run `a. B` now. ", "Then stop."],
    "formula": ["So $$a = b. C\n- d$$ holds. ", "Then stop."],
    "prices": ["It costs $5. ", "Then $6."],
    "destination": ["See [it](u. V). ", "Then stop."],
    "link text may be cut": ["See [it. ", "All](u)."],
    "autolink": ["See <mailto:a@b.c>! ", "Or https://a.b/c?D=1. ", "Then stop."],
    "tag": ['See <b title="A. B"> it.'],
    "less than": ["If a <b. ", "Then c> d."],
    "dotted": ["Call np.Mean.X now."],
}


@pytest.mark.parametrize("name", CASES)
def test_cuts(name):
    assert cut("".join(CASES[name])) == CASES[name]


HARD = {
    "bullets are soft": ("- oats\n- milk", []),
    "numbers are hard": ("1. oats\n2. milk", ["1.", "2."]),
    "rows are hard": ("| a |\n|---|\n| b |", ["|", "|"]),
    "quoted paragraphs": ("> Oats.\n>\n> Milk.", [">"]),
    "paragraphs are soft": ("Oats.\n\nMilk.", []),
    "directions are hard on both sides": ("I\n[laughs]\nyou", ["[laughs]", "you"]),
    "sentences are soft": ("Oats. Milk.", []),
}


@pytest.mark.parametrize("name", HARD)
def test_hard_boundaries(name):
    text, expected = HARD[name]
    starts = boundaries(text, no_sentences).starts
    hard = [start for start, is_hard in starts.items() if is_hard]
    assert [text[start:].split()[0] for start in hard] == expected


def test_splitter_and_own_rule_are_united():
    text = "oats are good. milk is good! Then rest."

    def splitter(prose):
        return Parse([0, prose.index("milk")])

    assert cut(text) == ["oats are good. milk is good! ", "Then rest."]
    assert cut(text, splitter) == ["oats are good. ", "milk is good! ", "Then rest."]


def test_starts_of_a_splitter_are_settled():
    text = "“Well done.” 🎉 Now rest."

    def early(prose):
        return Parse([0, prose.index("”"), prose.index("🎉")])

    assert cut(text, early) == ["“Well done.” 🎉 ", "Now rest."]


def test_pysbd_takes_no_line_break_for_an_end():
    assert cut("Oats are\ngood for\r\nyou. Yes.", PYSBD) == ["Oats are\ngood for\r\nyou. ", "Yes."]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet='a B.!?"”) *🎉\n>。\u200b\u200fא', max_size=40))
def test_settled_positions_move_forward_and_stay(text):
    for position in range(len(text) + 1):
        settled = settle(text, position)
        assert position <= settled <= len(text)
        assert settled == len(text) or not text[settled].isspace()
    starts = punctuated(text)
    assert all(0 < start < len(text) for start in starts)
    assert starts == sorted(set(starts))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80) | st.text(alphabet="-#>*`|1. \n\ta:[]🎉", max_size=40))
def test_blocks_and_outline_lie_in_the_text(text):
    for block in blocks(text):
        assert block.kind in BLOCK_RULES
        assert 0 <= block.start <= len(text)
        assert block.end <= len(text)
        assert block.inline is None or block.start <= block.inline
    plan = outline(text)
    for start, end in plan.prose + plan.whole:
        assert 0 <= start <= end <= len(text)
    for position in (*plan.starts, *plan.joined, *plan.alone):
        assert 0 <= position <= len(text)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=8))
def test_inside_is_strict_in_the_union(pairs):
    spans = [(start, start + size) for start, size in pairs]
    is_inside = inside_of(spans)
    covered = set()
    edges = set()
    for start, end in spans:
        covered.update(range(start, end))
        edges |= {start, end}
    for position in range(-1, 42):
        in_one_span = any(start < position < end for start, end in spans)
        between_spans = position in edges and {position - 1, position} <= covered
        assert is_inside(position) == in_one_span or between_spans


def test_lines():
    assert is_label("**Note:**")
    assert is_label("Two things:")
    assert not is_label("Two things.")
    assert not is_label("")
    assert is_connector("(and)")
    assert not is_connector("sand")
    assert not is_connector("")
    assert line_kind("[Enter Ann]") == "direction"
    assert line_kind("[x] done") == ""
    assert line_kind("https://a.b") == ""
    assert speakers("Yes.\n\nYes.") == frozenset()
    assert speakers("A\n\nB") == frozenset()
    assert protected("2 * 3 * 4") == []
    assert protected("don't stop. it's 'a/b'") == [(17, 22)]


class Word(SimpleNamespace):
    pass


def fake_model(text: str):
    """A pipeline with the surface of spaCy's: sentences at capitals,
    every word hanging on the one before.
    """
    words = []
    position = 0
    for index, word in enumerate(text.split()):
        position = text.index(word, position)
        words.append(Word(idx=position, i=index, text=word))
        position += len(word)
    for index, word in enumerate(words):
        word.head = words[max(index - 1, 0)]

    class Doc(list):
        @property
        def sents(self):
            return (Word(start_char=word.idx) for word in self if word.text[0].isupper())

        def has_annotation(self, name):
            return name == "DEP"

    return Doc(words)


def test_spacy_is_asked_for_its_small_model_without_what_is_not_needed(monkeypatch):
    settings_of_load = {}

    def load(name, exclude):
        settings_of_load.update(name=name, exclude=exclude)
        return fake_model

    module = ModuleType("spacy")
    module.load = load
    monkeypatch.setitem(sys.modules, "spacy", module)
    monkeypatch.setattr("memcalib.io.extras.find_spec", lambda name: name)
    read = sentence_splitter.__wrapped__("spacy")
    assert settings_of_load["name"] == "en_core_web_sm"
    assert "parser" not in settings_of_load["exclude"]
    assert "ner" in settings_of_load["exclude"]
    assert read("Oats help you. Milk") == Parse([0, 15], [(0, 5), (5, 10), (10, 15)])
    text = "Oats help many people Then they sleep"
    spans = [(0, 4), (4, 9), (9, 14), (14, 21), (21, 26), (26, 31), (31, 37)]
    assert segment(text, spans, read, minimum=1) == [0, 0, 0, 0, 1, 1, 1]


def test_the_splitter_is_named_by_what_is_installed(monkeypatch, caplog):
    installed = set()
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: name if name in installed else None
    )
    assert splitter_name.__wrapped__() == "pysbd"
    with caplog.at_level(logging.WARNING, "memcalib"):
        assert splitter_name.__wrapped__() == "pysbd" and not caplog.messages
        installed.add("spacy")
        assert splitter_name.__wrapped__() == "pysbd"
        (warning,) = caplog.messages
        assert "without its model en_core_web_sm" in warning and "pysbd" in warning
        assert "python -m spacy download en_core_web_sm" in warning
        installed.add("en_core_web_sm")
        assert splitter_name.__wrapped__() == "spacy" and len(caplog.messages) == 1


def test_a_missing_spacy_and_a_missing_model_say_what_to_install(monkeypatch):
    monkeypatch.setattr("memcalib.io.extras.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"memcalib\[spacy\]"):
        sentence_splitter.__wrapped__("spacy")
    monkeypatch.setattr("memcalib.io.extras.find_spec", lambda name: name)

    def load(name, exclude):
        raise OSError(f"[E050] Can't find model {name!r}.")

    module = ModuleType("spacy")
    module.load = load
    monkeypatch.setitem(sys.modules, "spacy", module)
    with pytest.raises(ModuleNotFoundError) as missing:
        sentence_splitter.__wrapped__("spacy")
    message = str(missing.value)
    assert "needs its model en_core_web_sm" in message
    assert "install it with python -m spacy download en_core_web_sm" in message
    assert "or choose the splitter pysbd" in message


def test_the_version_of_the_splitter_is_that_of_its_packages(monkeypatch):
    versions = {"spacy": "3.8.18", "pysbd": "0.3.4"}
    monkeypatch.setattr("memcalib.credit.sentences.version", versions.__getitem__)
    monkeypatch.setattr("memcalib.credit.sentences.splitter_name", lambda: "pysbd")
    assert splitter_version() == "pysbd 0.3.4"
    model = ModuleType("en_core_web_sm")
    model.__version__ = "3.8.0"
    monkeypatch.setitem(sys.modules, "en_core_web_sm", model)
    monkeypatch.setattr("memcalib.credit.sentences.splitter_name", lambda: "spacy")
    assert splitter_version() == "spacy 3.8.18 with en_core_web_sm 3.8.0"


def test_a_real_spacy_pipeline():
    spacy = pytest.importorskip("spacy")
    model = spacy.blank("en")
    model.add_pipe("sentencizer")
    assert spacy_splitter(model)("Oats help. Milk too.") == Parse([0, 11], [])
    doc = spacy.tokens.Doc(
        model.vocab, ["Oats", "help", "you"], heads=[1, 1, 1], deps=["nsubj", "ROOT", "obj"]
    )
    assert spacy_splitter(lambda text: doc)("Oats help you") == Parse([0], [(0, 5), (5, 10)])


@pytest.mark.parametrize(
    "piece", ["[", "“a ", "!", "😀", "*_", "\u200b", "` ", "$$a ", "A. ", "> "]
)
def test_repetition_is_cut_into_pieces_of_the_usual_size(piece):
    text = piece * (20_000 // len(piece))
    spans = [(start, min(start + 4, len(text))) for start in range(0, len(text), 4)]
    units = segment(text, spans, no_sentences)
    assert len(units) == len(spans)
    assert units[0] == 0
    assert all(following - unit in (0, 1) for unit, following in pairwise(units))
    sizes = Counter(units).values()
    assert max(sizes) <= 96
    assert len(sizes) == 1 or min(sizes) >= 4


def test_unknown_splitters_are_named():
    with pytest.raises(ValueError, match=r"'nltk'.*allowed: spacy, pysbd"):
        sentence_splitter("nltk")
