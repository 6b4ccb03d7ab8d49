"""Constants and error bands of published runs never come from the system that they judge."""

import pytest

from benchmarks.published import boundaries, leave_one_out, memory
from benchmarks.published.cases import Case
from benchmarks.published.leave_one_out import Errors, folds, weighted_quantile
from rlflow.resources.planner.confidence import Kind, Verdict
from tests.benchmarks.published.test_memory import case


def measured(system: str, factor: float, tokens: str = "2048") -> Case:
    """Return a run that measured ``factor`` times what the model predicts."""
    cells = {
        "system": system,
        "grad_ckpt": "True",
        "notes": "packing",
        "max_total_len": tokens,
        "peak_mem_kind": "GiB, nvidia-smi",
    }
    bare = case(**cells)
    gib = memory.comparable(bare, memory.predict(bare))
    return case(**cells, peak_mem_gb=str(round(factor * gib, 4)))


def test_quantiles_count_weights() -> None:
    assert weighted_quantile([(3.0, 1), (1.0, 1), (2.0, 8)], 0.5) == 2
    assert weighted_quantile([(3.0, 1), (1.0, 8), (2.0, 1)], 0.5) == 1
    assert weighted_quantile([(1.0, 1), (2.0, 1)], 1.0) == 2


def test_a_band_is_that_of_other_systems() -> None:
    systems = {"a": 0.9, "b": 1.0, "c": 1.2}
    errors = Errors([measured(system, factor) for system, factor in systems.items()])
    everything, without = errors.bands()[Kind.SHARDED], errors.bands("c")[Kind.SHARDED]
    assert everything.high > 1.1
    assert without.high < everything.high
    assert without.low < 1


def test_every_system_has_the_same_weight() -> None:
    """Nineteen rows of one system that are right do not outvote one row of another."""
    rows = [measured("many", 1.0)] * 19
    band = Errors([*rows, measured("one", 0.5)]).bands()[Kind.SHARDED]
    assert band.low == pytest.approx(0.5, rel=0.2)


def test_verdicts_of_a_system_that_was_left_out() -> None:
    """Others measure up to 1.5 times the prediction, so a run that is predicted to fill its GPU is tight."""
    others = [measured(system, 1.5) for system in ("a", "b", "c")]
    died = case(system="d", outcome="oom", n_gpus="2", grad_ckpt="True")
    ran = case(system="d", n_gpus="64", n_nodes="8", grad_ckpt="True")
    found, _ = folds([*others, died, ran])
    fold = next(fold for fold in found if fold.system == "d")
    assert (fold.oom_recall, fold.false_oom) == (1.0, 0.0)
    assert fold.verdict(fold.judged[1]) is Verdict.FITS
    figures = leave_one_out.figures(found, [])
    assert (figures["loo_oom_recall"], figures["loo_oom_recall_worst"]) == (1.0, None)


def test_forks_are_left_out_together() -> None:
    found, _ = folds([measured("verl(rllm)", 1.0), measured("verl", 1.0), measured("b", 1.0)])
    assert [(fold.system, len(fold.judged)) for fold in found] == [("b", 1), ("verl", 2)]


def test_an_interval_that_was_searched_contains_the_truth() -> None:
    def error(predicted: int) -> float:
        return boundaries.Boundary("a", ("x", "y"), "micro_batch_per_gpu", 8, 16, predicted).error

    assert error(8) == error(15) == 0
    assert error(18) == pytest.approx(18 / 15 - 1)
    assert error(4) == pytest.approx(1.0)
