"""Losses by hand, and on ragged random numbers against a plain loop in float64, with their gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlflow.batch import Minibatch
from rlflow.engines.causal_lm.totals import LossTotals
from rlflow.errors import RecipeError
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.policy_gates import DppoUpdate, SapoUpdate
from rlflow.nodes.policy_loss import Correction, LikelihoodLoss
from rlflow.nodes.policy_update import PolicyGradient, PolicyUpdate
from rlflow.nodes.policy_variants import CispoUpdate, GmpoUpdate, GspoUpdate, ReinforceUpdate
from tests.helpers import minibatch, sequences

LOSS = PolicyUpdate(clip_eps=0.2, kl_coef=0.5).loss(1.0)


def run(ratio: float, advantage: float, reference: float | None = None) -> tuple[float, float, dict[str, float]]:
    """Return loss, its derivative by the token's logprob, and metrics for one token whose old logprob is -1."""
    logprobs = torch.tensor([-1 + log(ratio)], dtype=torch.float64, requires_grad=True)
    columns = {"old_logprobs": torch.tensor([-1.0]), "advantages": torch.tensor([advantage])}
    if reference is not None:
        columns["reference"] = logprobs.detach() + reference
    loss, metrics = LOSS(logprobs, columns)
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    return float(loss.detach()), float(slope), {name: float(value.detach()) for name, value in metrics.items()}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, 0),
        (1.1, 2.0, -2.2, -2.2, 0),
        (1.5, 2.0, -2.4, 0.0, 1),  # clipped at 1.2
        (1.5, -2.0, 3.0, 3.0, 0),  # too likely and bad: not clipped
        (0.5, -2.0, 1.6, 0.0, 1),  # clipped at 0.8
        (0.5, 2.0, -1.0, -1.0, 0),
    ],
)
def test_clipping(ratio: float, advantage: float, loss: float, slope: float, clipped: int) -> None:
    value, derivative, metrics = run(ratio, advantage)
    assert value == pytest.approx(loss)
    assert derivative == pytest.approx(slope)
    assert metrics["clip_fraction"] == clipped


def test_kl_is_k3() -> None:
    value, _, metrics = run(1.0, 0.0, reference=-0.3)
    assert metrics["kl"] == pytest.approx(exp(-0.3) + 0.3 - 1)
    assert value == pytest.approx(0.5 * metrics["kl"])


def test_how_far_the_sampler_was_apart() -> None:
    """The difference is reported only if the ratio is not taken to the sampler's logprobs."""
    columns = {name: torch.tensor([value]) for name, value in (("old_logprobs", -1.0), ("advantages", 0.0))}
    _, metrics = LOSS(torch.tensor([-3.0]), columns | {"sampler_logprobs": torch.tensor([-1.25])})
    assert metrics["sampler_difference"].tolist() == [0.25]
    assert metrics["sampler_kl"].tolist() == pytest.approx([exp(0.25) - 1.25])
    assert "sampler_difference" not in LOSS(torch.tensor([-3.0]), columns)[1]


def test_an_engine_without_entropies_is_refused() -> None:
    columns = {"old_logprobs": torch.zeros(1), "advantages": torch.zeros(1)}
    with pytest.raises(RecipeError, match="entropy_coef: the engine does not compute entropies"):
        PolicyUpdate(entropy_coef=0.1).loss(1.0)(torch.zeros(1), columns)


@pytest.mark.parametrize(
    ("correction", "weights", "outside"),
    [
        # Ratios 4, 1/2, 1 and 1/8 of the tokens; 2 and 1/8 of the two responses.
        (Correction(max_ratio=2), [2, 0.5, 1, 0.125], [1, 0, 0, 0]),
        (Correction(max_ratio=5, min_ratio=0.5, outside="mask"), [4, 0.5, 1, 0], [0, 0, 0, 1]),
        (Correction(max_ratio=1.5, min_ratio=0.25, level="sequence"), [1.5, 1.5, 1.5, 0.25], [1, 1, 1, 1]),
        (Correction(max_ratio=1.5, level="sequence", outside="mask"), [0, 0, 0, 0.125], [1, 1, 1, 0]),
    ],
)
def test_correction(correction: Correction, weights: list[float], outside: list[float]) -> None:
    ours, metrics = correction(torch.tensor([4, 0.5, 1, 0.125]).log(), torch.tensor([0, 0, 0, 1]))
    assert ours.tolist() == pytest.approx(weights)
    assert metrics["correction"] is ours
    assert metrics["corrected_fraction"].tolist() == outside


def test_likelihood() -> None:
    logprobs = torch.tensor([-0.5, -2.0], requires_grad=True)
    losses, _ = LikelihoodLoss()(logprobs, {})
    assert losses.tolist() == [0.5, 2.0]
    (gradient,) = torch.autograd.grad((losses * torch.tensor([0.25, 0.75])).sum(), logprobs)
    assert gradient.tolist() == [-0.25, -0.75]


@dataclass(frozen=True)
class Token:
    """The values of one token, each a number in float64."""

    logprob: Tensor
    entropy: Tensor
    old: float
    sampler: float
    reference: float
    advantage: float


Response = list[Token]


def clip(value: Any, low: float, high: float) -> Any:
    return torch.minimum(torch.maximum(value, torch.tensor(low)), torch.tensor(high))


def plain_clipped(ratio: Tensor, advantage: float, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def plain_ppo(response: Response, at: int) -> Tensor:
    token = response[at]
    return plain_clipped(torch.exp(token.logprob - token.old), token.advantage, 0.2, 0.28)


def plain_gspo(response: Response, at: int) -> Tensor:
    mean = sum((token.logprob - token.old for token in response), torch.tensor(0.0)) / len(response)
    return plain_clipped(torch.exp(mean), response[at].advantage, 0.05, 0.07)


def plain_cispo(response: Response, at: int) -> Tensor:
    token = response[at]
    return -min(exp(float(token.logprob.detach()) - token.old), 1.1) * token.advantage * token.logprob


def plain_gspo_token(response: Response, at: int) -> Tensor:
    token = response[at]
    mean = sum(float(token.logprob.detach()) - token.old for token in response) / len(response)
    return plain_clipped(exp(mean) * torch.exp(token.logprob - token.logprob.detach()), token.advantage, 0.05, 0.07)


def plain_gmpo(response: Response, at: int) -> Tensor:
    terms = []
    for token in response:
        free = token.logprob - token.old
        is_outside = float(free.detach()) > 0.15 if token.advantage >= 0 else float(free.detach()) < -0.1
        terms.append(torch.tensor(0.15 if token.advantage >= 0 else -0.1) if is_outside else free)
    return -torch.exp(sum(terms, torch.tensor(0.0)) / len(terms)) * response[at].advantage


def plain_sapo(response: Response, at: int) -> Tensor:
    token = response[at]
    heat = 3.0 if token.advantage > 0 else 4.0
    return -4 / heat / (1 + torch.exp(-heat * (torch.exp(token.logprob - token.old) - 1))) * token.advantage


def plain_dppo(divergence: str, bound: float) -> Callable[[Response, int], Tensor]:
    def surrogate(response: Response, at: int) -> Tensor:
        token = response[at]
        p, old = exp(float(token.logprob.detach())), exp(token.old)
        coin = sum(a * log(a / b) for a, b in ((old, p), (1 - old, 1 - p)))
        if (abs(p - old) if divergence == "tv" else coin) > bound and (p > old) == (token.advantage > 0):
            return token.logprob * 0.0
        return -min(p / old, 1.1) * token.advantage * token.logprob

    return surrogate


def plain_reinforce(response: Response, at: int) -> Tensor:
    return -response[at].advantage * response[at].logprob


KL: Mapping[str, Callable[[Any], Any]] = {
    "k1": lambda d: d,
    "k2": lambda d: d**2 / 2,
    "k3": lambda d: torch.exp(-d) - 1 + d,
}


def plain_correction(correction: Correction | None, response: Response, at: int) -> float:
    if correction is None:
        return 1.0
    tokens = response if correction.level == "sequence" else [response[at]]
    ratio = exp(sum(token.old - token.sampler for token in tokens))
    within = min(max(ratio, correction.min_ratio), correction.max_ratio)
    return within if within == ratio or correction.outside == "bound" else 0.0


def plain_loss(node: PolicyGradient, surrogate: Callable[[Response, int], Tensor], batch: list[Response]) -> Tensor:
    total = torch.tensor(0.0, dtype=torch.float64)
    for number, response in enumerate(batch):
        for at, token in enumerate(response):
            group = batch[number // 4 * 4 :][:4]
            divisor = {
                "token": sum(map(len, batch)),
                "prompt": len(batch) / 4 * sum(map(len, group)),
                "sequence": len(batch) * len(response),
                "constant": len(batch) * (node.constant_length or 0),
            }[node.aggregation]
            loss = surrogate(response, at) * plain_correction(node.correction, response, at)
            if node.off_policy_mask is not None and token.advantage < 0:
                moved = sum(other.sampler - float(other.logprob.detach()) for other in response) / len(response)
                loss = loss * (moved <= node.off_policy_mask)
            kl = KL[node.kl_estimator](token.logprob - token.reference)
            if node.unbiased_kl:
                kl = kl * torch.exp(token.logprob - token.old)
            loss = loss + node.kl_coef * kl
            total = total + (loss - node.entropy_coef * token.entropy) / divisor
    return total


def random_minibatch(node: PolicyGradient) -> Minibatch:
    """Return a minibatch of 12 responses of 1 to 9 tokens."""
    given = sequences([2, 3, 1], [[4, 9, 1, 1], [2, 7, 7, 5], [6, 3, 3, 8]])
    draw = np.random.default_rng(0)
    size = len(given.response_ids.values)
    logprobs = draw.normal(-1.5, 0.5, size)
    near = {name: logprobs + draw.normal(0, 0.2, size) for name in ("old_logprobs", "sampler_logprobs", "reference")}
    more = {"logprobs": logprobs, "entropy": draw.random(size), "advantages": draw.normal(0, 1, size)}
    batch = minibatch(given, 0, **near, **more)
    lengths = given.response_ids.lengths
    weighting = Weighting(aggregation=node.aggregation, constant_length=node.constant_length)
    weights = weighting.weights(lengths, np.ones(len(lengths), np.bool_), given.keys[:, :2])
    return replace(batch, weights=weights)


WHOLE = {"kl_coef": 0.3, "entropy_coef": 0.2, "correction": Correction(max_ratio=1.2)}
PPO = PolicyUpdate(clip_eps_high=0.28)
GSPO = GspoUpdate(clip_eps=0.05, clip_eps_high=0.07, aggregation="sequence")
CISPO = CispoUpdate(clip_eps_high=0.1)
CASES: list[tuple[PolicyGradient, Callable[[Response, int], Tensor]]] = [
    (PPO, plain_ppo),
    (replace(PPO, **WHOLE), plain_ppo),  # type: ignore[arg-type]
    (replace(PPO, aggregation="sequence"), plain_ppo),
    (replace(PPO, aggregation="constant", constant_length=20), plain_ppo),
    (GSPO, plain_gspo),
    (replace(GSPO, aggregation="token", **WHOLE), plain_gspo),  # type: ignore[arg-type]
    (replace(PPO, aggregation="prompt"), plain_ppo),
    (replace(PPO, kl_coef=0.3, unbiased_kl=True), plain_ppo),
    (replace(PPO, kl_coef=0.3, kl_estimator="k1", unbiased_kl=True), plain_ppo),
    (replace(PPO, off_policy_mask=0.05), plain_ppo),
    (replace(GSPO, per_token=True), plain_gspo_token),
    (GmpoUpdate(clip_eps=0.1, clip_eps_high=0.15), plain_gmpo),
    (SapoUpdate(temperature_positive=3.0, temperature_negative=4.0), plain_sapo),
    (DppoUpdate(max_divergence=0.05, max_ratio=1.1), plain_dppo("tv", 0.05)),
    (DppoUpdate(divergence="kl", max_divergence=0.01, max_ratio=1.1), plain_dppo("kl", 0.01)),
    (CISPO, plain_cispo),
    (replace(CISPO, aggregation="sequence", **WHOLE), plain_cispo),  # type: ignore[arg-type]
    (ReinforceUpdate(), plain_reinforce),
    (ReinforceUpdate(kl_coef=0.3, kl_estimator="k1"), plain_reinforce),
    (ReinforceUpdate(kl_coef=0.3, kl_estimator="k2"), plain_reinforce),
    (ReinforceUpdate(entropy_coef=0.5, aggregation="constant", constant_length=7), plain_reinforce),
    (replace(PPO, correction=Correction(max_ratio=1.2, outside="mask", min_ratio=0.9)), plain_ppo),
    (replace(PPO, correction=Correction(level="sequence", max_ratio=1.3)), plain_ppo),
    (
        GspoUpdate(clip_eps=0.05, clip_eps_high=0.07, correction=Correction(level="sequence", outside="mask")),
        plain_gspo,
    ),
]


@pytest.mark.parametrize(("node", "surrogate"), CASES)
def test_a_plain_loop_gives_the_same(node: PolicyGradient, surrogate: Callable[[Response, int], Tensor]) -> None:
    batch = random_minibatch(node)
    columns = dict(batch.columns)
    logprobs, entropy = (
        torch.from_numpy(columns.pop(name).values).requires_grad_() for name in ("logprobs", "entropy")
    )
    totals = LossTotals(node.loss(1.0), torch.device("cpu"), "actor")
    ours = totals.add(replace(batch, columns=columns), logprobs, {"entropy": entropy})

    names = ("old_logprobs", "sampler_logprobs", "reference", "advantages")
    exactly = [x.detach().double().requires_grad_() for x in (logprobs, entropy)]
    responses, at = [], 0
    for length in batch.response_ids.lengths:
        places = range(at, at + length)
        known = [[float(columns[name].values[place]) for name in names] for place in places]
        responses.append([Token(exactly[0][p], exactly[1][p], *k) for p, k in zip(places, known, strict=True)])
        at += length
    theirs = plain_loss(node, surrogate, responses)

    assert float(ours.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    gradients = torch.autograd.grad(ours, [logprobs, entropy], materialize_grads=True)
    for mine, other in zip(gradients, torch.autograd.grad(theirs, exactly), strict=True):
        assert mine.double().numpy() == pytest.approx(other.numpy(), abs=1e-6)
    assert gradients[0].abs().max() > 1e-3


def test_the_cases_clip() -> None:
    """Else they would say less than they seem to."""
    for node, _ in CASES:
        if isinstance(node, ReinforceUpdate | SapoUpdate):
            continue
        batch = random_minibatch(node)
        columns = dict(batch.columns)
        totals = LossTotals(node.loss(1.0), torch.device("cpu"), "actor")
        totals.add(batch, torch.from_numpy(columns["logprobs"].values), {})
        assert 0.02 < totals.sums["clip_fraction"] / totals.sums["weight"] < 0.9
        if node.correction is not None:
            assert 0.02 < totals.sums["corrected_fraction"] / totals.sums["weight"] < 0.9
