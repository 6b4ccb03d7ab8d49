"""The teacher's advantages against plain loops in float64."""

from math import log

import numpy as np
import pytest
import torch

from rlflow.batch import Logprobs, Packed
from rlflow.nodes.advantages import TeacherAdvantage
from rlflow.nodes.policy_variants import ReinforceUpdate
from tests.helpers import rollouts, sequences

DRAW = np.random.default_rng(0)
RAGGED = rollouts(sequences([2, 4, 3], [[5, 1, 2], [7, 3], [1]]))
SAMPLED, OLD, TEACHER = (
    RAGGED.response_ids.like(DRAW.normal(-2, 1, len(RAGGED.response_ids.values)).astype(np.float32)) for _ in range(3)
)
GIVEN = type(RAGGED)(**{**vars(RAGGED), "logprobs": SAMPLED})


@pytest.mark.parametrize("old", [None, OLD])
def test_each_token_by_itself(old: Packed | None) -> None:
    known = None if old is None else Logprobs(values=old)
    advantages = TeacherAdvantage().run(GIVEN, Logprobs(values=TEACHER), old_logprobs=known)
    assert advantages.is_included.all()
    for row in range(len(GIVEN)):
        policy = (SAMPLED if old is None else old)[row]
        expected = [float(theirs) - float(ours) for theirs, ours in zip(TEACHER[row], policy, strict=True)]
        assert advantages.values[row] == pytest.approx(expected, abs=1e-6)


def test_its_policy_gradient_is_that_of_the_reverse_kl() -> None:
    """Over all tokens that could be sampled, each as often as the policy would."""
    policy = torch.tensor(DRAW.normal(0, 1, 7), requires_grad=True)
    teacher = torch.tensor(DRAW.normal(0, 1, 7)).softmax(0)
    divergence = (policy.softmax(0) * (policy.log_softmax(0) - teacher.log())).sum()
    (expected,) = torch.autograd.grad(divergence, policy)

    each = rollouts(sequences([1], [[1] * 7]))
    logprobs = policy.log_softmax(0)
    sampled = each.response_ids.like(logprobs.detach().numpy().astype(np.float32))
    judged = each.response_ids.like(np.array([log(p) for p in teacher], np.float32))
    given = type(each)(**{**vars(each), "logprobs": sampled})
    advantages = TeacherAdvantage().run(given, Logprobs(values=judged)).values.values
    losses, _ = ReinforceUpdate().surrogate(logprobs, {"advantages": torch.from_numpy(advantages)})
    (ours,) = torch.autograd.grad((policy.softmax(0).detach() * losses).sum(), policy)
    assert ours.numpy() == pytest.approx(expected.numpy(), abs=1e-6)
