"""Divergences from a teacher's likeliest words: against a plain loop and TRL's function, and from several teachers."""

from dataclasses import replace
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch

import rlflow
from rlflow.batch import TopLogprobs
from rlflow.batch.top_logprobs import find_words, loss_values
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import GraphError
from rlflow.nodes.distillation import DistillUpdate, DivergenceLoss, ScoreTopLogprobs
from rlflow.recipe import Optimizer
from tests.helpers import load, rollouts, sequences, spec

GIVEN = rollouts(sequences([3, 2, 4], [[2, 5], [1, 4], [3, 3]]))
T, V = len(GIVEN.response_ids.values), 13
BETAS = [0.0, 0.3, 0.5, 1.0]


def draw_logprobs(rng: np.random.Generator, tokens: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logprobs [T, V] of a teacher and a policy."""
    teacher, policy = (torch.from_numpy(rng.normal(0, 2, (tokens, V))).log_softmax(1) for _ in range(2))
    return teacher, policy.detach().requires_grad_()


def loss_of(beta: float, teacher: torch.Tensor, policy: torch.Tensor) -> torch.Tensor:
    columns = {"teacher": teacher, "word_logprobs": policy, "entropy": teacher[:, 0]}
    return DivergenceLoss(beta=beta, temperature=1.0)(policy[:, 0], columns)[0]


def plain(beta: float, teacher: list[float], policy: list[float]) -> float:
    """Return the divergence of one token, with the outcome "any other word" last."""
    p, q = ([exp(x) for x in words] for words in (teacher, policy))
    p, q = [*p, max(1 - sum(p), 1e-6)], [*q, max(1 - sum(q), 1e-6)]

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * log(x / y) for x, y in zip(a, b, strict=True))

    if beta in (0, 1):
        return kl(q, p) if beta else kl(p, q)
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("beta", BETAS)
def test_against_a_plain_loop(beta: float) -> None:
    """300 random batches of 4 words; gradients against differences of the loop."""
    rng = np.random.default_rng(0)
    for number in range(300):
        teacher, policy = (x[:, :4].detach() for x in draw_logprobs(rng, 5))
        policy.requires_grad_()
        losses = loss_of(beta, teacher, policy)
        expected = [plain(beta, *rows) for rows in zip(teacher.tolist(), policy.tolist(), strict=True)]
        assert losses.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-9)
        (gradient,) = torch.autograd.grad(losses.sum(), policy)
        row, word, step = number % 5, number % 4, 1e-5
        ahead, behind = policy.detach()[row].tolist(), policy.detach()[row].tolist()
        ahead[word], behind[word] = ahead[word] + step, behind[word] - step
        numeric = (plain(beta, teacher[row].tolist(), ahead) - plain(beta, teacher[row].tolist(), behind)) / (2 * step)
        assert float(gradient[row, word]) == pytest.approx(numeric, rel=1e-5, abs=1e-6)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("beta", BETAS)
def test_with_all_words_it_is_trls(beta: float) -> None:
    trainer: Any = pytest.importorskip("trl.experimental.gkd").GKDTrainer
    teacher, policy = draw_logprobs(np.random.default_rng(1))
    theirs = trainer.generalized_jsd_loss(policy[None], teacher[None], beta=beta, reduction="sum")
    ours = loss_of(beta, teacher, policy).sum()
    assert float(ours) == pytest.approx(float(theirs), rel=1e-7)
    gradients = [torch.autograd.grad(loss, policy)[0] for loss in (ours, theirs)]
    # TRL differentiates by logits: with the gradient of all logprobs removed, both are the same.
    ours_by_logits, theirs_by_logits = (x - policy.detach().exp() * x.sum(1, keepdim=True) for x in gradients)
    assert torch.allclose(ours_by_logits, theirs_by_logits, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("count", [4, 200])
def test_engines_tell_the_same_words(count: int) -> None:
    logprobs = TransformersEngine(spec()).logprobs(GIVEN, 0.7).values.values
    for engine in (TransformersEngine(spec()), TorchEngine(spec())):
        top = engine.top_logprobs(GIVEN, 0.7, count).values
        words, values = find_words({"teacher": top}), loss_values(top.values)
        assert words is not None
        assert words.shape == values.shape == (T, min(count, V))
        assert (np.diff(values, axis=1) <= 0).all()
        is_sampled = words == GIVEN.response_ids.values[:, None]
        np.testing.assert_allclose(values[is_sampled], logprobs[is_sampled.any(1)], atol=2e-6)


def test_training_reaches_the_teacher() -> None:
    options: dict[str, Any] = {"capabilities": ["Trains", "Scores"], "optimizer": Optimizer(learning_rate=3e-3)}
    student, teacher = TorchEngine(spec(**options)), TransformersEngine(replace(spec(), seed=5))
    node, update = ScoreTopLogprobs(count=6), DistillUpdate(num_minibatches=2)
    top = node.run(teacher, GIVEN)
    losses = [update.run(student, GIVEN, top).values["loss"] for _ in range(60)]
    assert losses[-1] < 0.1 * losses[0]
    assert DistillUpdate(beta=1.0).run(student, GIVEN, top).values["covered"] > 6 / V


def test_each_teacher_scores_its_own_rows() -> None:
    """The rows of the third prompt belong to no teacher, and are not trained on."""
    given = replace(GIVEN, rows=[{"source": source} for source in ("a", "a", "b", "b", "c", "c")])
    first, second = (TransformersEngine(replace(spec(), seed=seed)) for seed in (1, 2))
    alone = [engine.top_logprobs(given, 1.0, 3).values for engine in (first, second)]
    by_first = ScoreTopLogprobs(count=3, rows={"source": "a"}).run(first, given)
    both = ScoreTopLogprobs(count=3, rows={"source": "b"}).run(second, given, by_first)
    assert both.is_scored.tolist() == [True] * 4 + [False] * 2
    for row in range(4):
        np.testing.assert_allclose(loss_values(both.values[row]), loss_values(alone[row // 2][row]), atol=1e-5)
    nobody = ScoreTopLogprobs(count=3, rows={"source": "d"}).run(first, given, both)
    assert nobody.is_scored.tolist() == both.is_scored.tolist()
    assert [nobody.values[row].tolist() for row in range(4)] == [both.values[row].tolist() for row in range(4)]
    trained = TorchEngine(spec(capabilities=["Trains", "Scores"]))
    assert DistillUpdate().run(trained, given, nobody).values["scored"] == pytest.approx(4 / 6)
    none = TopLogprobs(values=nobody.values, is_scored=np.zeros(6, np.bool_))
    assert DistillUpdate().run(trained, given, none).values == {"skipped": 1.0, "scored": 0.0}


def test_rows_are_those_of_rollouts() -> None:
    with pytest.raises(GraphError, match=r"^graph\.teacher\.rows: selects rows of the data by their columns"):
        rlflow.compile(
            load("recipe=distill_top_tiny", "graph.teacher.rollouts=examples", "+graph.teacher.rows={source: a}"),
            "local",
        )
