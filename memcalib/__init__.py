"""Measure and train how much each piece of memory should shape an LLM agent's answer.

`import memcalib as mc` gives the names below; each is loaded from its module when it is first used, so the import costs nothing.
"""

import sys

if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    # `python -m memcalib` looks for every module in the working folder first, and would run a
    # `json.py` that came with somebody's data
    sys.path[:1] = []

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memcalib.io.extras import explain_imports
from memcalib.io.parts import add_parts_of

__version__ = "0.1.0"

_MODULES = {
    "problem": ("Atom", "Block", "Example", "Judgment", "Level", "Rollout", "judgment_for", "load_examples", "remove_atoms", "render", "to_dataset"),
    "inference.endpoint": ("Endpoint",),
    "inference.rollout": ("Sampling",),
    "scoring.judge_runs": ("Judge",),
    "judge": ("JudgeConfig", "LLMJudge"),
    "metrics": ("Metric", "add_metric", "controls", "readable", "score"),
    "evaluation.run": ("evaluate",),
    "report.figures": ("plot",),
    "rules.base": ("CreditConfig", "CreditRule"),
    "credit.token_credit": ("TokenCredit",),
    "trainer.train_config": ("CreditGRPOConfig",),
    "training": ("CreditTrainer",),
}
explain_imports(__name__)
add_parts_of("memcalib.products.parts")  # read when a part is first asked for
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [
    "__version__",
    "Atom",
    "Block",
    "CreditConfig",
    "CreditGRPOConfig",
    "CreditRule",
    "CreditTrainer",
    "Endpoint",
    "Example",
    "Judge",
    "JudgeConfig",
    "Judgment",
    "LLMJudge",
    "Level",
    "Metric",
    "Rollout",
    "Sampling",
    "TokenCredit",
    "add_metric",
    "controls",
    "evaluate",
    "judgment_for",
    "load_examples",
    "plot",
    "readable",
    "remove_atoms",
    "render",
    "score",
    "to_dataset",
]

if TYPE_CHECKING:  # for editors and type checkers; tests/test_api.py holds it against the table
    from memcalib.credit.token_credit import TokenCredit
    from memcalib.evaluation.run import evaluate
    from memcalib.inference.endpoint import Endpoint
    from memcalib.inference.rollout import Sampling
    from memcalib.judge import JudgeConfig, LLMJudge
    from memcalib.rules.base import CreditConfig, CreditRule
    from memcalib.metrics import Metric, add_metric, controls, readable, score
    from memcalib.problem import (
        Atom,
        Block,
        Example,
        Judgment,
        Level,
        Rollout,
        judgment_for,
        load_examples,
        remove_atoms,
        render,
        to_dataset,
    )
    from memcalib.report.figures import plot
    from memcalib.scoring.judge_runs import Judge
    from memcalib.trainer.train_config import CreditGRPOConfig
    from memcalib.training import CreditTrainer


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(sorted(_HOME))}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
