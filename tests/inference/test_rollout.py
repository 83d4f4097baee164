"""Requests, the endpoint back end against scripted replies,
and a file of answers that is killed and resumed.
"""

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from itertools import product
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from faulty_server import FaultyServer, completion
from memcalib.inference.client import split_thoughts
from memcalib.inference.endpoint import CallError, Endpoint
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import make_examples
from memcalib.problem import PROMPT_TEMPLATES, SHIPPED_TEMPLATES, Rollout, render
from memcalib.io.records import DataError, read_jsonl
from memcalib.inference.rollout import (
    EndpointBackend,
    Request,
    Sampling,
    Stopped,
    generate,
    request_settings,
    requests,
)

EXAMPLES = make_examples("short", 12, seed=3, split="test")
ONE = Sampling(seeds=(42,), max_tokens=100)


class Scripted:
    """A back end without a network: what `say` returns for a request, as its row."""

    name = "scripted"
    settings: ClassVar[dict[str, str]] = {"engine": "scripted"}

    def __init__(self, say=lambda request: request.rollout("Yes.")):
        self.say = say
        self.keys_asked = []

    def answers(self, requests):
        for request in requests:
            self.keys_asked.append(request.key)
            yield self.say(request)


def endpoint(url: str, **changes) -> EndpointBackend:
    return EndpointBackend(
        Endpoint(**(dict(model="m", base_url=url, key_env="", concurrency=1, backoff=0) | changes))
    )


def rows(path: Path) -> list[Rollout]:
    return list(read_jsonl(path, Rollout))


def responses(path: Path) -> dict[tuple, str]:
    return {row.key: row.response for row in rows(path)}


# sampling


def test_a_template_file_is_a_prompt_template_and_its_wording_is_in_the_settings(tmp_path):
    path = tmp_path / "polite.yaml"
    path.write_text("system: Be polite.\nuser: '{memory} // {query}'\n")
    first = next(requests(EXAMPLES, Sampling(prompt_template=str(path)), "m"))
    assert first.condition == "polite" == first.settings["framing"]
    assert first.messages[0] == {"role": "system", "content": "Be polite."}
    path.write_text("system: Be very polite.\nuser: '{memory} // {query}'\n")
    second = next(requests(EXAMPLES, Sampling(prompt_template=str(path)), "m"))
    assert first.settings["prompt"] != second.settings["prompt"] and first.key != second.key
    PROMPT_TEMPLATES.pop("polite")


def test_defaults_are_the_papers():
    sampling = Sampling()
    assert (sampling.seeds, sampling.temperature, sampling.top_p, sampling.max_tokens) == (
        (42, 43, 44),
        1.0,
        1.0,
        8192,
    )
    assert (sampling.samples, sampling.text, sampling.prompt_template, sampling.thinking) == (
        1,
        "fluent",
        "plain",
        False,
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"seeds": ()},
        {"seeds": (1, 1)},
        {"samples": 0},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"max_tokens": 0},
        {"text": "verse"},
        {"prompt_template": ""},
        {"ask_again": ("late",)},
        {"seed": 1},
    ],
    ids=str,
)
def test_wrong_sampling_is_refused(wrong):
    with pytest.raises(ValidationError, match=next(iter(wrong))):
        Sampling(**wrong)


# requests


@given(st.sets(st.integers(0, 99), min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_every_answer_is_asked_for_once_under_the_key_it_will_have(seeds, samples, control):
    conditions = ("full_memory", "no_memory") if control else ("full_memory",)
    drawn_requests = list(
        requests(
            EXAMPLES[:3], Sampling(seeds=tuple(seeds), samples=samples), "m", conditions, engine="e"
        )
    )
    expected_keys = list(product([e.id for e in EXAMPLES[:3]], conditions, seeds, range(samples)))
    assert Counter(
        (r.example.id, r.condition, r.seed, r.sample) for r in drawn_requests
    ) == Counter(expected_keys)
    assert [r.key for r in drawn_requests] == [
        r.rollout("x", token_ids=[1]).key for r in drawn_requests
    ]
    assert len({r.key for r in drawn_requests}) == len(drawn_requests)
    assert all(
        r.rollout().example_hash == r.example.content_hash and r.settings["engine"] == "e"
        for r in drawn_requests
    )


def test_the_control_shows_no_memory_under_any_prompt_template():
    for template in SHIPPED_TEMPLATES:
        (request,) = requests(
            EXAMPLES[:1], Sampling(seeds=(1,), prompt_template=template), "m", ("no_memory",)
        )
        assert request.condition == "no_memory"
        assert not any(
            block.memory_text in request.messages[-1]["content"] for block in EXAMPLES[0].blocks
        )
        assert EXAMPLES[0].question in request.messages[-1]["content"]


def test_seeds_of_samples_differ_and_own_seeds_ignore_condition_and_prompt_template():
    drawn_requests = list(
        requests(EXAMPLES[:2], Sampling(seeds=(1, 2), samples=2), "m", ("full_memory", "no_memory"))
    )
    assert (
        len({(r.example.id, r.answer_seed) for r in drawn_requests})
        == 8
        == len({r.answer_seed for r in drawn_requests})
    )
    assert len({r.server_seed for r in drawn_requests}) == 4 and drawn_requests[0].server_seed == 1
    other = list(
        requests(EXAMPLES[:2], Sampling(seeds=(1, 2), samples=2, prompt_template="bare"), "other")
    )
    assert {r.answer_seed for r in other} == {r.answer_seed for r in drawn_requests}
    assert drawn_requests[0].answer_seed == int(
        hashlib.sha256(b'["micro-short-test-3-00000", 1, 0]').hexdigest()[:12], 16
    )


def test_text_and_settings_follow_the_sampling():
    fluent, concat = (next(requests(EXAMPLES, Sampling(text=t), "m")) for t in ("fluent", "concat"))
    assert EXAMPLES[0].blocks[0].memory_text in fluent.messages[-1]["content"]
    assert EXAMPLES[0].blocks[0].atomic_concat_text in concat.messages[-1]["content"]
    settings = request_settings(Sampling(), "plain", extra=1)
    assert settings == json.loads(json.dumps(settings)) and settings["extra"] == 1
    assert "seeds" not in settings and settings["ask_again"] == ["empty"]


def test_wrong_requests_are_refused():
    with pytest.raises(ValueError, match="full_memory, no_memory"):
        list(requests(EXAMPLES, ONE, "m", ("nomemory",)))
    with pytest.raises(ValueError, match="2 times"):
        list(requests([*EXAMPLES, EXAMPLES[0]], ONE, "m"))


# replies


@given(st.text(alphabet="abc <>/\n"), st.text(alphabet="abc </think>\n"))
def test_thoughts_at_the_start_are_taken_off_and_nothing_else(thoughts, answer):
    assert split_thoughts(f"<think>{thoughts}</think>{answer}") == (
        answer.lstrip("\n"),
        f"<think>{thoughts}</think>",
    )
    if "</think>" not in answer and not answer.lstrip().startswith("<think>"):
        assert split_thoughts(answer) == (answer, None)


@given(st.text(alphabet="abc .\n"), st.text(alphabet="abc .\n"))
def test_what_stands_before_a_mark_on_a_line_of_its_own_is_thought(thoughts, answer):
    text = f"{thoughts}\n</think>\n{answer}"
    assert split_thoughts(text)[0] == answer.lstrip("\n")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<thinking>Hm.</thinking>\n\nYes.", "Yes."),
        ("<reasoning>Hm.</reasoning>Yes.", "Yes."),
        ("<seed:think>Hm.</seed:think>Yes.", "Yes."),
        ("[THINK]Hm.[/THINK]Yes.", "Yes."),
        ("◁think▷Hm.◁/think▷Yes.", "Yes."),
        ("Hm. </think> Yes.", " Yes."),
        ("Hm.</think>{}", "{}"),
        ("Hm.\n</thinking>\n\nYes.", "Yes."),
        (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Yes.<|return|>",
            "Yes.",
        ),
        ("<thinkers>are many</thinkers>", "<thinkers>are many</thinkers>"),
        ("Write `</think>` at the end.", "Write `</think>` at the end."),
        ("```xml\n</think>\n```", "```xml\n</think>\n```"),
        ("Use <think> and then </think>.", "Use <think> and then </think>."),
        ("Close it with </think>.", "Close it with </think>."),
    ],
)
def test_the_marks_of_reasoning_models(text, answer):
    assert split_thoughts(text)[0] == answer


def test_unfinished_thoughts_are_no_answer():
    assert split_thoughts(" <think>Let me see") == ("", "<think>Let me see")


@pytest.mark.parametrize(
    ("sent", "response", "thoughts"),
    [
        ("<think>Hm.</think>\n\nYes.", "Yes.", 18),
        ("Hm.\n</think>\n\nYes.", "Yes.", 12),
        (
            "Close a block with </think>, as in HTML.",
            "Close a block with </think>, as in HTML.",
            None,
        ),
        ("<think>Hm.</think>Write <think> and </think>.", "Write <think> and </think>.", 18),
        ("Yes.", "Yes.", None),
    ],
)
def test_what_was_taken_off_is_recorded(tmp_path, sent, response, thoughts):
    with FaultyServer(completion(sent)) as server:
        generate(EXAMPLES[:1], endpoint(server.url), ONE, tmp_path / "a.jsonl")
    (row,) = rows(tmp_path / "a.jsonl")
    assert (row.response, getattr(row, "thoughts", None)) == (response, thoughts)


def called(finish):
    body = completion(None, finish)
    body["choices"][0]["message"]["tool_calls"] = [
        {"id": "1", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    ]
    return body


@pytest.mark.parametrize(
    ("body", "finish"),
    [
        (completion("", "content_filter"), "content_filter"),
        (completion(None, "content_filter"), "content_filter"),
        (called("tool_calls"), "tool_calls"),
        (called("stop"), "tool_calls"),
    ],
)
def test_withheld_answers_are_counted_apart_from_silent_ones(tmp_path, body, finish):
    with FaultyServer(body, body) as server:
        result = generate(EXAMPLES[:1], endpoint(server.url), ONE, tmp_path / "a.jsonl")
        again = generate(EXAMPLES[:1], endpoint(server.url), ONE, tmp_path / "a.jsonl")
        assert len(server.requests) == 2, (
            "asked once more, as every empty answer, and then it stands"
        )
    (row,) = rows(tmp_path / "a.jsonl")
    assert row.finish_reason == finish and row.withheld and not row.response
    assert result.counts == {finish: 1, "empty": 0} and (again.found_before, again.new) == (1, 0)


@pytest.mark.parametrize(
    ("sent", "finish_reason", "extra"),
    [
        ("stop", "stop", None),
        ("length", "length", None),
        ("max_tokens", "length", "max_tokens"),
        ("content_filter", "content_filter", None),
        ("end_turn", "stop", "end_turn"),
    ],
)
def test_finish_reasons(tmp_path, sent, finish_reason, extra):
    with FaultyServer(completion("Hello.", finish=sent)) as server:
        generate(EXAMPLES[:1], endpoint(server.url), ONE, tmp_path / "a.jsonl")
    (row,) = rows(tmp_path / "a.jsonl")
    assert (row.response, row.finish_reason, getattr(row, "served_finish", None)) == (
        "Hello.",
        finish_reason,
        extra,
    )
    assert row.usage["completion_tokens"] == 3 and row.token_ids is None


@pytest.mark.parametrize(
    ("script", "again", "calls", "expected"),
    [
        ([completion("")], ("empty",), 2, ("ok", "stop")),
        ([completion("  \n"), completion("")], ("empty",), 2, ("", "stop")),
        ([completion("")], (), 1, ("", "stop")),
        ([completion("cut", finish="length")], ("empty",), 1, ("cut", "length")),
        ([completion("cut", finish="length")], ("empty", "length"), 2, ("ok", "stop")),
        (
            [completion("", finish="length"), completion("", finish="length")],
            ("empty",),
            2,
            ("", "length"),
        ),
        ([completion("<think>a</think>")], ("empty",), 2, ("ok", "stop")),
    ],
)
def test_empty_answers_are_asked_once_more_and_then_stand(tmp_path, script, again, calls, expected):
    sampling = Sampling(seeds=(42,), ask_again=again)
    with FaultyServer(*script) as server:
        result = generate(EXAMPLES[:1], endpoint(server.url), sampling, tmp_path / "a.jsonl")
    (row,) = rows(tmp_path / "a.jsonl")
    assert (row.response, row.finish_reason) == expected and row.error is None
    assert (
        len(server.requests) == calls and len({request["seed"] for request in server.requests}) == 1
    )
    assert row.usage["prompt_tokens"] == 8 * calls == result.usage["prompt_tokens"]
    assert result.counts["empty"] == (expected[0] == "")


def test_what_is_sent(tmp_path):
    sampling = Sampling(seeds=(7,), samples=2, temperature=0.3, top_p=0.9, max_tokens=11)
    with FaultyServer() as server:
        generate(
            EXAMPLES[:1],
            endpoint(server.url, extra_body={"top_k": 5}),
            sampling,
            tmp_path / "a.jsonl",
        )
    sent = [
        {k: body[k] for k in ("temperature", "top_p", "max_tokens", "top_k", "messages")}
        for body in server.requests
    ]
    assert (
        sent[0]
        == sent[1]
        == {
            "temperature": 0.3,
            "top_p": 0.9,
            "max_tokens": 11,
            "top_k": 5,
            "messages": render(EXAMPLES[0]),
        }
    )
    assert {body["seed"] for body in server.requests} == {7, 1_000_010}
    assert rows(tmp_path / "a.jsonl")[0].settings["extra_body"] == {"top_k": 5}


def test_a_failed_call_is_a_row_and_is_asked_again(tmp_path):
    refused = (
        400,
        {
            "error": {
                "message": "This model's maximum context length is 9 tokens",
                "code": "context_length_exceeded",
            }
        },
    )
    with FaultyServer(refused, completion("fine")) as server:
        first = generate(EXAMPLES[:2], endpoint(server.url), ONE, tmp_path / "a.jsonl")
        failed, good = rows(tmp_path / "a.jsonl")
        assert (failed.finish_reason, failed.response, good.response) == ("error", "", "fine")
        assert (
            failed.error.startswith("context_too_long: ")
            and repr(EXAMPLES[0].id) in failed.error
            and "9 tokens" in failed.error
        )
        assert (
            first.errors == {"context_too_long": 1}
            and first.counts["error"] == 1
            and first.counts["empty"] == 0
        )
        second = generate(EXAMPLES[:2], endpoint(server.url), ONE, tmp_path / "a.jsonl")
    assert (second.new, second.found_before, second.counts["error"]) == (1, 1, 0) and len(
        server.requests
    ) == 3


def test_a_fatal_error_stops_and_keeps_what_was_finished(tmp_path):
    gone = (404, {"error": {"message": "The model `m` does not exist", "code": "model_not_found"}})
    with (
        FaultyServer(completion("a"), completion("b"), gone) as server,
        pytest.raises(CallError) as caught,
    ):
        generate(EXAMPLES, endpoint(server.url), ONE, tmp_path / "a.jsonl")
    assert caught.value.kind == "not_found"
    assert [row.response for row in rows(tmp_path / "a.jsonl")] == ["a", "b"]


def test_generate_inside_a_running_loop(tmp_path):
    async def main():
        with FaultyServer() as server:
            return generate(EXAMPLES[:2], endpoint(server.url), ONE, tmp_path / "a.jsonl")

    assert asyncio.run(main()).counts["stop"] == 2


# the file


def test_resume_asks_only_for_what_is_missing(tmp_path):
    out = tmp_path / "a.jsonl"
    everything = Sampling(seeds=(1, 2))
    backend = Scripted()
    generate(EXAMPLES[:5], backend, Sampling(seeds=(1,)), out)
    result = generate(EXAMPLES, backend, everything, out, no_memory=True)
    assert (result.wanted, result.found_before, result.new) == (48, 5, 43)
    assert Counter(backend.keys_asked).most_common(1)[0][1] == 1 and len(responses(out)) == 48
    assert generate(EXAMPLES, backend, everything, out, no_memory=True).new == 0
    assert {row.condition for row in rows(out)} == {"full_memory", "no_memory"}


def test_a_stop_in_the_middle_loses_nothing(tmp_path):
    def stop(row):
        if len((tmp_path / "a.jsonl").read_text().splitlines()) == 4:
            raise KeyboardInterrupt

    with MicroServer(EXAMPLES) as server:
        backend = endpoint(server.base_url, model="micro-model", concurrency=4)
        with pytest.raises(KeyboardInterrupt):
            generate(EXAMPLES, backend, ONE, tmp_path / "a.jsonl", on_row=stop)
        assert len(rows(tmp_path / "a.jsonl")) == 4
        resumed = generate(EXAMPLES, backend, ONE, tmp_path / "a.jsonl")
        generate(EXAMPLES, backend, ONE, tmp_path / "b.jsonl")
    assert (resumed.found_before, resumed.new) == (4, 8) and responses(
        tmp_path / "a.jsonl"
    ) == responses(tmp_path / "b.jsonl")


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from memcalib.inference.endpoint import Endpoint
    from memcalib.products.micro.world import make_examples
    from memcalib.inference.rollout import EndpointBackend, Sampling, generate

    url, out, limit = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    model = Endpoint(model="micro-model", base_url=url, key_env="", concurrency=1)
    backend = EndpointBackend(model, out.with_suffix(".cache"))
    sampling = Sampling(seeds=(42,), max_tokens=100)
    def die(row):
        if len(out.read_text().splitlines()) >= limit:
            os.kill(os.getpid(), signal.SIGKILL)
    generate(make_examples("short", 12, seed=3, split="test"), backend, sampling, out, on_row=die)
"""


def test_killed_twice_and_resumed(tmp_path):
    out = tmp_path / "a.jsonl"
    with MicroServer(EXAMPLES) as server:
        for limit in (3, 7):
            command = [
                sys.executable,
                "-c",
                textwrap.dedent(KILLED),
                server.base_url,
                str(out),
                str(limit),
            ]
            assert subprocess.run(command, timeout=60).returncode == -signal.SIGKILL
            with open(out, "a") as file:
                file.write('{"example_id": "half a ro')
        backend = EndpointBackend(
            Endpoint(model="micro-model", base_url=server.base_url, key_env=""),
            out.with_suffix(".cache"),
        )
        resumed = generate(EXAMPLES, backend, ONE, out)
        assert set(server.successes().values()) == {1}
        generate(EXAMPLES, EndpointBackend(backend.endpoint), ONE, tmp_path / "b.jsonl")
    assert (resumed.found_before, resumed.new) == (7, 5) and responses(out) == responses(
        tmp_path / "b.jsonl"
    )


def test_twenty_failures_of_one_kind_in_a_row_stop_the_run(tmp_path):
    def fail(kind):
        return Scripted(lambda request: request.failed(kind, "no luck"))

    with pytest.raises(Stopped, match=r"20 answers in a row .*server: no luck"):
        generate(EXAMPLES, fail("server"), Sampling(), tmp_path / "a.jsonl")
    assert len(rows(tmp_path / "a.jsonl")) == 20

    def long(request):
        return (
            request.failed("context_too_long", "9")
            if request.example != EXAMPLES[-1]
            else request.rollout()
        )

    result = generate(EXAMPLES, Scripted(long), Sampling(), tmp_path / "b.jsonl")
    assert result.counts["error"] == 33 == result.errors["context_too_long"]
    healed = generate(EXAMPLES, Scripted(), Sampling(), tmp_path / "a.jsonl")
    assert (healed.new, healed.counts["error"]) == (36, 0)


@pytest.mark.parametrize("good", [0, 10, 19])
def test_one_good_answer_or_another_kind_of_failure_goes_on(tmp_path, good):
    count = iter(range(100))

    def say(request):
        return (
            request.rollout("Yes.")
            if next(count) % 20 == good
            else request.failed("server", "no luck")
        )

    result = generate(EXAMPLES, Scripted(say), Sampling(), tmp_path / "a.jsonl")
    assert result.counts["error"] == 36 - result.counts["stop"] >= 34
    kinds = iter(["server", "timeout"] * 50)
    both = generate(
        EXAMPLES, Scripted(lambda r: r.failed(next(kinds), "no")), Sampling(), tmp_path / "b.jsonl"
    )
    assert both.errors == {"server": 18, "timeout": 18}


def test_another_dataset_version_is_refused_before_anything_is_asked(tmp_path):
    out = tmp_path / "a.jsonl"
    backend = Scripted()
    generate(EXAMPLES, backend, ONE, out)
    edited = [EXAMPLES[0].model_copy(update={"question": "Plan a trip."}), *EXAMPLES[1:]]
    before = out.read_bytes()
    asked_before = len(backend.keys_asked)
    with pytest.raises(DataError, match=r"dataset version.*" + EXAMPLES[0].content_hash):
        generate(edited, backend, Sampling(seeds=(43,)), out)
    assert out.read_bytes() == before and len(backend.keys_asked) == asked_before


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"max_tokens": 99},
        {"text": "concat"},
        {"thinking": True},
        {"ask_again": ()},
    ],
    ids=str,
)
def test_other_settings_in_one_file_are_refused_by_name(tmp_path, change):
    out = tmp_path / "a.jsonl"
    generate(EXAMPLES[:2], Scripted(), ONE, out)
    with pytest.raises(ValueError, match=rf"{next(iter(change))}: .* there, .* now"):
        generate(EXAMPLES, Scripted(), ONE.model_copy(update=change | {"seeds": (43,)}), out)
    assert len(rows(out)) == 2


def test_prompt_templates_models_and_the_control_may_share_a_file(tmp_path):
    out = tmp_path / "a.jsonl"
    for template in SHIPPED_TEMPLATES:
        generate(
            EXAMPLES[:2], Scripted(), ONE.model_copy(update={"prompt_template": template}), out
        )
    generate(EXAMPLES[:2], Scripted(), ONE, out, no_memory=True)
    assert Counter(row.condition for row in rows(out)) == dict.fromkeys(
        ["full_memory", "neutral", "background", "authoritative", "bare", "no_memory"], 2
    )


def test_failures_of_another_run_stay_in_the_file(tmp_path):
    out = tmp_path / "a.jsonl"
    with pytest.raises(Stopped, match=r"all 3 .*server: no"):
        generate(EXAMPLES[:3], Scripted(lambda r: r.failed("server", "no")), ONE, out)
    generate(EXAMPLES[:1], Scripted(), ONE, out)
    assert Counter(row.finish_reason for row in rows(out)) == {"error": 2, "stop": 1}


def test_a_full_disk_names_the_file(tmp_path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    (tmp_path / "a.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"a\.jsonl.*same command"):
        generate(EXAMPLES, Scripted(), ONE, tmp_path / "a.jsonl")


@pytest.mark.parametrize("name", ["answers", "answers.json", "answers.jsonl.gz"])
def test_a_file_of_another_kind_is_refused_before_anything_is_asked(tmp_path, name):
    backend = Scripted()
    with pytest.raises(ValueError, match=r"allowed: \.jsonl"):
        generate(EXAMPLES, backend, ONE, tmp_path / name)
    assert backend.keys_asked == [] and os.listdir(tmp_path) == []


def test_thinking_asked_for_and_switched_off_is_a_contradiction(tmp_path):
    backend = endpoint("http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match="thinking"):
        generate(EXAMPLES, backend, Sampling(thinking=True), tmp_path / "a.jsonl")


def test_request_is_frozen():
    request = next(requests(EXAMPLES, ONE, "m"))
    assert isinstance(request, Request)
    with pytest.raises(AttributeError):
        request.seed = 2
