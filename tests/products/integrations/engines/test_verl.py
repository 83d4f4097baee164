"""verl, in an environment with verl and our core: its registries, its reward loop's manager, its
transfer queue, its trainer's `_compute_advantage` and its estimator dispatch, on a CPU.

A stand-in plays the actor's worker group, which verl makes for GPUs: it reads and writes the
transfer queue as verl's worker does, and computes with the micro-world's policy.
"""

import asyncio
import os

os.environ["VERL_USE_EXTERNAL_MODULES"] = "memcalib.products.integrations.verl"
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
import verl
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from verl.protocol import DataProto
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.padding_utils import upsample_batch_to_divisible_size
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.reward import load_reward_manager
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from sampled_answers import ASKED, ENCODE, EXAMPLES, IDS, POLICY, TEXTS, TOKENIZER

from memcalib.products.integrations.contract import JudgedAnswer, TooManyUnscored
from memcalib.credit.logprobs import response_logps
from memcalib.credit.token_credit import TokenCredit
from memcalib.products.integrations.judging import engine_settings
from memcalib.products.integrations.verl import STATE, handing_over, write_verl_data
from memcalib.products.micro.world import exact_judge
from memcalib.products.micro.practice.server import MicroServer
from memcalib.problem import judgment_for

JUDGED = [exact_judge(example, text) for example, text in zip(ASKED, TEXTS, strict=True)]
JUDGED[2] = judgment_for(ASKED[2], {}, error="timeout: no reply", retry=True)


def config_for(**memcalib):
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "algorithm.adv_estimator=memcalib",
                "reward.reward_manager.name=memcalib",
                "trainer.v1.trainer_mode=memcalib-sync",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.rollout.temperature=1.0",
            ],
        )
    with open_dict(config):
        config.memcalib = {"judge": "micro-exact", "prompt_template": "micro", **memcalib}
    return config


def expected(config) -> torch.Tensor:
    credit = TokenCredit(TOKENIZER, config, "micro")
    request = credit.requests(ASKED, JUDGED, IDS, texts=TEXTS)
    scores = ()
    if len(request):
        scores = response_logps(POLICY, request.prompts, request.responses)
    return credit.assign(request, scores)


def test_verl_knows_the_three_names():
    assert verl.__version__.startswith("0.9.")
    assert get_adv_estimator_fn("memcalib").__module__ == "memcalib.products.integrations.verl"
    for mode in ("sync", "colocate_async", "separate_async"):
        assert issubclass(get_trainer_cls(f"memcalib-{mode}"), get_trainer_cls(mode))


def test_the_dispatch_of_verl_gives_our_advantages():
    config = engine_settings({"judge": "micro-exact"}).credit
    advantages = expected(config)
    mask = torch.zeros(advantages.shape, dtype=torch.long)
    for row, ids in enumerate(IDS):
        mask[row, : len(ids)] = 1
    uid = np.array([example.id for example in ASKED], dtype=object)
    data = DataProto(
        batch=TensorDict(
            {"token_level_rewards": torch.rand(advantages.shape), "response_mask": mask},
            batch_size=len(mask),
        ),
        non_tensor_batch={"uid": uid},
    )
    with pytest.raises(RuntimeError, match="found no judged answers"):
        compute_advantage(data, "memcalib")
    with handing_over(advantages):
        data = compute_advantage(data, "memcalib")
    assert torch.allclose(data.batch["advantages"], advantages, atol=1e-6)
    assert data.batch["returns"] is data.batch["advantages"]


def item(row: int) -> DataProto:
    prompt = ENCODE(ASKED[row])
    batch = TensorDict(
        {
            "prompts": torch.tensor([prompt]),
            "responses": torch.tensor([[*IDS[row], 0, 0]]),
            "attention_mask": torch.tensor([[1] * (len(prompt) + len(IDS[row])) + [0, 0]]),
        },
        batch_size=1,
    )
    columns = {
        "data_source": "memcalib",
        "reward_model": {"style": "rule", "ground_truth": ASKED[row].to_json()},
    }
    arrays = {name: np.array([value], dtype=object) for name, value in columns.items()}
    return DataProto(batch=batch, non_tensor_batch=arrays)


def test_the_reward_manager_judges_what_verl_gives_it(tmp_path):
    with MicroServer(EXAMPLES, latency=0.05) as server:
        judge = {"model": "micro-judge", "base_url": server.base_url, "key_env": ""}
        config = config_for(judge=judge, cache=str(tmp_path / "cache.sqlite"))
        manager = load_reward_manager(config, TOKENIZER)

        async def all_rows():
            return await asyncio.gather(*(manager.run_single(item(row)) for row in range(8)))

        results = manager.loop.run_until_complete(all_rows())
        again = manager.loop.run_until_complete(all_rows())
        assert server.stats()["answered_twice"] == 0
    for row, result in enumerate(results):
        answer = JudgedAnswer.unpack(result["reward_extra_info"]["memcalib"])
        exact = exact_judge(ASKED[row], TEXTS[row])
        assert answer.text == TEXTS[row] and answer.example.id == ASKED[row].id
        levels = [(atom.atom_id, atom.actual) for atom in answer.judgment.atoms]
        assert levels == [(atom.atom_id, atom.actual) for atom in exact.atoms]
        assert result["reward_extra_info"]["unscored"] == 0
        assert isinstance(result["reward_score"], float)
    assert [one["reward_score"] for one in again] == [one["reward_score"] for one in results]


def test_a_judge_that_is_down_does_not_stop_a_worker():
    judge = {"model": "m", "base_url": "http://127.0.0.1:9/v1", "key_env": "", "attempts": 1}
    manager = load_reward_manager(config_for(judge=judge), TOKENIZER)
    result = manager.loop.run_until_complete(manager.run_single(item(0)))
    answer = JudgedAnswer.unpack(result["reward_extra_info"]["memcalib"])
    assert not answer.judgment.scored and "unreachable" in answer.judgment.error
    assert result["reward_score"] == 0 and result["reward_extra_info"]["unscored"] == 1


@pytest.fixture(scope="module")
def queue():
    ray.init(num_cpus=32, include_dashboard=False, log_to_driver=False)  # logical ones
    config = OmegaConf.create(OmegaConf.to_container(config_for().transfer_queue, resolve=True))
    tq.init(config)
    yield
    tq.close()
    ray.shutdown()


def put_batch(partition: str, judged=JUDGED, pad: bool = True):
    """Rows as verl's agent loop puts them, sorted as its balancing might, filled up to ten."""
    keys = []
    fields = []
    tags = []
    counts: dict[str, int] = {}
    for example, judgment, ids, text in zip(ASKED, judged, IDS, TEXTS, strict=True):
        prompt = ENCODE(example)
        number = counts.get(example.id, 0)
        counts[example.id] = number + 1
        uid = example.id.replace("_", "-")
        info = {"memcalib": JudgedAnswer(example, judgment, text).pack(), "SCS": 0.0}
        scores = torch.zeros(len(ids))
        scores[-1] = 1.0
        ones = torch.ones(len(ids), dtype=torch.long)
        keys.append(f"{uid}_{number}_0")
        fields.append(
            {
                "uid": uid,
                "prompts": torch.tensor(prompt),
                "responses": torch.tensor(ids),
                "input_ids": torch.tensor([*prompt, *ids]),
                "position_ids": torch.arange(len(prompt) + len(ids)),
                "response_mask": ones,
                "loss_mask": ones,
                "rm_scores": scores,
                "old_log_probs": torch.zeros(len(ids)),
                "extra_fields": {"reward_extra_info": info},
            }
        )
        tags.append({"status": "success", "seq_len": len(prompt) + len(ids)})
    tq.kv_batch_put(
        keys=keys, partition_id=partition, fields=list_of_dict_to_tensordict(fields), tags=tags
    )
    batch = tq.KVBatchMeta(partition_id=partition, keys=keys, tags=tags)
    if pad:
        batch = upsample_batch_to_divisible_size(batch, 5, TOKENIZER.eos_token_id)
    order = sorted(range(len(batch.keys)), key=lambda row: (row * 7) % len(batch.keys))
    batch.reorder(order)
    return batch, [row for row in order]


class Workers:
    """The actor's worker group, by the micro-world's policy."""

    def __init__(self):
        self.sizes = []
        self._dispatch_info = {"actor": [0, 1, 2]}

    def compute_log_prob(self, batch):
        self.sizes.append(len(batch.keys))
        assert batch.extra_info["temperature"] == 1.0
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"]
        )
        rows = []
        for ids in data["input_ids"].unbind():
            with torch.no_grad():
                logits = POLICY(ids[None]).logits[0]
            log_probs = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            rows.append(torch.cat([log_probs, torch.zeros(1)]).float())
        nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
        tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({"log_probs": nested}, batch_size=len(rows)),
        )
        return batch

    def save_checkpoint(self, *_, **__):
        pass

    def load_checkpoint(self, *_, **__):
        pass


def trainer_for(mode="sync", **memcalib):
    """verl's trainer with what `_compute_advantage` and checkpoints need, made without its GPUs."""
    config = config_for(**memcalib)
    config.trainer.v1.trainer_mode = f"memcalib-{mode}"
    trainer = get_trainer_cls(f"memcalib-{mode}")(config)
    trainer.tokenizer = TOKENIZER
    trainer.actor_rollout_wg = Workers()
    return trainer


@pytest.mark.parametrize("mode", ["gdpo", "evidence", "ordered"])
def test_the_trainer_gives_the_loss_our_advantages(queue, mode):
    credit = {"method": "gdpo"} if mode == "gdpo" else {"mode": mode, "threshold_minimum": 16}
    trainer = trainer_for(credit=credit)
    batch, order = put_batch(f"train-{mode}")
    assert len(batch.keys) == 10 and trainer.trainer_mode == "sync"
    metrics = {}
    trainer._compute_advantage(batch, metrics)
    data = tq.kv_batch_get(
        keys=batch.keys, partition_id=batch.partition_id, select_fields=["advantages"]
    )
    advantages = list(data["advantages"].unbind())
    expected_advantages = expected(trainer.memcalib.credit)
    for position, row in enumerate(order):
        if row >= len(IDS):
            assert not advantages[position].any()
            continue
        assert len(advantages[position]) == len(IDS[row])
        assert torch.allclose(
            advantages[position], expected_advantages[row, : len(IDS[row])], atol=1e-6
        )
    assert metrics["memcalib/unscored"] == 1 and metrics["memcalib/padding_rows"] == 2
    if mode == "ordered":
        (size,) = trainer.actor_rollout_wg.sizes
        assert size % 3 == 0 and metrics["memcalib/scored_rows"] <= size
        assert not tq.kv_list("memcalib").get("memcalib"), "rows that were scored are left behind"


def test_a_down_judge_stops_the_trainer_and_a_cut_group_is_named(queue):
    failed = [judgment_for(e, {}, error="auth: the key is refused", retry=True) for e in ASKED]
    batch, _ = put_batch("down", failed)
    with pytest.raises(TooManyUnscored, match="auth: the key is refused"):
        trainer_for()._compute_advantage(batch, {})
    batch, _ = put_batch("cut", pad=False)
    half = tq.KVBatchMeta(partition_id="cut", keys=batch.keys[:5], tags=batch.tags[:5])
    with pytest.raises(ValueError, match=r"answers in this batch; allowed: 4 \(group_size\)"):
        trainer_for()._compute_advantage(half, {})


def test_a_batch_without_judgments_or_with_several_outputs_is_refused(queue):
    batch, _ = put_batch("other", pad=False)
    several = tq.KVBatchMeta(
        partition_id="other", keys=[batch.keys[0]], tags=[{"status": "success"}]
    )
    from memcalib.products.integrations.verl import engine_rows

    data = tq.kv_batch_get(
        keys=several.keys,
        partition_id="other",
        select_fields=["uid", "responses", "response_mask", "extra_fields"],
    )
    with pytest.raises(ValueError, match="output 1 of its session"):
        engine_rows([batch.keys[0][:-1] + "1"], several.tags, data)
    bare = {"extra_fields": [{"reward_extra_info": {"acc": 1}}]}
    with pytest.raises(ValueError, match=r"no judgment; allowed: .*found acc"):
        engine_rows(several.keys, several.tags, bare)


def test_thresholds_are_kept_with_verls_checkpoints(queue, tmp_path):
    credit = {"mode": "ordered", "threshold_minimum": 16}
    trainer = trainer_for(credit=credit)
    trainer.config.trainer.default_local_dir = str(tmp_path)
    batch, _ = put_batch("saved")
    trainer._compute_advantage(batch, {})
    trainer.global_steps = 3
    trainer.train_dataloader = torch.utils.data.DataLoader([0])
    trainer.train_dataloader.state_dict = dict
    trainer._save_checkpoint()
    assert (tmp_path / "global_step_3" / STATE).is_file()
    resumed = trainer_for(credit=credit)
    resumed.config.trainer.default_local_dir = str(tmp_path)
    resumed.train_dataloader = torch.utils.data.DataLoader([0])
    resumed.train_dataloader.load_state_dict = lambda state: None
    resumed._load_checkpoint()
    assert resumed.global_steps == 3
    assert resumed._credit().state_dict() == trainer._credit().state_dict()
    assert resumed._credit().state_dict() != trainer_for(credit=credit)._credit().state_dict()


def test_what_cannot_go_together_is_refused():
    config = config_for()
    config.algorithm.use_kl_in_reward = True
    with pytest.raises(ValueError, match="use_kl_in_reward: found true"):
        get_trainer_cls("memcalib-sync")(config)
    with pytest.raises(ValueError, match="'evidence-kl' reads divergences"):
        get_trainer_cls("memcalib-sync")(config_for(credit={"mode": "evidence-kl"}))


def test_verl_reads_the_data_that_we_write(tmp_path):
    from datasets import load_dataset

    settings = {"judge": "micro-exact", "prompt_template": "micro"}
    path = write_verl_data(EXAMPLES, tmp_path / "train.parquet", settings)
    rows = load_dataset("parquet", data_files=str(path), cache_dir=str(tmp_path / "cache"))["train"]
    ids = TOKENIZER.apply_chat_template(rows[0]["prompt"], add_generation_prompt=True)
    assert list(getattr(ids, "input_ids", ids)) == ENCODE(EXAMPLES[0])
    assert rows[1]["reward_model"]["ground_truth"] == EXAMPLES[1].to_json()


def test_the_shipped_launch_is_resolved_by_verls_own_loader_and_checks():
    from hydra import initialize_config_dir
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    from memcalib.products.integrations.verl import verl_settings
    from memcalib.io.settings import package_data

    folder = package_data("products", "integrations", "launch").resolve()
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("verl-qwen3-8b")
    OmegaConf.to_container(config, resolve=True)
    validate_config(
        config=config,
        use_reference_policy=need_reference_policy(config),
        use_critic=need_critic(config),
    )
    assert need_reference_policy(config) and not need_critic(config)
    assert config.actor_rollout_ref.rollout.n == 8 and config.data.train_batch_size == 64
    assert omega_conf_to_dataclass(config.algorithm).adv_estimator == "memcalib"
    settings = verl_settings(config)
    assert settings.credit.rule.name == "evidence" and settings.judge.concurrency == 64
    assert issubclass(get_trainer_cls(config.trainer.v1.trainer_mode), get_trainer_cls("sync"))
