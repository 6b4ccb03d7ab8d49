"""The memory of processes on CPUs, by hand."""

from dataclasses import replace

import pytest

from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.processes import Phase, RoleOnCpu, process_phases
from rlflow.resources.memory.state import TrainingMemory
from tests.unit.resources.planner.planning import SMALL

FP32 = TrainingMemory(weights=4, gradients=4, optimizer=8)


def role(*phases: Phase, trains: bool = False, tokens: float = 0, sequences: float = 0) -> RoleOnCpu:
    return RoleOnCpu(
        model=SMALL,
        layout=Layout(micro_batch_tokens=2048),
        training=FP32,
        trains=trains,
        weight_bytes=4,
        phases=frozenset(phases),
        tokens=tokens,
        sequences=sequences,
        longest=10,
    )


def test_a_process_holds_the_state_of_all_its_roles_in_every_phase() -> None:
    phases = process_phases([role("update", trains=True), role("generate", "sync")], 0.5, sends=False)
    assert set(phases) == {"update", "generate", "sync"}
    parameters = SMALL.num_parameters / GIB
    for terms in phases.values():
        assert terms["process"] == 0.5
        assert terms["weights"] == pytest.approx(2 * 4 * parameters)
        assert (terms["gradients"], terms["optimizer"]) == pytest.approx((4 * parameters, 8 * parameters))


def test_the_cache_of_a_generation_grows_with_its_sequences() -> None:
    terms = process_phases([role("generate", sequences=100)], 0.0, sends=False)["generate"]
    # Keys and values of 24 heads of 4 values in 2 layers, 4 bytes each, for 100 sequences of 10 tokens.
    assert terms["kv"] * GIB == pytest.approx(100 * 10 * 2 * 2 * 24 * 4 * 4)
    # 64 logits a sequence.
    assert terms["logits"] * GIB == pytest.approx(100 * 64 * 24)


def test_activations_of_float32_take_twice_the_bytes_of_bfloat16() -> None:
    terms = process_phases([role("score", tokens=1000)], 0.0, sends=False)["score"]
    assert terms["activations"] * GIB == pytest.approx(2 * 1000 * (8 * 96 + 6 * 192))


def test_only_a_process_that_exchanges_weights_holds_buckets() -> None:
    assert "buckets" not in process_phases([role("sync")], 0.0, sends=False)["sync"]
    buckets = process_phases([role("sync")], 0.0, sends=True)["sync"]["buckets"]
    # All weights are in one bucket, which is smaller than 32 MiB.
    assert buckets * GIB == pytest.approx(2 * 4 * SMALL.num_parameters)
    large = replace(role("sync"), weight_bytes=1e6)
    assert process_phases([large], 0.0, sends=True)["sync"]["buckets"] * GIB == pytest.approx(2 * 32 * 2**20)


def test_a_serving_engine_holds_its_cache_and_loaded_weights_in_every_phase() -> None:
    serving = replace(role("generate", "sync", sequences=100), serves=True)
    phases = process_phases([serving], 0.0, sends=True)
    for terms in phases.values():
        assert terms["kv"] * GIB == pytest.approx(100 * 10 * 2 * 2 * 24 * 4 * 4)
        assert terms["weights"] == terms["loading"] == pytest.approx(4 * SMALL.num_parameters / GIB)
