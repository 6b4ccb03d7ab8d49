"""MFU of updates, by hand."""

from functools import cache

import pytest

import rlflow
from rlflow.batch import Metrics, Minibatch
from rlflow.compiler.plan import Plan
from rlflow.engines.base import TokenLoss
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.runtime.objects.store_usage import count_towards
from rlflow.runtime.utilization import UpdateWork
from tests.helpers import load, minibatch, sequences


class Engine:
    """An engine that takes no time, and knows how often it was called."""

    calls = 0

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        self.calls += 1
        return Metrics(values={"loss": 1.0})


# Qwen2.5-7B: 28 layers of a width of 3584 with 28 heads of 128 for queries and 4 for keys and values, and 18944 in the
# MLP, and a head for 152064 tokens. Attention multiplies each query and each output with each key it sees.
PARAMETERS = 28 * (2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18944) + 152064 * 3584
# Two prompts of 100 tokens, which are computed once, with responses of 300 and 500 tokens, which are computed twice
# each. A token sees half of its sequence.
BATCH = minibatch(sequences((100, 100), ((300, 500), (300, 500))))
TOKENS, PAIRS = 2 * (100 + 300 + 500), 2 * (400**2 + 600**2) / 2


@cache
def planned(cluster: str, *overrides: str) -> Plan:
    return rlflow.compile(load("recipe=grpo_7b", *overrides), cluster)


def utilization(cluster: str, *overrides: str) -> dict[str, float]:
    """Return the MFU of two optimizer steps of 0.2 s, and check that both reach the engine."""
    engine = Engine()
    work = UpdateWork(planned(cluster, *overrides), {"actor": engine})
    with count_towards("update"):
        for _ in range(2):
            assert engine.update(BATCH, LikelihoodLoss()).values == {"loss": 1.0}
    assert engine.calls == 2
    found = work.take_utilization({"update": 0.2, "rollouts": 5.0})
    assert work.take_utilization({"update": 0.2}) == {}, "work counts once"
    return found


def test_mfu_is_six_operations_for_each_parameter_and_token_and_those_of_attention() -> None:
    """A shape's GPUs are H100, whose data sheet says 989.4 TFLOP/s."""
    operations = 2 * (6 * PARAMETERS * TOKENS + 3 * 2 * 28 * (3584 + 3584) * PAIRS)
    expected = operations / (0.2 * 8 * 989.4e12)
    # The product leaves out biases and norms.
    assert utilization("1x8") == {"update/mfu": pytest.approx(expected, rel=1e-4)}


def test_adapters_leave_out_the_gradients_of_the_weights() -> None:
    full = utilization("1x8", "roles.actor.gpus=8")["update/mfu"]
    lora = ("roles.actor.gpus=8", "+roles.actor.lora={rank: 8, alpha: 16}")
    assert utilization("1x8", *lora)["update/mfu"] == pytest.approx(full * 2 / 3)


def test_a_cpu_has_no_peak_to_compare_with() -> None:
    assert utilization("1x1@cpu") == {}


def test_the_work_of_a_skipped_step_counts_for_no_other() -> None:
    engine = Engine()
    work = UpdateWork(planned("1x8"), {"actor": engine})
    with count_towards("update"):
        engine.update(BATCH, LikelihoodLoss())
    assert work.take_utilization({}) == {}
    assert work.take_utilization({"update": 1.0}) == {}
