"""The cost of an update, by counting, stays within its budgets."""

import pytest

import rlflow
from benchmarks import update_budgets
from rlflow.compiler.lower import lower
from rlflow.resources.planner.prediction.task_times import engine_kernels
from rlflow.resources.time.speed import Efficiency, gpu_speed
from tests.helpers import load

pytestmark = pytest.mark.slow


def test_the_output_layer_moves_few_bytes() -> None:
    # The 14 bytes were added up by hand: a product writes logits (2), and one kernel reads them (2). Backward, a
    # product writes them again (2), one kernel reads them and writes their gradients (4), and two products read those
    # (4). Hidden states and weights, and sums of their gradients, come on top, and grow with the width.
    assert 14 < update_budgets.bytes_per_logit() <= update_budgets.GOALS["bytes_per_logit"]
    assert update_budgets.bytes_per_logit(width=3584) <= 23


@pytest.mark.parametrize("model", ["qwen2_5_0_5b", "qwen2_5_7b"])
def test_the_planner_counts_as_many_bytes(model: str) -> None:
    plan = rlflow.compile(load("recipe=grpo_7b", f"model@models.policy={model}"), "1x8")
    [demand] = [demand for demand in lower(plan.recipe, plan.graph).demands if demand.role == "actor"]
    layout = plan.roles["actor"].layout
    kernels = engine_kernels(demand, layout, gpu_speed(plan.cluster.gpus["h100_80gb"], 8, Efficiency()))
    assert demand.architecture is not None
    width = demand.architecture.hidden_size
    counted = [update_budgets.bytes_per_logit(width=width, trains=trains) for trains in (True, False)]
    assert list(kernels.logit_bytes) == pytest.approx(counted, rel=0.02)
    assert kernels.recomputes_logits
    assert kernels.fused_layers == (layout.zero_stage != 3)


def test_the_host_never_waits_within_an_update() -> None:
    figures = update_budgets.passes()
    assert figures == {"syncs_per_micro_batch": 0, "query_gathers": 0}


def test_the_first_pass_has_the_old_logprobs() -> None:
    assert update_budgets.old_logprobs_difference() <= update_budgets.GOALS["old_logprobs_difference"]


@pytest.mark.filterwarnings("ignore")  # torch's compiler does some things that torch warns of
def test_layers_share_one_graph_that_computes_the_same() -> None:
    figures = update_budgets.graphs()
    assert figures["graphs"] == 1
    assert figures["recompilations"] == 0
    assert 0 < figures["difference_max"] <= update_budgets.GOALS["difference_max"]
