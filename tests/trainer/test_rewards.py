"""Prompts that are too long: of training, of the teacher and of validation,
none of them dropped in silence.
"""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memcalib.trainer.rewards import (
    ChannelRewards,
    check_context,
    fitting_examples,
    held_out_examples,
)
from memcalib.inference.sampling import prompt_encoder
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, build_tokenizer
from memcalib.trainer.rewards import RetryingJudge
from memcalib.trainer.train_config import world_config
from memcalib.trainer.distillation import teacher_encoder
from memcalib.training import train

torch.set_num_threads(1)
TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 8, seed=5)
HELD_OUT = make_examples("short", 4, seed=6)
LONG = [
    e.model_copy(update={"id": f"long-{k}", "question": e.question * 300})
    for k, e in enumerate(HELD_OUT[:2])
]


def settings(**changes):
    return world_config(
        WORLDS["short"], **(dict(prompts=4, generations=4, steps=1, max_tokens=12) | changes)
    )


def run(out, judge=exact_judge, validation=(), resume=None, **changes):
    rows = []
    options = dict(tokenizer=TOKENIZER, out=out, validation=validation, resume=resume)
    trainer = train(
        build_policy(0), settings(**changes), EXAMPLES, judge, on_step=rows.append, **options
    )
    listed = [json.loads(line) for line in (out / "overlong.jsonl").read_text().splitlines()]
    return trainer, rows, listed


def test_validation_prompts_without_room_for_an_answer_are_left_out(tmp_path, caplog):
    judged = []

    def judge(example, response):
        judged.append(example.id)
        return exact_judge(example, response)

    _, rows, listed = run(
        tmp_path, judge, [*LONG, *HELD_OUT], eval_every=1, save_every=1, method="gdpo"
    )
    sizes = [len(prompt_encoder(TOKENIZER, prompt_template="micro")(example)) for example in LONG]
    assert all(1024 < size < 4096 for size in sizes)
    expected = [
        {
            "example_id": example.id,
            "prompt": "validation",
            "tokens": size,
            "context_without_answer": 1024 - 12,
        }
        for example, size in zip(LONG, sizes, strict=True)
    ]
    assert listed == expected
    assert rows[0]["valid_overlong"] == 2 and "2 validation prompts over 1012 tokens" in caplog.text
    assert "long-0" not in judged and judged.count(HELD_OUT[0].id) == 2
    _, rows, listed = run(
        tmp_path,
        judge,
        [*LONG, *HELD_OUT],
        True,
        eval_every=1,
        save_every=1,
        method="gdpo",
        steps=2,
    )
    assert [row["step"] for row in rows] == [2] and len(listed) == 2 and "long-1" not in judged


def test_a_validation_in_which_nothing_fits_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(
        ValueError,
        match=r"no prompt of at most 1012 tokens \(context_without_answer\) among 2 validation",
    ):
        run(tmp_path, validation=LONG, eval_every=1)
    assert not (tmp_path / "steps.jsonl").exists()


def test_the_validation_is_measured_as_it_is_asked():
    """By the text of the validation, and by `max_prompt` where that is the smaller limit."""
    fluent = settings(eval_text="fluent")
    sizes = [len(prompt_encoder(TOKENIZER, "fluent", "micro")(example)) for example in HELD_OUT]
    limit = sorted(sizes)[1]
    fitting = [example for example, size in zip(HELD_OUT, sizes, strict=True) if size <= limit]
    assert 0 < len(fitting) < 4
    assert held_out_examples(fluent, TOKENIZER, HELD_OUT, limit + 12) == fitting
    short_prompts = fluent.model_copy(update={"max_prompt": limit})
    assert held_out_examples(short_prompts, TOKENIZER, HELD_OUT, None) == fitting


def test_no_examples_are_no_prompts():
    with pytest.raises(
        ValueError, match=r"no prompt of at most 5 tokens \(max_prompt\) among 0 training examples$"
    ):
        fitting_examples("training", len, [], max_prompt=5)


def test_teacher_prompts_that_are_too_long_are_listed_and_counted(tmp_path, caplog):
    encode = teacher_encoder(TOKENIZER, prompt_template="micro")
    sizes = {example.id: len(encode(example)) for example in EXAMPLES}
    limit = sorted(sizes.values())[5]
    trainer, rows, listed = run(tmp_path, method="opsd-pg", max_teacher=limit)
    overlong = {name: size for name, size in sizes.items() if size > limit}
    assert {row["example_id"]: row["tokens"] for row in listed} == overlong
    assert 0 < len(overlong) < 4
    assert {(row["prompt"], row["max_teacher"]) for row in listed} == {("teacher", limit)}
    assert rows[0]["overlong"] == len(overlong) == len(EXAMPLES) - len(trainer.train_dataset)
    assert not overlong.keys() & {EXAMPLES[k].id for k in trainer.train_dataset["example"]}
    assert not overlong.keys() & {example.id for example in trainer.judged.examples}
    assert f"{len(overlong)} teacher prompts over {limit} tokens (max_teacher)" in caplog.text
    with pytest.raises(
        ValueError, match=r"\(max_teacher\) among 8 teacher examples; the shortest has "
    ):
        run(tmp_path, method="opsd-pg", max_teacher=2)


def test_an_example_that_is_too_long_for_both_is_listed_once(tmp_path):
    """The teacher is asked about the prompts that are left."""
    encode = prompt_encoder(TOKENIZER, prompt_template="micro")
    encode_for_teacher = teacher_encoder(TOKENIZER, prompt_template="micro-hinted")
    sizes = [len(encode(example)) for example in EXAMPLES]
    teacher_sizes = [len(encode_for_teacher(example)) for example in EXAMPLES]
    limit = sorted(sizes)[5]
    over = [k for k, size in enumerate(sizes) if size > limit]
    room = max(size for k, size in enumerate(teacher_sizes) if k not in over)
    assert any(teacher_sizes[k] > room for k in over)
    limits = dict(max_prompt=limit, max_teacher=room)
    _, rows, listed = run(
        tmp_path, method="opsd-gkd", teacher_prompt_template="micro-hinted", **limits
    )
    assert [(row["example_id"], row["prompt"]) for row in listed] == [
        (EXAMPLES[k].id, "training") for k in over
    ]
    assert rows[0]["overlong"] == len(over)


class Counted:
    """A judge for many answers that writes down what it was asked;
    an error where it is asked about silence.
    """

    def __init__(self):
        self.batches_asked = []

    def batch(self, examples, responses):
        self.batches_asked.append(list(responses))
        return [exact_judge(*pair) for pair in zip(examples, responses, strict=True)]


TEXTS = st.sampled_from(["", " \n", "I am here.", "July."])


@given(answers=st.lists(st.tuples(TEXTS, st.booleans()), max_size=8))
def test_the_judge_is_not_asked_about_silence(answers):
    """A judgment that is thrown away would be paid for;
    what comes out is the same as if it had been asked and overruled.
    """
    texts = [text for text, _ in answers]
    empty = [no_tokens for _, no_tokens in answers]
    examples = [EXAMPLES[k % 8] for k in range(len(answers))]
    judge = Counted()
    judged = ChannelRewards(None, EXAMPLES)
    judged.judge = judge
    judged.read(examples, texts, [[1]] * len(answers), empty)
    silent = [no_tokens or not text.strip() for text, no_tokens in answers]
    texts_with_words = [
        text for text, is_silent in zip(texts, silent, strict=True) if not is_silent
    ]
    assert judge.batches_asked == [texts_with_words], "one batch, even of none"
    for row, judgment in enumerate(judged.judgments):
        of_text = exact_judge(examples[row], texts[row])
        if not silent[row]:
            assert judgment == of_text
            continue
        assert (judgment.error, judgment.retry, judgment.scored) == ("empty answer", False, False)
        ideal = [(atom.atom_id, atom.ideal) for atom in judgment.atoms]
        assert ideal == [(atom.atom_id, atom.ideal) for atom in of_text.atoms]
    assert judged.valid.tolist() == [not is_silent for is_silent in silent]
    assert judged.rewards.isnan().all(1).tolist() == silent


def test_a_batch_of_nothing_but_silence_asks_nobody():
    judge = Counted()
    reader = ChannelRewards(RetryingJudge(judge), EXAMPLES)
    reader.read(EXAMPLES[:2], ["", ""], [[1], [1]], [True, True])
    assert judge.batches_asked == [] and [j.error for j in reader.judgments] == ["empty answer"] * 2
    assert not reader.valid.any() and reader.rewards.isnan().all()


def test_a_fluent_prompt_leaves_room_for_its_ablations():
    """They are cut from the text that lists the atoms, which may be longer than the fluent one."""
    whole = len(prompt_encoder(TOKENIZER, "concat", "micro")(EXAMPLES[0]))
    data = {"example": [0], "tokens": [10]}
    room = whole + 8 + 12
    check_context(settings(text="fluent"), TOKENIZER, EXAMPLES, data, room)
    with pytest.raises(
        ValueError,
        match=(f"a prompt of {whole + 8} tokens and an answer of 12 .* exceed .* {room - 1};"),
    ):
        check_context(settings(text="fluent"), TOKENIZER, EXAMPLES, data, room - 1)
    for changes in ({"text": "concat"}, {"text": "fluent", "method": "gdpo"}):
        config = settings(**changes)
        check_context(config, TOKENIZER, EXAMPLES, data, 22)
        with pytest.raises(ValueError, match=f"{EXAMPLES[0].id}.*a prompt of 10 tokens"):
            check_context(config, TOKENIZER, EXAMPLES, data, 21)
