"""The linear decoder against decoding ever longer beginnings, on bytes of every kind."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from memcalib.inference.token_rows import (
    decode_rows,
    gather_bytes,
    prefix_spans,
    token_bytes,
    token_spans,
    token_table,
)
from memcalib.products.micro.policy import build_tokenizer


def byte_level(**options):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    raw.train_from_iterator(["über tea 🍵 and é rest 中文"] * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>", **options)
    tokenizer.add_tokens([AddedToken("two words", special=False), AddedToken("中", special=False)])
    return tokenizer


def word_piece():
    words = models.WordPiece({"[UNK]": 0, "tea": 1, "##s": 2, ",": 3, "now": 4}, unk_token="[UNK]")
    raw = Tokenizer(words)
    raw.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="[UNK]")


BYTES = byte_level(clean_up_tokenization_spaces=False)
WORDS = build_tokenizer()
PIECES = word_piece()
ids_of_bytes = st.lists(st.integers(0, len(BYTES) - 1), max_size=40)
pieces_of_text = st.lists(
    st.text(max_size=6).map(lambda text: BYTES(text)["input_ids"]), max_size=8
).map(lambda parts: list(chain(*parts)))


def ends_by_beginnings(tokenizer, ids):
    ends = []
    for count in range(1, len(ids) + 1):
        ends.append(len(tokenizer.decode(ids[:count], skip_special_tokens=True)))
    return ends


@given(st.one_of(ids_of_bytes, pieces_of_text))
def test_byte_level_spans_equal_those_of_longer_beginnings(ids):
    assert token_spans(BYTES, ids) == prefix_spans(BYTES, ids)
    [text], [ends] = decode_rows(BYTES, [ids])
    assert text == BYTES.decode(ids, skip_special_tokens=True)
    assert ends.tolist() == ends_by_beginnings(BYTES, ids)


@given(st.lists(st.integers(0, len(WORDS) - 1), max_size=40))
def test_fused_spans_equal_those_of_longer_beginnings(ids):
    assert token_spans(WORDS, ids) == prefix_spans(WORDS, ids)
    assert decode_rows(WORDS, [ids])[0] == [WORDS.decode(ids, skip_special_tokens=True)]


@given(st.lists(st.one_of(ids_of_bytes, pieces_of_text), max_size=6))
def test_a_batch_is_its_rows_one_by_one(rows):
    texts, ends = decode_rows(BYTES, rows)
    assert len(texts) == len(ends) == len(rows)
    for row, text, ends_of_row in zip(rows, texts, ends, strict=True):
        [text_alone], [ends_alone] = decode_rows(BYTES, [row])
        assert text == text_alone
        assert ends_of_row.tolist() == ends_alone.tolist()
        assert len(ends_of_row) == len(row)
        if row:
            assert ends_of_row[-1] == len(text)


@given(st.lists(st.integers(0, 4), max_size=10))
def test_other_tokenizers_are_asked_and_their_ends_never_decrease(ids):
    assert token_table(PIECES) is None
    [text], [ends] = decode_rows(PIECES, [ids])
    assert text == PIECES.decode(ids, skip_special_tokens=True)
    assert (np.diff(ends) >= 0).all()
    assert (ends <= len(text)).all()


def test_a_tokenizer_without_a_fast_backend_is_asked():
    class Slow:
        def decode(self, ids, skip_special_tokens=True):
            return "".join("abc"[token_id] for token_id in ids)

    assert token_spans(Slow(), [0, 2, 1]) == [(0, 1), (1, 2), (2, 3)]


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked():
    class Shouting(PreTrainedTokenizerFast):
        def _decode(self, *args, **options):
            return super()._decode(*args, **options).upper() + "!"

    loud = Shouting(tokenizer_object=BYTES.backend_tokenizer)
    assert token_table(loud) is None
    assert decode_rows(loud, [BYTES("tea")["input_ids"]])[0] == ["TEA!"]


@pytest.mark.parametrize("forced", [True, False])
def test_tidying_spaces_is_respected(forced):
    name = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    tidy = byte_level(clean_up_tokenization_spaces=True)
    setattr(tidy, name, forced)
    ids = BYTES("tea , rest .")["input_ids"]
    assert (token_table(tidy) is None) == forced
    assert decode_rows(tidy, [ids])[0] == [tidy.decode(ids, skip_special_tokens=True)]


def test_ids_beyond_the_vocabulary_have_no_text():
    ids = [*BYTES("tea")["input_ids"], 10**7, len(BYTES), *BYTES("é")["input_ids"]]
    assert decode_rows(BYTES, [ids])[0] == ["teaé"] == [BYTES.decode(ids, skip_special_tokens=True)]
    assert token_spans(BYTES, ids) == prefix_spans(BYTES, ids)


def test_a_grown_vocabulary_makes_a_new_table():
    tokenizer = byte_level(clean_up_tokenization_spaces=False)
    before = token_table(tokenizer)
    assert token_table(tokenizer) is before
    tokenizer.add_tokens(["<brand-new>"])
    ids = tokenizer("a<brand-new>b")["input_ids"]
    assert decode_rows(tokenizer, [ids])[0] == ["a<brand-new>b"]
    assert len(token_table(tokenizer).names) == len(before.names) + 1


def test_special_tokens_have_no_text():
    ids = [BYTES.eos_token_id, *BYTES("tea")["input_ids"], BYTES.eos_token_id]
    assert token_spans(BYTES, ids) == prefix_spans(BYTES, ids)
    assert token_spans(BYTES, ids)[0] == (0, 0)


def test_no_rows_and_empty_rows():
    assert decode_rows(BYTES, []) == ([], [])
    texts, ends = decode_rows(BYTES, [[], [BYTES.eos_token_id], []])
    assert texts == ["", "", ""]
    assert [len(ends_of_row) for ends_of_row in ends] == [0, 1, 0]


@given(st.binary(max_size=12))
def test_token_bytes_turns_the_alphabet_back(data):
    letters = SimpleNamespace(decode=decoders.ByteLevel().decode)
    token = "".join(ALPHABET[byte] for byte in data)
    assert token_bytes(token) == data
    assert letters.decode([token]) == data.decode("utf-8", "replace")


ALPHABET = {token_bytes(letter)[0]: letter for letter in pre_tokenizers.ByteLevel.alphabet()}


def test_gathered_bytes_lie_where_the_tokens_are():
    table = token_table(WORDS)
    ids = np.array(WORDS(" diet and diet")["input_ids"])
    data, ends = gather_bytes(table, ids)
    assert bytes(data) == b" diet and diet"
    assert ends.tolist() == [5, 9, 14]
