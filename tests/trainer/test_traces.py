"""Trace files: what goes in comes out, for every method,
and bad files say what is wrong with them.
"""

import json
import random
import shutil

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st

from memcalib.problem import CHANNELS
from memcalib.credit.statistics import fallback_reasons
from memcalib.redistribution import PairDetail
from memcalib.trainer.rewards import ChannelRewards
from memcalib.rules.base import Pairs
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.products.micro.policy import build_policy, build_tokenizer, load_policy
from memcalib.io.records import DataError
from memcalib.credit.assignment import Credit
from memcalib.trainer.train_config import world_config
from memcalib.inference.token_rows import decode_rows
from memcalib.trainer.trace_files import (
    SCHEMA,
    VERSION,
    drop_traces,
    read_traces,
    trace_files,
    trace_of,
)
from memcalib.trainer.traces import (
    TraceWriter,
    answer_table,
    sample_credit,
    text_column,
    token_texts,
    trace_answers,
    trace_row,
)
from memcalib.training import train

TOKENIZER = build_tokenizer()
EXAMPLES = make_examples("short", 3, 0, "test")
seeds = st.integers(0, 10_000)


def judged_answers(rng, rows):
    judged = ChannelRewards(None, [])
    judged.examples = [rng.choice(EXAMPLES) for _ in range(rows)]
    judged.ids = [
        [rng.randrange(len(TOKENIZER)) for _ in range(rng.randrange(1, 9))] for _ in range(rows)
    ]
    judged.texts = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in judged.ids]
    judged.valid = torch.tensor([rng.random() < 0.8 for _ in range(rows)])
    random_rewards = torch.tensor(
        [[rng.choice([-1.0, 0.0, 0.5]) for _ in range(9)] for _ in range(rows)]
    )
    judged.rewards = random_rewards.masked_fill(~judged.valid[:, None], torch.nan)
    return judged


def a_batch(seed, rows=5):
    """A judged batch with made-up credit: padded tensors filled with junk beyond each answer's
    end.
    """
    rng = random.Random(seed)
    torch_rng = torch.Generator().manual_seed(seed)
    judged = judged_answers(rng, rows)
    width = 10
    chosen = [
        (r, h) for r in range(rows) for h in range(9) if judged.valid[r] and rng.random() < 0.3
    ]

    def numbers(*shape):
        return torch.randn(*shape, generator=torch_rng, dtype=torch.float64)

    def flag(share):
        return torch.tensor([rng.random() < share for _ in chosen], dtype=torch.bool)

    row, channel = (torch.tensor([pair[k] for pair in chosen], dtype=torch.long) for k in (0, 1))
    scored = flag(0.9)
    signal = flag(0.8) & scored
    q = numbers(len(chosen), width).relu() * (flag(0.8) & signal)[:, None]
    strength = 0.75 * (flag(0.7) & (q[:, : max(map(len, judged.ids))].sum(1) > 0)).double()
    detail = PairDetail(
        row,
        channel,
        numbers(len(chosen), width),
        q,
        numbers(len(chosen), width),
        strength,
        scored,
        signal,
        strength > 0,
        flag(0.2),
    )
    credit = Credit(
        numbers(rows, width).float(), numbers(rows).float(), numbers(rows, 9), {"rms": 2.0}, detail
    )
    atoms = [tuple(judged.examples[r].levels)[: rng.randrange(1, 3)] for r, _ in chosen]
    return judged, credit, Pairs(row.tolist(), channel.tolist(), atoms, [[] for _ in chosen])


@given(seeds)
def test_every_list_comes_back_as_it_was(tmp_path_factory, seed):
    judged, credit, pairs = a_batch(seed)
    folder = tmp_path_factory.mktemp("traces")
    TraceWriter(folder).write(7, judged, credit, pairs, TOKENIZER, method="memcalib-rl", seed=3)
    frame = read_traces(folder)
    answers = frame[frame["channel"].isna()]
    scored = frame[frame["channel"].notna()]
    assert len(answers) == len(judged.ids) and len(scored) == len(pairs)
    assert (
        set(frame["step"]) == {7}
        and set(frame["method"]) == {"memcalib-rl"}
        and set(frame["seed"]) == {3}
    )
    for (_, answer), ids, valid, row in zip(
        answers.iterrows(), judged.ids, judged.valid, range(99), strict=False
    ):
        assert answer["token_ids"].tolist() == ids and answer["tokens"].tolist() == token_texts(
            TOKENIZER, ids
        )
        assert answer["scored"] == bool(valid) and np.isnan(answer["reward"]) == (not valid)
        if valid:
            assert np.allclose(answer["token_advantage"], credit.advantages[row, : len(ids)])
        else:
            assert answer["token_advantage"] is None and np.isnan(answer["advantage"])
    for k, (_, pair) in enumerate(scored.iterrows()):
        length = len(judged.ids[pairs.rows[k]])
        assert (pair["row"], pair["channel"]) == (pairs.rows[k], CHANNELS[pairs.channels[k]])
        assert pair["atom_ids"].tolist() == list(pairs.atoms[k])
        for name in "dqm":
            assert np.allclose(pair[name], getattr(credit.pairs, name)[k, :length], atol=1e-6)


@given(seeds)
def test_a_row_read_back_equals_the_row_made_from_the_tensors(tmp_path_factory, seed):
    judged, credit, pairs = a_batch(seed)
    folder = tmp_path_factory.mktemp("traces")
    TraceWriter(folder).write(0, judged, credit, pairs, TOKENIZER)
    frame = read_traces(folder)
    for row in range(len(judged.ids)):
        if not judged.valid[row]:
            continue
        back = trace_of(frame, 0, row)
        direct = trace_row(judged, credit, pairs, row, TOKENIZER)
        assert back["tokens"] == direct["tokens"] and back["response"] == direct["response"]
        assert np.allclose(back["advantage"], direct["advantage"], atol=1e-5)
        assert list(back["channels"]) == list(direct["channels"])
        for name, channel in direct["channels"].items():
            channel_read = back["channels"][name]
            assert (
                channel_read["localized"] == channel["localized"]
                and channel_read["atom_ids"] == channel["atom_ids"]
            )
            assert all(
                np.allclose(channel_read[key], channel[key], atol=1e-5)
                for key in ("d", "q", "m", "reward", "advantage", "strength")
            )


@given(seeds)
def test_reasons_are_the_counts_of_the_statistics(seed):
    _, credit, _ = a_batch(seed)
    detail = credit.pairs
    expected = reference.reasons(detail)
    assert fallback_reasons(detail) == expected


@given(st.lists(st.lists(st.text(alphabet="aé中🍵 ", max_size=4), max_size=5), max_size=4))
def test_text_column_cuts_at_the_ends(rows):
    ends = [np.cumsum([len(piece) for piece in row]).astype(np.int64) for row in rows]
    assert text_column(["".join(row) for row in rows], ends).to_pylist() == [
        piece for row in rows for piece in row
    ]


def test_a_real_step_counts_what_its_statistics_count(tmp_path):
    model, tokenizer = load_policy("cold-short")
    config = world_config(WORLDS["short"])
    judged, credit, pairs = sample_credit(model, tokenizer, EXAMPLES, exact_judge, config)
    TraceWriter(tmp_path).write(
        1, judged, credit, pairs, tokenizer, thresholds=torch.full((9,), 0.02)
    )
    frame = read_traces(tmp_path).dropna(subset="channel")
    for reason in ("scoring", "weak", "empty", "closed"):
        assert (frame["fallback"] == reason).sum() == credit.stats[f"fallback_{reason}"]
    assert frame["localized"].sum() == credit.stats["localized"] > 0
    assert np.allclose(frame["threshold"], 0.02)
    first = frame[frame["localized"]].iloc[0]
    assert np.allclose(first["m"].mean(), 1, atol=1e-5)
    cut = (np.abs(first["d"]).clip(max=3) - first["q"])[first["q"] > 0]
    assert np.allclose(cut, first["threshold"], atol=1e-6)


@pytest.mark.parametrize("method", ["grpo", "gdpo"])
def test_methods_without_pairs_keep_answers_alone(tmp_path, method):
    model, tokenizer = load_policy("cold-short")
    config = world_config(WORLDS["short"], method=method)
    judged, credit, pairs = sample_credit(model, tokenizer, EXAMPLES[:2], exact_judge, config)
    TraceWriter(tmp_path).write(1, judged, credit, pairs, tokenizer, method=method)
    frame = read_traces(tmp_path)
    assert frame["channel"].isna().all() and len(frame) == len(judged.ids)
    spread = [np.ptp(values) for values in frame["token_advantage"]]
    assert max(spread) == 0 and frame["advantage"].nunique() > 1
    with pytest.raises(ValueError, match="memcalib-rl"):
        trace_answers(model, tokenizer, EXAMPLES[:1], exact_judge, config)


def test_distillation_gives_token_advantages_alone(tmp_path):
    judged, credit, _ = a_batch(1)
    judged.rewards[:] = torch.nan
    TraceWriter(tmp_path).write(1, judged, credit.advantages, None, TOKENIZER)
    frame = read_traces(tmp_path)
    assert frame["reward"].isna().all() and frame["channel"].isna().all()
    row = int(judged.valid.nonzero()[0])
    assert np.allclose(frame["token_advantage"][row].mean(), frame["advantage"][row], atol=1e-6)


def test_a_batch_without_a_scored_answer_is_written(tmp_path):
    judged, credit, _ = a_batch(2)
    judged.valid[:] = False
    TraceWriter(tmp_path).write(1, judged, credit, Pairs(), TOKENIZER)
    assert read_traces(tmp_path)["token_advantage"].isna().all()


def test_steps_and_processes_are_files_of_their_own(tmp_path):
    judged, credit, pairs = a_batch(3)
    writer = TraceWriter(tmp_path / "traces")
    for step, process in [(1, 0), (10, 0), (10, 1)]:
        writer.write(step, judged, credit, pairs, TOKENIZER, process=process)
    again = writer.write(10, judged, credit, pairs, TOKENIZER)
    names = ["step-000001.parquet", "step-000010-process-1.parquet", "step-000010.parquet"]
    assert sorted(p.name for p in again.parent.iterdir()) == names
    rows = read_traces(tmp_path, steps=[10])
    assert sorted(rows[rows["channel"].isna()]["row"]) == list(range(10))
    assert trace_of(rows, 10, 7)["response"] == trace_of(rows, 10, 2)["response"] == judged.texts[2]


def test_statistics_and_head_are_in_the_metadata(tmp_path):
    judged, credit, pairs = a_batch(4)
    credit.stats["loss"] = float("nan")
    path = TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER, seed=5)
    metadata = json.loads(pq.read_metadata(path).metadata[b"memcalib"])
    assert (
        metadata["head"] == {"seed": 5}
        and metadata["stats"] == {"rms": 2.0, "loss": None}
        and metadata["version"] == 1
    )


def test_only_the_wanted_columns_are_read(tmp_path):
    judged, credit, pairs = a_batch(5)
    TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER, seed=5)
    assert list(read_traces(tmp_path, columns=["channel", "localized"])) == [
        "channel",
        "localized",
        "seed",
    ]
    with pytest.raises(ValueError, match=r"unknown column 'nonsense'; allowed: step, row"):
        read_traces(tmp_path, columns=["nonsense"])


def test_absent_folders_and_steps_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no trace files"):
        read_traces(tmp_path)
    judged, credit, pairs = a_batch(6)
    TraceWriter(tmp_path).write(4, judged, credit, pairs, TOKENIZER)
    with pytest.raises(ValueError, match=r"no traces of step 5; allowed: \[4\]"):
        trace_files(tmp_path, [4, 5])
    with pytest.raises(KeyError, match="step 4, row 99: found 0 answers"):
        trace_of(read_traces(tmp_path), 4, 99)


def test_torn_and_foreign_files_are_all_listed(tmp_path):
    judged, credit, pairs = a_batch(7)
    good = TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER)
    data = good.read_bytes()
    (tmp_path / "step-000002.parquet").write_bytes(data[: len(data) // 2])
    (tmp_path / "step-000003.parquet").write_bytes(b"")
    pq.write_table(
        pa.table({"step": ["one"], "row": pa.array([1], pa.int32())}),
        tmp_path / "step-000004.parquet",
    )
    with pytest.raises(DataError) as error:
        read_traces(tmp_path)
    faults = error.value.violations
    assert {fault.file.rsplit("-", 1)[1] for fault in faults} == {
        f"00000{k}.parquet" for k in (2, 3, 4)
    }
    other = [fault for fault in faults if fault.file.endswith("4.parquet")]
    assert (
        len(other) == len(SCHEMA) - 1
        and "step: string" in other[0].found
        and other[0].allowed == "int32"
    )


def test_damage_inside_a_file_is_named(tmp_path):
    judged, credit, pairs = a_batch(8)
    path = TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER)
    data = bytearray(path.read_bytes())
    data[4 : len(data) // 2] = b"\xff" * (len(data) // 2 - 4)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="step-000001"):
        read_traces(tmp_path)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5])
def test_one_damaged_byte_of_a_column_is_named(tmp_path, share):
    judged, credit, pairs = a_batch(8)
    path = TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER)
    whole = read_traces(tmp_path)
    data = bytearray(path.read_bytes())
    refused = 0
    column = pq.ParquetFile(path).metadata.row_group(0).column(SCHEMA.names.index("q"))
    at = column.data_page_offset + int(share * column.total_compressed_size)
    for k in range(40, 60):  # beyond the head of the page
        bad = bytearray(data)
        bad[at + k] ^= 1
        path.write_bytes(bytes(bad))
        try:
            assert read_traces(tmp_path).equals(whole)
        except DataError as error:
            refused += "step-000001" in str(error)
    assert refused >= 15


def test_a_folder_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    judged, credit, pairs = a_batch(9)
    (tmp_path / "step-000001.parquet.part").mkdir(parents=True)
    with pytest.raises(OSError, match=r"step-000001\.parquet"):
        TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER)
    assert not (tmp_path / "step-000001.parquet").exists()


def test_nothing_is_left_when_a_rename_fails(tmp_path):
    judged, credit, pairs = a_batch(9)
    (tmp_path / "step-000001.parquet").mkdir()
    with pytest.raises(OSError, match="no trace of this step was kept"):
        TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000001.parquet"]


def rewritten(path, target, **fields):
    table = pq.read_table(path)
    metadata = json.loads(table.schema.metadata[b"memcalib"]) | fields
    pq.write_table(table.replace_schema_metadata({"memcalib": json.dumps(metadata)}), target)


def test_files_of_another_version_are_named_and_never_read(tmp_path):
    judged, credit, pairs = a_batch(11)
    path = TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER, seed=5)
    rewritten(path, tmp_path / "step-000002.parquet")
    assert len(read_traces(tmp_path)) == 2 * len(read_traces(tmp_path, [1]))
    rewritten(path, tmp_path / "step-000003.parquet", version=VERSION + 1)
    with pytest.raises(
        DataError,
        match=rf"version: found {VERSION + 1}; allowed: {VERSION}; read the file",
    ) as error:
        read_traces(tmp_path)
    assert len(error.value.violations) == 1
    pq.write_table(
        pq.read_table(path).replace_schema_metadata({"memcalib": "{half"}),
        tmp_path / "step-000003.parquet",
    )
    with pytest.raises(DataError, match="step-000003.parquet: parquet"):
        read_traces(tmp_path)


def test_a_file_without_our_metadata_is_read_without_a_head(tmp_path):
    judged, credit, pairs = a_batch(12)
    path = TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER, seed=5)
    plain = read_traces(tmp_path).drop(columns="seed")
    pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    pd.testing.assert_frame_equal(read_traces(tmp_path), plain)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=12), st.integers(-1, 31))
def test_dropping_leaves_the_steps_before_and_nothing_half_written(
    tmp_path_factory, written, after
):
    folder = tmp_path_factory.mktemp("traces")
    writer = TraceWriter(folder)
    others = [folder / "step-000099 (copy).parquet", folder / "traces.html"]
    for path in [
        *(writer.path(step, process) for step, process in written),
        *others,
        folder / "step-000000.parquet.part",
    ]:
        path.touch()
    gone = drop_traces(folder, after)
    expected_files = {writer.path(step, process) for step, process in written if step <= after} | {
        *others
    }
    assert {*folder.iterdir()} == expected_files and len(gone) == len(set(written)) - len(
        expected_files - {*others}
    ) + 1
    assert drop_traces(folder, after) == []


class Stopped(BaseException):
    """A kill, as far as the run can tell."""


def traced(folder, steps=4, resume=None, **changes):
    config = world_config(
        WORLDS["short"], method="memcalib-rl", steps=steps, prompts=2, generations=4, lr=1e-3
    )
    config = config.model_copy(
        update={"save_every": 2, "trace_every": 1, "eval_every": 0} | changes
    )
    examples = make_examples("short", 6, 0)
    return train(
        build_policy(0),
        config,
        examples,
        exact_judge,
        tokenizer=TOKENIZER,
        out=folder,
        resume=resume,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of four steps, and the folder of one that was stopped after its third trace,
    before its row and checkpoint.
    """
    whole = tmp_path_factory.mktemp("whole")
    half = tmp_path_factory.mktemp("half")
    traced(whole)
    write = TraceWriter.write

    def stopping(self, step, *arguments, **options):
        path = write(self, step, *arguments, **options)
        if step == 3:
            raise Stopped
        return path

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceWriter, "write", stopping)
        with pytest.raises(Stopped):
            traced(half)
    assert [path.name for path in trace_files(half)] == [
        f"step-00000{k}.parquet" for k in (1, 2, 3)
    ]
    assert len((half / "steps.jsonl").read_text().splitlines()) == 2
    return whole, half


def test_a_run_that_goes_on_has_each_trace_once_and_misses_none(straight, tmp_path):
    whole, half = straight
    shutil.copytree(half, tmp_path / "run")
    (tmp_path / "run" / "traces" / "step-000004.parquet.part").write_bytes(b"half")
    traced(tmp_path / "run", resume=True)
    frame = read_traces(tmp_path / "run")
    pd.testing.assert_frame_equal(frame, read_traces(whole))
    assert set(frame["method"]) == {"memcalib-rl"} and set(frame["step"]) == {1, 2, 3, 4}
    answers = frame[frame["channel"].isna()]
    assert len(answers) == 4 * 8 and not answers.duplicated(["step", "row"]).any()
    assert not frame.duplicated(["step", "row", "channel"]).any()
    assert (
        sorted(path.suffix for path in (tmp_path / "run" / "traces").iterdir()) == [".parquet"] * 4
    )


@pytest.mark.parametrize(("resume", "steps_kept"), [(True, {1, 2}), (None, set())])
def test_traces_of_steps_that_were_undone_do_not_stay(straight, tmp_path, resume, steps_kept):
    """Going on without traces from step 2, and beginning anew in a folder that never had a
    checkpoint.
    """
    run = tmp_path / "run"
    shutil.copytree(straight[1], run)
    if not resume:
        for checkpoint in run.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    traced(run, steps=3, resume=resume, trace_every=0)
    assert {int(path.stem[5:]) for path in (run / "traces").iterdir()} == steps_kept
    assert len((run / "steps.jsonl").read_text().splitlines()) == 3


def test_an_unfinished_file_is_no_step(tmp_path):
    judged, credit, pairs = a_batch(10)
    path = TraceWriter(tmp_path).write(1, judged, credit, pairs, TOKENIZER)
    (tmp_path / "step-000002.parquet.part").write_bytes(path.read_bytes()[:100])
    assert set(read_traces(tmp_path)["step"]) == {1}


def test_tokens_without_text_show_their_names():
    judged, credit, _ = a_batch(11)
    judged.ids[0] = [TOKENIZER.eos_token_id, 10**6]
    judged.valid[0] = True
    table = answer_table(judged, credit, TOKENIZER)
    assert table["tokens"][0].as_py() == [TOKENIZER.eos_token, "[1000000]"]
    texts, ends = decode_rows(TOKENIZER, judged.ids)
    assert table["response"].to_pylist() == texts
    assert table["ends"].to_pylist() == [end.tolist() for end in ends]
