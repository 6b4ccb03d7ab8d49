"""One minibatch, cut in many ways: its gradient is the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rlflow.batch import Metrics, Minibatch
from rlflow.engines.base import EngineSpec
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.nodes.distillation import DivergenceLoss
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.policy_loss import Correction, LikelihoodLoss
from rlflow.nodes.policy_update import PolicyGradient, PolicyUpdate
from rlflow.nodes.policy_variants import GspoUpdate
from rlflow.recipe import Optimizer
from rlflow.resources.layout import Layout
from rlflow.runtime.objects.sharding import divide_rows
from tests.helpers import minibatch, sequences, spec
from tests.integration.engine_process import EngineProcess, all_of, free_address
from tests.integration.test_deepspeed import share_everything

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

# Nodes in whose losses tokens have nothing to do with each other, or all of their response.
PPO = PolicyUpdate(clip_eps=0.2, kl_coef=0.1)
GSPO = GspoUpdate(
    clip_eps=0.2,
    clip_eps_high=0.3,
    aggregation="sequence",
    entropy_coef=0.1,
    correction=Correction(level="sequence", max_ratio=1.2),
)
DISTILL = DivergenceLoss(beta=0.3, temperature=0.9)
# The difference of the weights before and after is the gradient, but for this factor: large, so that their own rounding
# counts little.
STEP = 16.0
# The rounding error of a gradient, from that of weights of about one.
ROUNDING = 1e-7 / STEP
GIVEN = sequences([3, 6, 2, 9], [[4, 9, 1], [2, 7, 7, 5], [5], [12, 3, 3]])
BACKWARDS = np.arange(len(GIVEN))[::-1]
# No two neighbours have one prompt.
SCATTERED = np.array([3, 0, 8, 4, 1, 9, 5, 7, 10, 2, 6])

Gradients = dict[str, NDArray[np.float64]]


def batch(node: PolicyGradient | DivergenceLoss = PPO) -> Minibatch:
    if isinstance(node, DivergenceLoss):
        # A cold teacher, which a policy with random weights is far from.
        teacher = TransformersEngine(replace(spec(), seed=5)).top_logprobs(GIVEN, 0.02, 4).values
        given = minibatch(GIVEN, 0)
        return replace(given, columns={**given.columns, "teacher": teacher})
    draw = np.random.default_rng(0)
    size, lengths = len(GIVEN.response_ids.values), GIVEN.response_ids.lengths
    old, reference = draw.normal(-2.5, 0.2, (2, size))
    columns = {"old_logprobs": old, "reference": reference, "advantages": draw.normal(0, 1, size)}
    columns["sampler_logprobs"] = old + draw.normal(0, 0.1, size)
    weights = Weighting(aggregation=node.aggregation).weights(
        lengths, np.ones(len(lengths), np.bool_), GIVEN.keys[:, :2]
    )
    return replace(minibatch(GIVEN, 0, **columns), weights=weights)


def evenly(given: Minibatch) -> list[Minibatch]:
    return [given.take(rows) for rows in divide_rows(given, 2)]


def ten_and_one(given: Minibatch) -> list[Minibatch]:
    """Give the second rank fewer rows than there are passes, so that it repeats its row."""
    return [given.take(np.arange(10)), given.take(np.array([10]))]


def all_and_none(given: Minibatch) -> list[Minibatch]:
    """Return the minibatch, and one with weight zero as for a rank without rows."""
    idle = given.take(np.array([0]))
    return [given, replace(idle, weights=idle.weights.like(np.zeros_like(idle.weights.values)))]


@dataclass(frozen=True, eq=False)
class Cut:
    tokens: int
    """The most tokens of a micro-batch."""
    stage: int | None = None
    """The ZeRO stage on two ranks; None for the plain engine."""
    split: Callable[[Minibatch], list[Minibatch]] | None = None
    """None: the ranks share each sequence."""
    order: NDArray[np.int64] | None = None

    def __str__(self) -> str:
        engine = "plain" if self.stage is None else f"zero{self.stage}"
        split = "sequences shared" if self.split is None else self.split.__name__
        order = {id(None): "", id(BACKWARDS): "-backwards", id(SCATTERED): "-scattered"}[id(self.order)]
        return f"{engine}-{split}-{self.tokens}{order}"


ON_ONE_RANK = [
    Cut(90),
    Cut(22),
    Cut(1),
    Cut(4096, order=BACKWARDS),
    Cut(40, order=SCATTERED),
]
ON_TWO_RANKS = [
    Cut(4096),
    Cut(40),
    Cut(22, 0, ten_and_one),
    Cut(40, 1, evenly, BACKWARDS),
    Cut(40, 2, all_and_none),
    Cut(40, 3, evenly, SCATTERED),
    Cut(22, 3, ten_and_one),
    Cut(1, 3, all_and_none),
    Cut(22, 3, order=SCATTERED),
]


def spec_of(stage: int | None, sequence_parallel_size: int, rank: int = 0, ranks: int = 1, address: str = "") -> Any:
    layout = Layout(
        micro_batch_tokens=4096,
        zero_stage=stage,
        data_parallel_size=ranks // sequence_parallel_size,
        sequence_parallel_size=sequence_parallel_size,
    )
    of = spec(capabilities=["Trains", "Scores"], optimizer=Optimizer(learning_rate=STEP, max_grad_norm=1e9))
    return replace(of, layout=layout, rank=rank, world_size=ranks, address=address)


def returning(parameters: Any) -> Any:
    """Return an optimizer of plain steps, in which each second step takes back the one before."""
    import torch

    class Returning(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for weight in [weight for group in self.param_groups for weight in group["params"]]:
                if "before" in self.state[weight]:
                    weight.copy_(self.state[weight].pop("before"))
                elif weight.grad is not None:
                    self.state[weight]["before"] = weight.clone()
                    weight.sub_(STEP * weight.grad)

    return Returning(parameters, {"lr": STEP})


def plain(of: EngineSpec) -> TorchEngine:
    engine = TorchEngine(of)
    engine._optimizer = returning(engine._model.parameters())
    return engine


def build(engines: list[Any], of: EngineSpec) -> int:
    """Build an engine in the child process."""
    from rlflow.engines.deepspeed import DeepSpeedEngine

    class Engine(DeepSpeedEngine):
        def _build_optimizer(self, weights: Any) -> Any:
            return returning(weights.values())

    share_everything()
    engines.append(plain(of) if of.layout.zero_stage is None else Engine(of))
    return len(engines) - 1


def gradients(
    engines: list[Any], place: int, given: Minibatch, tokens: int, node: PolicyGradient | DivergenceLoss = PPO
) -> tuple[Gradients, Metrics]:
    """Return the gradient of each weight and the metrics of an update, and restore the engine."""
    engine = engines[place]
    engine._spec = replace(engine._spec, layout=replace(engine._spec.layout, micro_batch_tokens=tokens))

    def weights() -> Gradients:
        return {name: weight.numpy().astype(np.float64) for name, weight in engine.weights()}

    before = weights()
    metrics = engine.update(given, node if isinstance(node, DivergenceLoss) else node.loss(0.9))
    after = weights()
    engine.update(given, LikelihoodLoss())
    assert all((weight == before[name]).all() for name, weight in weights().items())
    return {name: (before[name] - weight) / STEP for name, weight in after.items()}, metrics


@cache
def in_one_pass(node: PolicyGradient | DivergenceLoss) -> tuple[Gradients, Metrics]:
    return gradients([plain(spec_of(None, 1))], 0, batch(node), 4096, node)


@pytest.fixture(scope="module")
def expected() -> tuple[Gradients, Metrics]:
    """Return the gradients of the whole minibatch in one pass."""
    return in_one_pass(PPO)


@pytest.fixture(scope="module")
def places(two: Sequence[EngineProcess]) -> Callable[[int | None, int], list[int]]:
    """Return a function that builds an engine in each process, and returns its places there."""
    address = free_address()

    @cache
    def built(stage: int | None, size: int) -> list[int]:
        return all_of(two, build, [spec_of(stage, size, rank, 2, address) for rank in range(2)])

    return built


def compare(ours: tuple[Gradients, Metrics], expected: tuple[Gradients, Metrics]) -> None:
    (gradient, metrics), (right, said) = ours, expected
    assert gradient.keys() == right.keys()
    for name, values in right.items():
        largest = np.abs(values).max()
        assert largest > 1e-5, "a gradient of nothing proves nothing"
        assert np.abs(gradient[name] - values).max() <= 1e-5 * largest + ROUNDING, name
    assert metrics.values == pytest.approx(said.values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("cut", ON_ONE_RANK, ids=str)
def test_on_one_rank(cut: Cut, expected: tuple[Gradients, Metrics]) -> None:
    given = batch() if cut.order is None else batch().take(cut.order)
    compare(gradients([plain(spec_of(None, 1))], 0, given, cut.tokens), expected)


@pytest.mark.parametrize("cut", ON_TWO_RANKS, ids=str)
def test_on_two_ranks(
    cut: Cut,
    two: Sequence[EngineProcess],
    places: Callable[[int | None, int], list[int]],
    expected: tuple[Gradients, Metrics],
) -> None:
    given = batch() if cut.order is None else batch().take(cut.order)
    parts = [given] * 2 if cut.split is None else cut.split(given)
    engine = places(cut.stage, 2 if cut.split is None else 1)
    for ours in all_of(two, gradients, engine, parts, [cut.tokens] * 2):
        compare(ours, expected)


@pytest.mark.parametrize("cut", [Cut(40), Cut(22, order=SCATTERED), Cut(1)], ids=str)
def test_sums_over_responses_on_one_rank(cut: Cut) -> None:
    given = batch(GSPO) if cut.order is None else batch(GSPO).take(cut.order)
    compare(gradients([plain(spec_of(None, 1))], 0, given, cut.tokens, GSPO), in_one_pass(GSPO))


@pytest.mark.parametrize(
    "cut",
    [Cut(22), Cut(40, 1, evenly, BACKWARDS), Cut(1, 3, all_and_none), Cut(40, 3)],
    ids=str,
)
def test_sums_over_responses_on_two_ranks(
    cut: Cut, two: Sequence[EngineProcess], places: Callable[[int | None, int], list[int]]
) -> None:
    """Two of which share each sequence, where there is no other split: neither has all tokens of a response."""
    given = batch(GSPO) if cut.order is None else batch(GSPO).take(cut.order)
    parts = [given] * 2 if cut.split is None else cut.split(given)
    engine = places(cut.stage, 2 if cut.split is None else 1)
    for ours in all_of(two, gradients, engine, parts, [cut.tokens] * 2, [GSPO] * 2):
        compare(ours, in_one_pass(GSPO))


@pytest.mark.parametrize("cut", [Cut(40), Cut(22, order=SCATTERED), Cut(1)], ids=str)
def test_words_of_a_teacher_on_one_rank(cut: Cut) -> None:
    given = batch(DISTILL) if cut.order is None else batch(DISTILL).take(cut.order)
    compare(gradients([plain(spec_of(None, 1))], 0, given, cut.tokens, DISTILL), in_one_pass(DISTILL))


@pytest.mark.parametrize(
    "cut", [Cut(22), Cut(40, 1, evenly, BACKWARDS), Cut(1, 3, all_and_none), Cut(40, 3, order=SCATTERED)], ids=str
)
def test_words_of_a_teacher_on_two_ranks(
    cut: Cut, two: Sequence[EngineProcess], places: Callable[[int | None, int], list[int]]
) -> None:
    given = batch(DISTILL) if cut.order is None else batch(DISTILL).take(cut.order)
    parts = [given] * 2 if cut.split is None else cut.split(given)
    engine = places(cut.stage, 2 if cut.split is None else 1)
    for ours in all_of(two, gradients, engine, parts, [cut.tokens] * 2, [DISTILL] * 2):
        compare(ours, in_one_pass(DISTILL))
