"""Prompt templates: what they show, templates against a slow reference,
and templates that must be refused.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memcalib.inference.rollout import (
    TemplateFile,
    find_prompt_template,
    load_prompt_template,
    wording_hash,
)
from memcalib.products.micro.world import make_examples
from memcalib.problem import (
    PROMPT_TEMPLATES,
    SHIPPED_TEMPLATES,
    PromptTemplate,
    bare_prompt,
    plain_prompt,
    render,
)

EXAMPLES = make_examples("short", 12, seed=3, split="test")
memories = st.lists(st.tuples(st.integers(1, 9), st.text(max_size=30)), max_size=4)


@pytest.mark.parametrize("name", SHIPPED_TEMPLATES)
def test_each_prompt_template_shows_the_same_memory_and_query(name):
    for example in EXAMPLES:
        user = render(example, prompt_template=name)[-1]["content"]
        assert all(f"{block.number}. {block.memory_text}" in user for block in example.blocks)
        assert user.endswith(example.question)


def test_prompt_templates_differ_in_what_they_say_about_memory():
    systems = {name: PROMPT_TEMPLATES[name].system for name in SHIPPED_TEMPLATES}
    assert len(set(systems.values())) == 5 and systems["bare"] == ""
    for coaching in ("matter", "only", "as far as", "careful", "every", "background"):
        assert coaching not in systems["neutral"]
    assert "background" in systems["background"] and "authoritative" in systems["authoritative"]
    assert {
        PROMPT_TEMPLATES[name].user for name in ("plain", "neutral", "background", "authoritative")
    } == {plain_prompt}


@given(st.text(), memories)
def test_the_bare_prompt_adds_no_word(question, memory):
    lines = [f"{number}. {text}" for number, text in memory]
    assert bare_prompt(question, memory) == ("\n".join(lines) + "\n\n" if memory else "") + question


def filled_slowly(text: str, values: dict[str, str]) -> str:
    """Character by character: a place is replaced, everything else copied,
    and nothing is read twice.
    """
    out = ""
    i = 0
    while i < len(text):
        for name, value in values.items():
            if text.startswith("{" + name + "}", i):
                out = out + value
                i = i + len(name) + 2
                break
        else:
            out = out + text[i]
            i = i + 1
    return out


pieces = st.lists(
    st.sampled_from(["{memory}", "{query}", "{", "}", "{ memory}", '{"a": 1}', "\n", "x", "{{"]),
    max_size=8,
)
hostile = st.sampled_from(["{query}", "{memory}", "{text}{number}", r"\1", "a {memory", "{"])


@given(
    pieces.map("".join),
    st.lists(st.tuples(st.integers(1, 9), hostile), min_size=1, max_size=3),
    hostile,
)
def test_places_are_filled_once_like_the_slow_reference(middle, memory, question):
    user = middle + "|{memory}|{query}|"
    template = TemplateFile(user=user, block="<{number}> {text}")
    listed = "\n".join(f"<{number}> {text}" for number, text in memory)
    assert template(question, memory) == filled_slowly(user, {"memory": listed, "query": question})
    assert template(question, []) == question


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("user: '{memory}'", "user: found no place {query}; allowed: {memory}, {query}"),
        (
            "user: '{memory} {query} {question}'",
            "user: found unknown place {question}; allowed: {memory}, {query}",
        ),
        ("user: '{memory} {query}'\nblock: '{number}'", "block: found no place {text}"),
        ("user: '{memory} {query}'\nquery_only: hello", "query_only: found no place {query}"),
        (
            "user: '{memory} {query}'\nsistem: x",
            "sistem: found an unknown field; allowed: system, user, block, query_only",
        ),
        ("system: x", "user: found Field required"),
        ("- a\n- b", "template: found Input should be"),
        ("", "user: found Field required"),
        ("user: [", "not readable as YAML"),
        ("user: !!python/object/apply:os.getcwd []", "not readable as YAML"),
    ],
)
def test_a_wrong_template_says_where_and_what_is_allowed(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        load_prompt_template(path)
    assert f"{path}: " in str(caught.value) and message in str(caught.value)
    assert "mine" not in PROMPT_TEMPLATES


@pytest.mark.parametrize("name", ["plain", "bare", "no_memory", "full_memory", "micro"])
def test_a_template_cannot_take_a_shipped_name(tmp_path, name):
    path = tmp_path / f"{name}.yaml"
    path.write_text("user: '{memory} {query}'")
    before = PROMPT_TEMPLATES.get(name)
    with pytest.raises(ValueError, match="shipped"):
        load_prompt_template(path)
    assert PROMPT_TEMPLATES.get(name) is before


def test_an_unknown_prompt_template_names_the_known_ones(tmp_path):
    with pytest.raises(ValueError, match="background, authoritative, bare"):
        find_prompt_template("backgruond")
    with pytest.raises(FileNotFoundError):
        find_prompt_template(str(tmp_path / "none.yaml"))


@given(st.sampled_from(["system", "user", "block", "query_only"]))
def test_every_part_of_a_template_is_in_its_hash(part_name):
    parts = {
        "system": "Hello.",
        "user": "{memory} // {query}",
        "block": "- {text}",
        "query_only": "{query}",
    }
    first = TemplateFile(**parts)
    PROMPT_TEMPLATES["tried"] = PromptTemplate(first, first.system)
    before = wording_hash("tried")
    parts[part_name] += "!"
    second = TemplateFile(**parts)
    PROMPT_TEMPLATES["tried"] = PromptTemplate(second, second.system)
    assert wording_hash("tried") != before
    PROMPT_TEMPLATES.pop("tried")
