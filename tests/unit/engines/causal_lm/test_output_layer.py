"""Logprobs in chunks against those from whole logits."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from rlflow.engines.base import Entropy
from rlflow.engines.causal_lm import output_layer as head
from rlflow.engines.causal_lm.output_layer import find_top_words, score_targets, scores_as_logits
from rlflow.errors import EngineError

T, H, V = 37, 16, 101


def inputs(*, bias: bool, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(0)
    hidden, weight, shifts = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((T, H), (V, H), (V,)))
    return hidden.requires_grad_(), (weight / 4).requires_grad_(), shifts.requires_grad_() if bias else None


TARGETS = torch.randint(V, (T,), generator=torch.Generator().manual_seed(2))


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, entropy: Entropy
) -> Tensor:
    logits = linear(hidden, weight, bias)
    scores = ((logits if logits.dtype == torch.float64 else logits.float()) / temperature).log_softmax(-1)
    entropies = -(scores.exp() * scores.clamp(min=torch.finfo(scores.dtype).min)).sum(-1)
    return torch.stack([scores.gather(1, targets[:, None])[:, 0], entropies], 1)


def gradients(values: Tensor, *of: Tensor | None, entropy: float = 0.3) -> list[Tensor]:
    """Return gradients of logprobs, and of entropies with the weight ``entropy``."""
    weights = torch.randn(T, 2, generator=torch.Generator().manual_seed(1)) * torch.tensor([1.0, entropy])
    return list(torch.autograd.grad((values * weights).sum(), [x for x in of if x is not None]))


# One chunk; parts of the vocabulary; parts of both.
@pytest.mark.parametrize("at_once", [2**20, T * 25, 130, pytest.param(7, marks=pytest.mark.slow)])
def test_chunks_are_the_whole(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", at_once)
    for temperature, bias, entropy in product((1.0, 0.7), (False, True), (0.0, 0.3)):
        case = f"temperature {temperature}, bias {bias}, entropy {entropy}"
        given = inputs(bias=bias)
        exactly: Any = [None if x is None else x.detach().double().requires_grad_() for x in given]
        ours = score_targets(*given, TARGETS, temperature, "trained")
        theirs = plain(exactly[0], exactly[1], exactly[2], TARGETS, temperature, "trained")
        assert torch.allclose(ours.double(), theirs, rtol=1e-6, atol=1e-6), case
        for one, other in zip(
            gradients(ours, *given, entropy=entropy), gradients(theirs, *exactly, entropy=entropy), strict=True
        ):
            assert torch.allclose(one.double(), other, rtol=2e-6, atol=2e-6), case


@pytest.mark.parametrize("at_once", [2**20, 130])
def test_several_targets_of_a_token(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """One of them is the same word as the first."""
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", at_once)
    given, exactly = (
        inputs(bias=True),
        [x.detach().double().requires_grad_() for x in inputs(bias=True) if x is not None],
    )
    more = torch.stack([TARGETS, (TARGETS + 1) % V, TARGETS.flip(0), TARGETS], 1)
    ours = score_targets(*given, more, 0.7, "trained")
    theirs = [plain(exactly[0], exactly[1], exactly[2], more[:, column], 0.7, "trained") for column in range(4)]
    columns = [theirs[0], *(scores[:, :1] for scores in theirs[1:])]
    expected, weights = torch.cat(columns, 1), torch.randn(T, 5, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(ours.double(), expected, rtol=1e-6, atol=1e-6)
    assert ours[:, :2].equal(score_targets(*given, TARGETS, 0.7, "trained"))
    for one, other in zip(
        torch.autograd.grad((ours * weights).sum(), [x for x in given if x is not None]),
        torch.autograd.grad((expected * weights).sum(), exactly),
        strict=True,
    ):
        assert torch.allclose(one.double(), other, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("at_once", [2**20, 130])
@pytest.mark.parametrize("count", [1, 5, 200])
def test_the_likeliest_words(monkeypatch: pytest.MonkeyPatch, at_once: int, count: int) -> None:
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", at_once)
    hidden, weight, bias = inputs(bias=True)
    found = find_top_words(hidden.detach(), weight.detach(), bias, count, 0, 0.7)
    values, words = (linear(hidden, weight, bias) / 0.7).log_softmax(-1).topk(min(count, V))
    assert found.shape == (T, 2 * min(count, V))
    assert found[:, : words.shape[1]].long().equal(words)
    assert torch.allclose(found[:, words.shape[1] :], values, rtol=1e-6, atol=1e-5)


def test_large_logits_of_either_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", 130)
    hidden, weight, _ = inputs(bias=False)
    for shift in (-300.0, 300.0):
        bias = torch.full((V,), shift)
        ours, theirs = (function(hidden, weight, bias, TARGETS, 1.0, "reported") for function in (score_targets, plain))
        assert torch.allclose(ours, theirs, rtol=0, atol=3e-4)
        assert (ours[:, 0] <= 0).all()


@pytest.mark.parametrize("at_once", [2**20, 130])
def test_impossible_tokens_do_not_count(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """A vocabulary may be larger than the tokenizer's, with the other tokens forbidden."""
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", at_once)
    hidden, weight, _ = inputs(bias=False)
    bias = torch.zeros(V)
    bias[:50] = -torch.inf
    targets = TARGETS.clamp(min=50)
    ours = score_targets(hidden, weight, bias, targets, 0.7, "trained")
    theirs = plain(hidden, weight[50:], bias[50:], targets - 50, 0.7, "trained")
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    for one, other in zip(gradients(ours, hidden, weight), gradients(theirs, hidden, weight), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5)


def test_bfloat16_rounds_logits_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CPU_LOGITS_AT_ONCE", 130)
    given = inputs(bias=True, dtype=torch.bfloat16)
    ours, theirs = (function(*given, TARGETS, 0.9, "trained") for function in (score_targets, plain))
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-5)
    for one, other, of in zip(gradients(ours, *given), gradients(theirs, *given), given, strict=True):
        assert of is not None
        assert one.dtype == of.dtype
        assert float((one - other).float().norm()) <= 0.01 * float(other.float().norm())


def test_entropies_are_computed_and_differentiated_only_on_request() -> None:
    given = inputs(bias=False)
    trained, reported, unused = (score_targets(*given, TARGETS, 1.0, use) for use in ("trained", "reported", "unused"))
    assert reported.equal(trained)
    assert unused[:, 0].equal(trained[:, 0])
    assert not unused[:, 1].any()
    with_entropy, without = gradients(trained, given[1], entropy=0.0), gradients(reported, given[1], entropy=0.3)
    assert torch.allclose(with_entropy[0], without[0], atol=1e-6)


def test_no_tokens_have_gradients_of_nought() -> None:
    hidden, weight, bias = inputs(bias=True)
    assert bias is not None
    values = score_targets(hidden[:0], weight, bias, TARGETS[:0], 1.0, "trained")
    assert values.shape == (0, 2)
    for gradient in torch.autograd.grad(values.sum(), [weight, bias]):
        assert not gradient.any()


def test_a_layer_that_is_not_linear_is_refused() -> None:
    class Odd:
        def get_output_embeddings(self) -> Any:
            return torch.nn.Identity()

    places = torch.zeros(1, dtype=torch.int64)
    with (
        pytest.raises(EngineError, match="kind Identity is not supported"),
        scores_as_logits(Odd(), places, places, 1.0, "unused"),
    ):
        pass
