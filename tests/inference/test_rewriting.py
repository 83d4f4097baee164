"""Memory written again without some of its atoms: once, kept, checked, and exact in a training."""

import json
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memcalib.inference.endpoint import Endpoint
from memcalib.inference.rewriting import KeptRewriter
from memcalib.inference.llm_rewriting import LLMRewriter, rewrite_fault, rewrite_messages
from memcalib.problem import RewriteError, rebuilt_blocks, remove_atoms, render
from memcalib.products.micro.policy import build_policy, build_tokenizer
from memcalib.products.micro.practice.server import MicroServer
from memcalib.products.micro.world import exact_judge, make_examples, rewritten
from memcalib.rules.base import prompts_without
from memcalib.trainer.train_config import TrainConfig
from memcalib.training import train

EXAMPLES = make_examples("long", 30, seed=1)
TOKENIZER = build_tokenizer()


@given(st.sampled_from(EXAMPLES), st.data())
def test_an_exact_rewriter_gives_the_example_that_never_had_the_atoms(example, data):
    removed = data.draw(st.sets(st.sampled_from(sorted(example.levels))))
    reduced = remove_atoms(example, removed, rewritten)
    assert [a.atom_id for a in reduced.atoms] == [
        a.atom_id for a in example.atoms if a.atom_id not in removed
    ]
    by_id = {block.parent_memory_id: block for block in example.blocks}
    for block in reduced.blocks:
        atoms = [reduced.atom(name) for name in block.atom_ids]
        assert block.memory_text == rewritten(by_id[block.parent_memory_id], atoms)
        for name in removed:
            assert example.atom(name).text[1:-1] not in block.memory_text
    assert remove_atoms(reduced, []) == reduced


@given(st.sampled_from(EXAMPLES), st.data())
def test_without_a_rewriter_both_texts_are_the_concatenation(example, data):
    removed = data.draw(st.sets(st.sampled_from(sorted(example.levels)), min_size=1))
    touched = {block.parent_memory_id for block, _ in rebuilt_blocks(example, removed)}
    for block in remove_atoms(example, removed).blocks:
        if block.parent_memory_id in touched:
            assert block.memory_text == block.atomic_concat_text
        else:
            assert block in example.blocks


def some_block():
    example = next(e for e in EXAMPLES if any(len(b.atom_ids) > 2 for b in e.blocks))
    block = next(b for b in example.blocks if len(b.atom_ids) > 2)
    return block, tuple(example.atom(name) for name in block.atom_ids)


def test_each_paragraph_is_written_once_also_after_a_stop(tmp_path):
    block, atoms = some_block()
    calls = []

    def writer(block, atoms):
        calls.append(len(atoms))
        return rewritten(block, atoms)

    kept = KeptRewriter(writer, tmp_path / "run" / "rewrites.jsonl")
    kept.prepare([(block, atoms[:1]), (block, atoms[:2]), (block, atoms[:1])])
    assert calls == [1, 2]
    assert kept(block, atoms[:1]) == rewritten(block, atoms[:1])
    torn = kept.path.read_text() + '{"block": "x'
    kept.path.write_text(torn)
    again = KeptRewriter(writer, kept.path)
    assert again(block, atoms[:2]) == rewritten(block, atoms[:2]) and calls == [1, 2]
    assert again(block, atoms[1:]) == rewritten(block, atoms[1:]) and calls[-1] == len(atoms) - 1


def test_a_failed_paragraph_is_tried_again_by_the_next_run_only(tmp_path, caplog):
    logging.disable(logging.NOTSET)
    block, atoms = some_block()
    calls = []

    def writer(block, atoms):
        calls.append(1)
        raise RewriteError("no words")

    kept = KeptRewriter(writer, tmp_path / "rewrites.jsonl")
    with caplog.at_level(logging.WARNING, "memcalib"):
        for _ in range(3):
            with pytest.raises(RewriteError, match="no words"):
                kept(block, atoms[:1])
    assert len(calls) == 1 == len(caplog.messages) and "fallback_scoring" in caplog.messages[0]
    later = KeptRewriter(rewritten, tmp_path / "rewrites.jsonl")
    assert later(block, atoms[:1]) == rewritten(block, atoms[:1])


def test_a_prompt_that_cannot_be_made_is_empty(tmp_path):
    def fails(block, atoms):
        raise RewriteError("no")

    example = EXAMPLES[0]
    (one,) = [
        name
        for block, atoms in rebuilt_blocks(example, [example.atoms[0].atom_id])
        for name in [example.atoms[0].atom_id]
    ] or [None]
    whole = [tuple(example.levels)]
    prompts = prompts_without(
        lambda e: [len(e.atoms)], [(example, (one,)), (example, *whole)], fails
    )
    assert prompts == [[], [0]], "no block is rebuilt where all atoms are gone"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("  ", "empty"),
        (some_block()[0].memory_text, "has not changed"),
        ("x" * 10_000, "longer than"),
        ("Short.", ""),
    ],
)
def test_what_can_be_checked_of_a_paragraph_is(text, fault):
    block, atoms = some_block()
    found = rewrite_fault(block, [atoms[0].text], text)
    assert (fault in found) if fault else found == ""
    still = f"So {atoms[0].text}"
    assert "still says" in rewrite_fault(block, [atoms[0].text], still)


def test_a_request_names_what_stays_and_what_goes():
    block, atoms = some_block()
    system, user = rewrite_messages(block, atoms[1:], [atoms[0].text])
    request = json.loads(user["content"])
    assert request["goes"] == [atoms[0].text] and len(request["stays"]) == len(atoms) - 1
    assert request["paragraph"] == block.memory_text and "memory_text" in system["content"]


def test_a_model_behind_an_endpoint_writes_and_is_asked_once_more(tmp_path):
    block, atoms = some_block()
    seen = []

    def at_second_try(turns):
        seen.append(json.loads(turns[-1][1]))
        text = "" if len(seen) == 1 else " ".join(seen[-1]["stays"])
        return json.dumps({"memory_text": text})

    with MicroServer([], roles={"late": at_second_try}) as server:
        writer = LLMRewriter(Endpoint(model="late", base_url=server.base_url, key_env=""))
        assert writer(block, atoms[1:]) == " ".join(atom.text for atom in atoms[1:])
    assert len(seen) == 2 and seen[0]["goes"] == [atoms[0].text]


def settings(**changes):
    options = dict(
        prompts=2,
        generations=4,
        minibatches=1,
        steps=2,
        lr=1e-3,
        max_tokens=24,
        max_prompt=700,
        prompt_template="micro",
        text="fluent",
        draws="row",
    )
    return TrainConfig(**{**options, **changes})


def trained(tmp_path, rewriter, **changes):
    config = settings(**changes)
    policy = build_policy(0)
    return train(
        policy,
        config,
        EXAMPLES[:6],
        exact_judge,
        tokenizer=TOKENIZER,
        out=tmp_path,
        rewriter=rewriter,
    )


def test_a_training_on_fluent_text_reads_exact_paragraphs(tmp_path, caplog):
    logging.disable(logging.NOTSET)
    with caplog.at_level(logging.WARNING, "memcalib"):
        trainer = trained(tmp_path / "exact", rewritten)
        assert not [m for m in caplog.messages if "but there is no rewriter" in m]
        confounded = trained(tmp_path / "plain", None)
        assert [m for m in caplog.messages if "but there is no rewriter" in m]
    rows = (tmp_path / "exact" / "rewrites.jsonl").read_text().splitlines()
    texts = [json.loads(row)["text"] for row in rows]
    assert texts and all(text.startswith("Notes say ") for text in texts)
    assert len(set(rows)) == len(rows)
    prompts = [TOKENIZER.decode(prompt) for prompt in trainer.pairs.prompts if prompt]
    assert prompts and all("Notes say" in prompt for prompt in prompts if "." in prompt)
    assert not (tmp_path / "plain" / "rewrites.jsonl").exists()
    assert not torch.equal(trainer.credit.advantages, confounded.credit.advantages)


@pytest.mark.parametrize("changes", [{"text": "concat"}, {"method": "gdpo"}])
def test_a_rewriter_that_nothing_would_use_is_refused(tmp_path, changes):
    with pytest.raises(ValueError, match="rewriter: found one with text"):
        trained(tmp_path, rewritten, **changes)


def test_fluent_prompts_hold_the_rewritten_paragraph():
    block, atoms = some_block()
    example = next(e for e in EXAMPLES if block in e.blocks)
    reduced = remove_atoms(example, [atoms[0].atom_id], rewritten)
    content = render(reduced, text="fluent", prompt_template="micro")[-1]["content"]
    assert rewritten(block, atoms[1:]) in content
    assert atoms[0].text[1:-1] not in content
