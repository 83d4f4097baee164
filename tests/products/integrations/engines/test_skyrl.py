"""SkyRL, in an environment with skyrl and our core: a generator around a stand-in for SkyRL's
(which needs an inference engine on a GPU), then SkyRL's own way from its output to advantages.
"""

import asyncio
import sys
import typing
from types import SimpleNamespace

import pytest
import torch
import typing_extensions

if sys.version_info < (3, 12):  # modules of SkyRL that pydantic reads need it there
    typing.TypedDict = typing_extensions.TypedDict

from skyrl.backends.skyrl_train.utils.ppo_utils import (
    AdvantageEstimatorRegistry,
    compute_advantages_and_returns,
)
from skyrl.train.config import SkyRLTrainConfig
from skyrl.train.dataset import PromptDataset
from skyrl.train.generators.base import BatchMetadata, GeneratorInterface, TrajectoryID
from skyrl.train.trainer import RayPPOTrainer
from sampled_answers import ASKED, ENCODE, EXAMPLES, IDS, POLICY, TEXTS, TOKENIZER

from memcalib.credit.logprobs import response_logps
from memcalib.credit.token_credit import TokenCredit
from memcalib.products.integrations.judging import engine_settings
from memcalib.products.integrations.skyrl import (
    credit_experiment,
    credited_generator,
    register,
    skyrl_rows,
    write_skyrl_data,
)
from memcalib.products.micro.world import exact_judge
from memcalib.products.micro.practice.server import MicroServer

register()


class Inner(GeneratorInterface):
    """SkyRL's generator, without an inference engine."""

    def __init__(self, masks=None):
        self.masks = masks or [[1] * len(ids) for ids in IDS]

    async def generate(self, input_batch, disable_tqdm=False):
        rows = len(input_batch["prompts"])
        return {
            "prompt_token_ids": [ENCODE(example) for example in ASKED][:rows],
            "response_ids": IDS[:rows],
            "rewards": [0.0] * rows,
            "loss_masks": self.masks[:rows],
            "stop_reasons": ["stop"] * rows,
            "rollout_metrics": {"generate/x": 1.0},
            "rollout_logprobs": None,
            "is_last_step": None,
        }


def batch(rows=8, phase="train"):
    extras = skyrl_rows(ASKED[:rows], {"judge": "micro-exact", "prompt_template": "micro"})
    return {
        "prompts": [extra["prompt"] for extra in extras],
        "env_classes": ["none"] * rows,
        "env_extras": extras,
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(e.id, k % 4) for k, e in enumerate(ASKED[:rows])],
        "batch_metadata": BatchMetadata(global_step=1, training_phase=phase),
    }


def generator(inner=None, scorer=None, **changes):
    settings = {"judge": "micro-exact", "prompt_template": "micro", "group_size": 4, **changes}
    options = {"scorer": scorer, "single_group": settings.pop("single_group", False)}
    return credited_generator(inner or Inner(), TOKENIZER, settings, **options)


def expected(config, judged) -> torch.Tensor:
    credit = TokenCredit(TOKENIZER, config, "micro")
    request = credit.requests(ASKED, judged, IDS, texts=TEXTS)
    scores = ()
    if len(request):
        scores = response_logps(POLICY, request.prompts, request.responses)
    return credit.assign(request, scores)


def skyrl_trainer():
    """SkyRL's trainer with what the way from an output to advantages needs."""
    trainer = object.__new__(RayPPOTrainer)
    trainer.cfg = SkyRLTrainConfig()
    trainer.cfg.trainer.algorithm.advantage_estimator = "memcalib"
    trainer.cfg.trainer.train_batch_size = 2
    trainer.cfg.trainer.policy_mini_batch_size = 2
    trainer.cfg.trainer.critic.model.path = None
    trainer.cfg.generator.n_samples_per_prompt = 4
    trainer.tokenizer = TOKENIZER
    trainer.all_metrics = {}
    trainer.dispatch = SimpleNamespace(get_lcm_dp_size=lambda: 1)  # of SkyRL's workers
    return trainer


def test_the_estimator_is_in_skyrls_registry():
    assert "memcalib" in AdvantageEstimatorRegistry.list_available()
    rewards = torch.tensor([[0.0, 0.5, -1.0]])
    mask = torch.tensor([[0, 1, 1]])
    advantages, returns = compute_advantages_and_returns(
        token_level_rewards=rewards,
        response_mask=mask,
        index=["a"],
        adv_estimator="memcalib",
        config=SkyRLTrainConfig().trainer.algorithm,
    )
    assert torch.equal(advantages, rewards) and torch.equal(advantages, returns)


@pytest.mark.parametrize("mode", ["gdpo", "evidence", "ordered"])
def test_from_skyrls_batch_to_its_advantages(mode):
    credit = {"method": "gdpo"} if mode == "gdpo" else {"mode": mode, "threshold_minimum": 16}

    def scorer(request):
        return response_logps(POLICY, request.prompts, request.responses)

    credit_generator = generator(scorer=scorer if mode == "ordered" else None, credit=credit)
    output = asyncio.run(credit_generator.generate(batch()))
    assert output["rollout_metrics"]["generate/x"] == 1.0
    assert output["rollout_metrics"]["memcalib/unscored"] == 0
    trainer = skyrl_trainer()
    uids = [example.id for example in ASKED]
    output, uids = trainer.postprocess_generator_output(output, uids)
    data = trainer.convert_to_training_input(output, uids)
    data["values"] = None  # as SkyRL's forward pass leaves it without a critic
    data = trainer.compute_advantages_and_returns(data)
    judged = [exact_judge(example, text) for example, text in zip(ASKED, TEXTS, strict=True)]
    expected_advantages = expected(
        engine_settings({"judge": "micro-exact", "credit": credit}).credit, judged
    )
    width = data["advantages"].shape[1]
    for row, ids in enumerate(IDS):  # SkyRL pads answers on the left
        advantages = data["advantages"][row, width - len(ids) :]
        assert torch.allclose(advantages, expected_advantages[row, : len(ids)], atol=1e-6)
        assert not data["advantages"][row, : width - len(ids)].any()
    assert expected_advantages.any()


class Engine:
    """An inference engine's client, which has the answers at hand: SkyRL's needs a GPU."""

    def __init__(self):
        self.asked = 0

    async def generate(self, engine_input, model=None):
        ids = []
        for _ in engine_input["prompt_token_ids"]:
            ids.append(list(IDS[self.asked]))
            self.asked += 1
        return {
            "responses": [TOKENIZER.decode(row, skip_special_tokens=True) for row in ids],
            "response_ids": ids,
            "stop_reasons": ["stop"] * len(ids),
        }


def test_skyrls_own_data_set_and_generator_with_credit_around_them(tmp_path):
    """What the page's train.py makes, up to the inference engine."""
    settings = {"judge": "micro-exact", "prompt_template": "micro", "group_size": 4}
    settings["credit"] = {"mode": "evidence"}
    examples = list({example.id: example for example in ASKED}.values())
    file = write_skyrl_data(examples, tmp_path / "data.jsonl", settings)
    data = PromptDataset([str(file)], TOKENIZER, max_prompt_length=4096, num_workers=1)
    rows = [row for row in map(data.__getitem__, range(len(data))) for _ in range(4)]
    config = SkyRLTrainConfig()
    config.generator.batched = True
    config.generator.max_turns = 1
    config.trainer.policy.model.path = "micro"
    experiment = object.__new__(credit_experiment(settings))
    made = experiment.get_generator(config, TOKENIZER, Engine())
    asked = {
        "prompts": [row[0] for row in rows],
        "env_classes": [row[1] for row in rows],
        "env_extras": [row[2] for row in rows],
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(row[3], k % 4) for k, row in enumerate(rows)],
        "batch_metadata": BatchMetadata(global_step=1, training_phase="train"),
    }
    output = asyncio.run(made.generate(asked))
    judged = [exact_judge(example, text) for example, text in zip(ASKED, TEXTS, strict=True)]
    wanted = expected(engine_settings(settings).credit, judged)
    assert wanted.any()
    for row, ids in enumerate(IDS):
        assert torch.allclose(
            torch.tensor(output["rewards"][row]), wanted[row, : len(ids)], atol=1e-6
        )


def test_the_judge_is_asked_over_http_for_the_whole_batch_at_once(tmp_path):
    with MicroServer(EXAMPLES, latency=0.1) as server:
        judge = {"model": "micro-judge", "base_url": server.base_url, "key_env": ""}
        credit_generator = generator(judge=judge, cache=str(tmp_path / "cache.sqlite"))
        asyncio.run(credit_generator.generate(batch()))
        assert server.stats()["max_at_once"] > 2


def test_an_evaluation_has_one_reward_for_each_answer():
    output = asyncio.run(generator().generate(batch(phase="eval")))
    assert all(isinstance(reward, float) for reward in output["rewards"])
    assert "memcalib/SCS" in output["rollout_metrics"]


def test_one_prompt_at_a_time_is_refused_unless_it_is_meant():
    with pytest.raises(ValueError, match=r"all 4 answers are to prompt .*single_group=True"):
        asyncio.run(generator().generate(batch(4)))
    output = asyncio.run(generator(single_group=True).generate(batch(4)))
    assert len(output["rewards"]) == 4


def test_masks_with_gaps_are_refused_and_empty_ones_left_out():
    masks = [[1] * len(ids) for ids in IDS]
    masks[3][1] = 0
    with pytest.raises(ValueError, match="row 3: the response mask has gaps"):
        asyncio.run(generator(Inner(masks)).generate(batch()))
    masks[3] = [0] * len(IDS[3])
    output = asyncio.run(generator(Inner(masks)).generate(batch()))
    assert set(output["rewards"][3]) == {0.0}


def test_a_rule_that_reads_the_policy_needs_a_scorer():
    with pytest.raises(ValueError, match="'ordered' reads log-probabilities"):
        generator(credit={"mode": "ordered"})


def test_thresholds_are_kept_in_the_generators_state():
    def scorer(request):
        return response_logps(POLICY, request.prompts, request.responses)

    credit = {"mode": "ordered", "threshold_minimum": 16}
    credit_generator = generator(scorer=scorer, credit=credit)
    asyncio.run(credit_generator.generate(batch()))
    resumed = generator(scorer=scorer, credit=credit)
    assert resumed.state_dict() != credit_generator.state_dict()
    resumed.load_state_dict(credit_generator.state_dict())
    assert resumed.state_dict() == credit_generator.state_dict()
