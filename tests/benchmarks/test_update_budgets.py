"""The cost of an update, by counting, stays within its budgets."""

import pytest

from benchmarks import update_budgets

pytestmark = pytest.mark.slow


def test_the_output_layer_moves_few_bytes() -> None:
    # The 14 bytes were added up by hand: a product writes logits (2), and one kernel reads them (2). Backward, a
    # product writes them again (2), one kernel reads them and writes their gradients (4), and two products read those
    # (4). Sums of gradients come on top.
    assert 14 < update_budgets.bytes_per_logit() <= update_budgets.GOALS["bytes_per_logit"]


def test_the_host_never_waits_within_an_update() -> None:
    figures = update_budgets.passes()
    assert figures == {"syncs_per_micro_batch": 0, "query_gathers": 0}


@pytest.mark.filterwarnings("ignore")  # torch's compiler does some things that torch warns of
def test_layers_share_one_graph_that_computes_the_same() -> None:
    figures = update_budgets.graphs()
    assert figures["graphs"] == 1
    assert figures["recompilations"] == 0
    assert 0 < figures["difference_max"] <= update_budgets.GOALS["difference_max"]
