"""Times of published runs: which of them are judged, by constants and ranges that come from other systems."""

import pytest

from benchmarks.published import steps, time_folds, times
from benchmarks.published.batches import batch_of
from benchmarks.published.cases import Case
from rlflow.resources.planner.confidence import TimeKind
from tests.benchmarks.published.test_memory import SAMPLED, case

ALONE = {"n_gpus": "1", "gpus_per_node": "1", "grad_ckpt": "True", "train_backend": "hf trainer", "sharding": ""}


def measured(system: str, factor: float, tokens: str = "2048") -> Case:
    """Return a supervised run that took ``factor`` times as long as predicted."""
    cells = {**ALONE, "system": system, "max_total_len": tokens, "train_batch": "8", "notes": "padded to the limit"}
    seconds = steps.predict(case(**cells)).seconds
    return case(**cells, step_time_s=str(factor * seconds), step_time_kind="measured")


def judge(**cells: str) -> tuple[list[times.Judged], dict[str, str]]:
    return times.judge([case(SAMPLED, **{"step_time_s": "100", "step_time_kind": "measured", **cells})])


def test_a_range_is_that_of_other_systems() -> None:
    runs = [measured(system, factor) for system, factor in (("a", 1.0), ("b", 1.25), ("c", 2.0)) for _ in range(3)]
    found, errors = time_folds.folds(times.judge(runs)[0])
    ranges = {fold.system: fold.ranges[TimeKind.TRAINS] for fold in found}
    assert errors.ranges()[TimeKind.TRAINS].high == pytest.approx(2.0, rel=0.01)
    assert ranges["c"].high == pytest.approx(1.25, rel=0.01)
    assert [all(fold.inside) for fold in found] == [True, True, False]


def test_one_constant_corrects_a_system_that_is_slow_throughout() -> None:
    found, _ = time_folds.folds(times.judge([measured("a", 2.0, tokens) for tokens in ("1024", "2048", "4096")])[0])
    assert found[0].relative_errors == pytest.approx([0.5] * 3, rel=0.01)
    assert found[0].errors_with_one_constant == pytest.approx([0.0] * 3, abs=0.01)


def test_systems_with_few_rows_count_as_one() -> None:
    """Three right rows of one system, and one wrong row of each of four others: half of the weight is right."""
    rows = [measured("many", 1.0)] * 3 + [measured(name, 4.0) for name in ("p", "q", "r", "s")]
    figures = time_folds.figures(time_folds.folds(times.judge(rows)[0])[0])
    assert figures["step_time_in_range"] == pytest.approx(0.5)
    assert figures["step_time_in_range_by_row"] == pytest.approx(3 / 7)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({}, "lengths of responses are not given"),
        ({"mean_response_len": "400", "step_time_kind": "whole run: 8K examples"}, "not the time of a step"),
        ({"mean_response_len": "400", "gpu_mem_gb": "", "gpu_type": "A100"}, "the memory of the GPU is not given"),
        ({"mean_response_len": "400", "algorithm": "dapo"}, "the number of sampling rounds is not given"),
    ],
)
def test_times_are_left_out_for_a_reason(cells: dict[str, str], reason: str) -> None:
    assert judge(**cells) == ([], {"a1": reason})


def test_an_update_is_judged_alone_where_sampling_rounds_are_unknown() -> None:
    ((one,), _) = judge(mean_response_len="400", algorithm="dapo", train_time_s="40")
    assert (one.measured, list(one.step.parts)) == (40, ["training"])
    assert time_folds.kind_of(one) is TimeKind.TRAINS


def test_lengths_follow_from_throughput_or_from_mfu() -> None:
    """1024 samples; 100 tokens a second on each of 8 GPUs for 1000 s; 0.1 of 989.4 TFLOPS for 50 s."""
    throughput = case(SAMPLED, tokens_per_s_per_gpu="100", step_time_s="1000")
    tokens = batch_of(throughput)
    assert tokens is not None
    assert tokens.tokens == pytest.approx(800_000, rel=0.01)
    update = batch_of(case(SAMPLED, mfu="0.1", train_time_s="50"))
    assert update is not None
    assert update.tokens == pytest.approx(0.1 * 989.4e12 * 8 * 50 / (6 * 7_615_616_512), rel=0.01)


def test_a_colocated_step_has_the_parts_that_the_planner_counts() -> None:
    ((one,), _) = judge(mean_response_len="400")
    parts = one.step.parts
    assert (parts["wake"], parts["host"]) == (3.0, 0.1 + 2e-3 * 1024)


def test_widening_four_bits_takes_as_long_for_every_length() -> None:
    """Three passes over 7.6 billion weights of 15 bytes each, at three quarters of 3350 GB/s."""
    cells = {**ALONE, "model": "Qwen/Qwen2.5-7B-Instruct-AWQ", "lora_rank": "8", "train_batch": "1"}
    short, long = (
        steps.predict(case(**cells, max_total_len=tokens, notes="padded to the limit")).parts["dequantisation"]
        for tokens in ("512", "4096")
    )
    assert short == long == pytest.approx(3 * 7_615_616_512 * 15 / (0.75 * 3350e9))
