"""The seam: a rule from outside works everywhere, a rule that is taken away is missed nowhere,
and a bad one is refused by name.
"""

import ast
import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from micro_policy import EXAMPLES, TOKENIZER, policy
from slow_rules import judged_answers, log_probabilities

import memcalib
from memcalib.credit.token_credit import TokenCredit
from memcalib.inference.sampling import prompt_encoder
from memcalib.localization import Signal, weigh
from memcalib.products.micro.loop import CreditLoop
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.world import WORLDS, exact_judge
from memcalib.products.reproduction.rule_runs import GridPlan, GridRun, GridStage, train_one
from memcalib.products.reproduction.rule_tables import grid_frame
from memcalib.rules.base import (
    LOG_PROBABILITIES,
    ChannelWeights,
    CreditConfig,
    CreditRule,
    OwnAdvantages,
    Pairs,
    credit_rule,
    rule_modules,
    rule_names,
    rule_settings,
)
from memcalib.rules.counterfactual import ORDERED, CounterfactualRule
from memcalib.trainer.forecast import training_forecast
from memcalib.trainer.recipe import load_recipe
from memcalib.trainer.trace_files import read_traces, trace_of
from memcalib.trainer.train_config import world_config
from memcalib.training import train
from memcalib.report.credit_viewer import answer_view, write_trace_page

torch.set_num_threads(1)
PACKAGE = Path(memcalib.__file__).parent
ENCODE = prompt_encoder(TOKENIZER, prompt_template="micro")
SMALL = dict(prompts=2, generations=4, minibatches=1, max_tokens=40, lr=1e-3)
SOURCE = '''
import torch

from memcalib.localization import Signal, weigh
from memcalib.rules.base import CreditRule, Rereading


class LastSentence(CreditRule):
    """Each channel's advantage goes to the last sentence of the answer."""

    name = "last-sentence"
    label = "last sentence"
    needs_sentences = True
    signed = False

    def weights(self, batch, pairs, scores):
        row, channel = pairs.index(batch.mask.device)
        units = batch.units[row]
        last = (units == units.amax(1, keepdim=True)) & batch.mask[row]
        share = torch.ones(len(pairs), dtype=torch.float64)
        known = torch.ones(len(pairs), dtype=torch.bool)
        return weigh(batch, pairs, [Signal(last.double(), share, known, threshold=False)])

    def rereading(self, atoms):
        return Rereading(0.0, "last sentences cost nothing")
'''
PATH = "their_rules:LastSentence"


@pytest.fixture(scope="module", autouse=True)
def outside(tmp_path_factory):
    """A folder that is no part of the package, with one file."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "their_rules.py").write_text(SOURCE)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield folder
    sys.path.remove(str(folder))


def config(**changes):
    return world_config(WORLDS["short"], **(SMALL | rule_settings(PATH) | changes))


def credited(mode: str, **options):
    """The credit of judged answers by a rule, with the numbers of a stand-in for a model."""
    examples, judged, answers = judged_answers(3)
    credit = TokenCredit(TOKENIZER, CreditConfig(mode=mode, **options), ENCODE)
    request = credit.requests(examples, judged, answers)
    rows = zip(request.prompts, request.responses, strict=True)
    credit.assign(request, [log_probabilities(*row) for row in rows])
    return credit, request


def test_token_credit_places_by_it():
    credit, request = credited(PATH)
    uniform = credit.last.sequence
    detail = credit.last.pairs
    assert len(request) == 0 and credit.last.stats["localized"] > 3
    units = request.batch.units
    moved = 0
    for row in {*detail.row[detail.strength > 0].tolist()}:
        last = units[row] == units[row].max()
        before = ~last & request.mask[row]
        if not before.any():
            continue
        advantages = credit.last.advantages[row]
        moved += bool(((advantages - uniform[row])[request.mask[row]].abs() > 1e-5).any())
        for same_tokens in (last, before):
            assert (advantages[same_tokens] - advantages[same_tokens][0]).abs().max() < 1e-5
        size = request.mask[row].sum()
        assert advantages.sum() / size == pytest.approx(uniform[row].item(), abs=1e-5)
    assert moved >= 2


def test_the_loop_for_small_policies_trains_by_it():
    model, tokenizer = load_policy("cold-short")
    loop = CreditLoop(model, tokenizer, config(draws="row"), EXAMPLES[:4], exact_judge)
    loop.step()
    assert loop.token_credit.last.stats["localized"] > 0


def test_a_grid_compares_it():
    run = GridRun(rule=PATH, lr=1e-3, seed=1, world="short", steps=1, tests=4, generations=4)
    assert train_one(run).scores["SCS"] is not None
    plan = GridPlan(
        plain=dict(world="short", steps=1, tests=4, generations=4),
        stages={"rules": GridStage(rules=("gdpo", PATH), lr=(1e-3,), seeds=(1,))},
    )
    rows = [train_one(run) for run in plan.runs("rules")]
    assert set(grid_frame(plan, rows)["label"]) == {"GDPO", "last sentence"}
    with pytest.raises(ValueError, match="no_such_module"):
        GridRun(rule="no_such_module:Rule", lr=1e-3, seed=1)


def test_the_forecast_counts_what_it_reads():
    recipe = load_recipe("micro", [f"train.mode={PATH}"])
    plan = training_forecast(recipe, "memcalib-rl")
    assert plan.work["tokens read by counterfactuals"] == 0
    assert "last sentences cost nothing" in plan.assumptions and not plan.refused


def test_the_trainer_trains_by_it_and_the_viewer_shows_it(tmp_path):
    chosen = config(steps=1, trace_every=1)
    train(policy(), chosen, EXAMPLES[:4], exact_judge, tokenizer=TOKENIZER, out=tmp_path)
    frame = read_traces(tmp_path)
    assert set(frame["mode"]) == {PATH} and frame["localized"].dropna().any()
    trace = next(
        trace for trace in (trace_of(frame, 1, row) for row in range(8)) if trace["channels"]
    )
    [panel] = answer_view(trace, [next(iter(trace["channels"]))], "d")["panels"]
    assert panel["low"] == "signal 0" and not panel["signed"]
    assert PATH in write_trace_page(tmp_path).read_text(encoding="utf-8")


class TwoSided(CounterfactualRule):
    """The paper's signals, for every pair with an advantage."""

    def opens(self, batch):
        return batch.advantages != 0


TWO_SIDED = TwoSided("two-sided", ORDERED.signals)


class Shuffled(CounterfactualRule):
    """The paper's weights, in another order within each answer."""

    def weights(self, batch, pairs, scores):
        placed = super().weights(batch, pairs, scores)
        weights = placed.weights.clone()
        for k, row in enumerate(pairs.rows):
            tokens = batch.mask[row].nonzero()[:, 0]
            weights[:, k, tokens] = placed.weights[:, k, tokens.flip(0)]
        return replace(placed, weights=weights)


SHUFFLED = Shuffled("shuffled", ORDERED.signals)


class Bare(CounterfactualRule):
    """Hands back the weights alone."""

    def weights(self, batch, pairs, scores):
        return super().weights(batch, pairs, scores).weights


BARE = Bare("bare", ORDERED.signals)


def test_weights_of_another_type_are_refused_by_name():
    with pytest.raises(ValueError, match="rule 'bare': its weights are of type Tensor; allowed"):
        credited(f"{__name__}:BARE")


@pytest.mark.parametrize("pool", ["all", "open"])
def test_a_rule_decides_where_a_pair_may_be_moved(pool):
    """One method, asked for what is read and for what is moved."""
    paper, read_by_paper = credited("ordered", threshold_pool=pool)
    both, read_by_both = credited(f"{__name__}:TWO_SIDED", threshold_pool=pool)
    reasons = {
        name: credit.last.stats["fallback_closed"]
        for name, credit in (("paper", paper), ("both", both))
    }
    assert both.last.stats["localized"] > paper.last.stats["localized"]
    constant = both.last.channels[both.last.pairs.row, both.last.pairs.channel] == 0
    assert torch.equal(both.last.pairs.opened, ~constant)
    if pool == "open":
        assert len(read_by_both.pairs) > len(read_by_paper.pairs) and not any(reasons.values())
    else:
        assert reasons["paper"] > reasons["both"]


def test_a_rule_made_of_another_moves_its_weights():
    paper, _ = credited("ordered")
    other, request = credited(f"{__name__}:SHUFFLED")
    row = int(paper.last.pairs.row[0])
    size = int(request.mask[row].sum())
    first = paper.last.pairs.m[0, :size]
    assert torch.allclose(other.last.pairs.m[0, :size], first.flip(0), atol=1e-9)
    assert torch.equal(other.last.sequence, paper.last.sequence)


class Bad(CreditRule):
    """The weights of a good rule, spoilt in one way."""

    name = "bad"
    reads = LOG_PROBABILITIES

    def __init__(self, spoil):
        self.spoil = spoil

    def weights(self, batch, pairs, scores):
        row, _ = pairs.index()
        signal = torch.where(batch.mask[row], -batch.full[row], 0).double()
        ones = torch.ones(len(pairs), dtype=torch.float64)
        placed = weigh(batch, pairs, [Signal(signal, ones, ones > 0)])
        return self.spoil(placed)


def put(placed: ChannelWeights, value: float, token: int) -> ChannelWeights:
    weights = placed.weights.clone()
    weights[0, 2, token] = value
    return replace(placed, weights=weights)


SPOILT = {
    "NAN": (lambda placed: put(placed, torch.nan, 0), r"row \d+, token 0: found nan"),
    "NEGATIVE": (lambda placed: put(placed, -1.0, 0), r"row \d+, token 0: found -1; .*at least 0"),
    "OUTSIDE": (lambda placed: put(placed, 1.0, -1), r"row \d+, token \d+: .*outside the answer"),
    "TOO_SHORT": (
        lambda placed: replace(placed, weights=placed.weights[..., :-1]),
        r"weights of shape \(1, \d+, \d+\).* \(1, \d+, \d+\)",
    ),
    "FLAT": (lambda placed: replace(placed, weights=placed.weights[0]), "part, pair, token"),
    "FEWER": (
        lambda placed: replace(placed, above_gate=placed.above_gate[1:]),
        r"above_gate of shape \(\d+,\).* must be",
    ),
    "SHARE": (
        lambda placed: replace(placed, shares=-placed.shares),
        r"row \d+: found -1; .*shares in \[0, 1\]",
    ),
    "SHARES": (
        lambda placed: replace(
            placed,
            weights=placed.weights.repeat(2, 1, 1),
            shares=placed.shares.repeat(2, 1),
            pool=placed.pool.repeat(2, 1, 1),
            pooled=placed.pooled.repeat(2, 1),
        ),
        r"row \d+: found 2; .*with a sum of at most 1",
    ),
    "OWN": (lambda placed: OwnAdvantages(placed.signal, 0.5), "keeps_means False"),
}
globals().update({name: Bad(spoil) for name, (spoil, _) in SPOILT.items()})
GOOD = Bad(lambda placed: placed)


@pytest.mark.parametrize("fault", SPOILT)
def test_weights_at_fault_are_refused_with_the_rules_name_and_the_row(fault):
    credited(f"{__name__}:GOOD")
    with pytest.raises(ValueError, match=f"^step 1, rule 'bad'.*{SPOILT[fault][1]}"):
        credited(f"{__name__}:{fault}")


class Asking(CreditRule):
    """Asks for prompts and reads nothing."""

    name = "asking"

    def pairs(self, batch):
        pairs = super().pairs(batch)
        return replace(pairs, prompts=[[1] for _ in pairs.rows])


class Unscored(CreditRule):
    """Places an answer without a score."""

    name = "unscored"

    def pairs(self, batch):
        return Pairs([5], [1], [("a",)], [[]])


class Silent(CreditRule):
    """Has no weights."""

    name = "silent"


class Own(CreditRule):
    """Advantages of its own, some of them outside the answers."""

    name = "own"
    keeps_means = False

    def weights(self, batch, pairs, scores):
        return OwnAdvantages(torch.ones(batch.mask.shape), 0.5)


class Inflated(CreditRule):
    """Strengths beyond 1 change no mean, whatever is multiplied;
    a strength that is no number does.
    """

    name = "inflated"

    def weights(self, batch, pairs, scores):
        first = torch.zeros(len(pairs), batch.mask.shape[1], dtype=torch.float64)
        first[:, 0] = 1.0
        ones = torch.ones(len(pairs), dtype=torch.float64)
        return weigh(batch, pairs, [Signal(first, ones, ones > 0, threshold=False)])

    def strengths(self, config):
        return torch.full((9,), torch.nan, dtype=torch.float64)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("Asking", r"rule 'asking', row 0: found a pair with a prompt, but the rule reads"),
        ("Unscored", "rule 'unscored', row 5: found a pair from an unscored answer"),
        ("Own", r"rule 'own', row \d, token \d+: found 1; .*0 outside the answer"),
        ("Inflated", r"rule 'inflated', row \d: the mean of the tokens' advantages is nan"),
    ],
)
def test_what_a_rule_must_not_do_is_refused(rule, message):
    with pytest.raises(ValueError, match=f"^step 1, {message}"):
        credited(f"{__name__}:{rule}")


def test_a_rule_without_weights_says_so():
    with pytest.raises(NotImplementedError, match="step 1, rule 'silent' has no method weights"):
        credited(f"{__name__}:Silent")


class Late(CreditRule):
    """Right in the first batch; in the second its weights are no numbers, or it fails itself."""

    name = "late"
    calls = 0
    value = torch.nan

    def weights(self, batch, pairs, scores):
        self.calls += 1
        if self.calls > 1 and self.value is None:
            raise KeyError("colour")
        even = batch.mask[pairs.index()[0]].double()
        ones = torch.ones(len(pairs), dtype=torch.float64)
        placed = weigh(batch, pairs, [Signal(even, ones, ones > 0, threshold=False)])
        if self.calls > 1:
            placed = replace(placed, weights=placed.weights * self.value)
        return placed


class LateNoKey(Late):
    """Fails itself in the second batch."""

    value = None


LATE = Late()
LATE_LOOP = Late()
LATE_NO_KEY = LateNoKey()


def test_a_fault_of_a_later_step_names_it_in_the_trainer(tmp_path):
    settings = world_config(
        WORLDS["short"], **(SMALL | rule_settings(f"{__name__}:LATE")), steps=3, draws="row"
    )
    message = r"step 2, rule 'late', row \d+, token 0: found nan; allowed: finite weights"
    with pytest.raises(ValueError, match=message):
        train(policy(), settings, EXAMPLES[:4], exact_judge, tokenizer=TOKENIZER, out=tmp_path)


def test_a_fault_of_a_later_step_names_it_in_the_loop():
    settings = world_config(
        WORLDS["short"], **(SMALL | rule_settings(f"{__name__}:LATE_LOOP")), draws="row"
    )
    model, tokenizer = load_policy("cold-short")
    loop = CreditLoop(model, tokenizer, settings, EXAMPLES[:4], exact_judge)
    loop.step()
    with pytest.raises(ValueError, match=r"step 2, rule 'late', row \d+"):
        loop.step()
    assert loop.token_credit.step == 2


def test_an_error_of_the_rules_own_has_the_step_in_a_note():
    settings = world_config(
        WORLDS["short"], **(SMALL | rule_settings(f"{__name__}:LATE_NO_KEY")), draws="row"
    )
    model, tokenizer = load_policy("cold-short")
    loop = CreditLoop(model, tokenizer, settings, EXAMPLES[:4], exact_judge)
    loop.step()
    with pytest.raises(KeyError) as raised:
        loop.step()
    assert raised.value.__notes__ == ["rule 'late', step 2"]


NOT_A_RULE = 3.0


def test_what_is_no_rule_is_refused_when_the_settings_are_made():
    for mode, message in (
        (f"{__name__}:NOT_A_RULE", "of type float; allowed: a CreditRule"),
        (f"{__name__}:put", "of type function"),
        (f"{__name__}:Bad", r"Bad\(\) raises TypeError"),
        ("gdpo", "allowed: ordered, absolute"),
    ):
        with pytest.raises(ValueError, match=message):
            CreditConfig(mode=mode)
    assert credit_rule(PATH).label == "last sentence"


AMBIGUOUS = {"absolute", "exact"}  # the former is a value of `under_use` too, the latter a judge


def compared_names(source: str) -> set[str]:
    """Names of modes with which some code compares something;
    ambiguous ones where the comparison is about a mode or a rule.
    """
    modes = {name for name in rule_names() if name not in ("gdpo", "grpo")}
    names = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Compare | ast.match_case):
            continue
        texts = {
            constant.value for constant in ast.walk(node) if isinstance(constant, ast.Constant)
        } & modes
        compared = ast.unparse(node) if texts else ""
        if "mode" not in compared and "rule" not in compared:
            texts -= AMBIGUOUS
        names |= texts
    return names


def test_a_comparison_with_a_mode_is_found():
    assert compared_names("if config.mode == 'absolute': pass") == {"absolute"}
    assert compared_names("if kind in ('evidence', 'x'): pass") == {"evidence"}
    assert compared_names("if under_use == 'absolute': pass") == set()


def test_no_module_knows_a_rule_by_its_name():
    """Neither a comparison with the name of a mode, nor an import of a rule's module,
    outside the room of rules.
    """
    rules = rule_modules()
    ours = {PACKAGE.parent / f"{module.replace('.', '/')}.py" for module in rules}
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        if path in ours or path.name == "_modidx.py":
            continue
        source = path.read_text(encoding="utf-8")
        wrong += [(path.name, name) for name in compared_names(source)]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom):
                module = (node.module or "").removeprefix("memcalib.")
                if f"memcalib.{module}" in rules:
                    wrong.append((path.name, module))
    assert wrong == []


WITHOUT = ("evidence", "divergence", "contrast")
PROGRAM = """
import sys, torch
import memcalib
assert memcalib.__file__.startswith(sys.argv[1])
torch.set_num_threads(1)
import memcalib.report.credit_viewer, memcalib.products.reproduction.rule_grid
import memcalib.trainer.traces, memcalib.training
from memcalib.products.micro.loop import CreditLoop
from memcalib.products.micro.policy import load_policy
from memcalib.products.micro.world import WORLDS, exact_judge, make_examples
from memcalib.rules.base import CREDIT_RULES, CreditConfig, credit_rule
from memcalib.trainer.forecast import training_forecast
from memcalib.trainer.recipe import load_recipe
from memcalib.trainer.train_config import world_config
print(*CREDIT_RULES)
for rule in ("evidence-kl", "contrast"):
    try:
        CreditConfig(mode=rule)
    except ValueError as error:
        assert "allowed: ordered, absolute, positive_only, exact, or" in str(error), error
sizes = dict(prompts=2, generations=4, minibatches=1, max_tokens=40)
config = world_config(WORLDS["short"], **sizes, draws="row")
model, tokenizer = load_policy("cold-short")
loop = CreditLoop(model, tokenizer, config, make_examples("short", 4, 0), exact_judge)
loop.step()
assert loop.token_credit.last.stats["localized"] > 0
plan = training_forecast(load_recipe("micro"), "memcalib-rl")
assert plan.work["tokens read by counterfactuals"] > 0
"""


def test_a_rule_that_is_taken_away_is_missed_nowhere(tmp_path):
    """Three files less, and their lines in the registry: all that asks a rule still imports,
    trains and forecasts.
    """
    copy = tmp_path / "memcalib"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name in WITHOUT:
        (copy / "rules" / f"{name}.py").unlink()
    registry = copy / "rules" / "base.py"
    lines = registry.read_text(encoding="utf-8").splitlines(keepends=True)
    lines_left = [
        line for line in lines if not any(f"memcalib.rules.{name}:" in line for name in WITHOUT)
    ]
    assert len(lines) - len(lines_left) == 4  # evidence has two
    registry.write_text("".join(lines_left), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "ordered absolute positive_only grpo gdpo"
