"""The reward that TRL's own trainer gets in benchmarks: the sum of an answer's nine channels."""

from collections.abc import Callable, Sequence

from memcalib.channels import channel_rewards, judgment_tensors
from memcalib.problem import Example, JudgeLike, judge_all


def total_reward(judge: JudgeLike, examples: Sequence[Example]) -> Callable[..., list[float]]:
    """A reward function for TRL; the column `example` of its rows numbers the examples."""

    def total(completions, example, **_) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        judged = judge_all(judge, [examples[number] for number in example], texts)
        ideal, actual, mask, _scored = judgment_tensors(judged)
        return channel_rewards(ideal, actual, mask).sum(1).tolist()

    return total
