import json
from pathlib import Path

import pytest

from rlflow.commands.calibrate.fit import MeasuredNode, fit_efficiency, read_run
from rlflow.commands.calibrate.machine import half_width
from rlflow.commands.calibrate.probes import untrained_lengths
from rlflow.compiler.plan import write_plan
from rlflow.errors import RecipeError
from rlflow.resources.time.speed import Efficiency
from tests.helpers import load


def node(seconds: float, layers: int, samples: int) -> MeasuredNode:
    """Return a pass whose time is that of its layers and of its samples."""
    names = ("train_layer_s", "pass_sample_s")
    return MeasuredNode("torch", names, lambda e: layers * e.train_layer_s + samples * e.pass_sample_s, seconds)


def test_two_figures_are_found_from_three_passes() -> None:
    # 4 ms a layer and 0.5 ms a sample.
    passes = [node(0.013, 2, 10), node(0.084, 1, 160), node(0.161, 40, 2)]
    found = fit_efficiency(passes, Efficiency(pass_sample_s=1e-4))
    assert found.train_layer_s == pytest.approx(4e-3, rel=0.02)
    assert found.pass_sample_s == pytest.approx(5e-4, rel=0.02)


def test_what_the_passes_do_not_show_stays() -> None:
    start = Efficiency(matmul=0.7, sync_s=3.0)
    found = fit_efficiency([node(0.01, 10, 0)], start)
    assert (found.matmul, found.sync_s) == (0.7, 3.0)


def test_shares_stay_below_one() -> None:
    # Twice as fast as the whole peak.
    fast = MeasuredNode("torch", ("matmul",), lambda e: 1 / e.matmul, 0.5)
    assert fit_efficiency([fast], Efficiency()).matmul == 1.0


def test_a_node_that_takes_no_time_does_not_decide() -> None:
    """Ten times slower than predicted, but a millisecond; the other two agree on a share of 0.8."""

    def seconds_of(work: float, seconds: float) -> MeasuredNode:
        return MeasuredNode("torch", ("memory",), lambda e: work / e.memory, seconds)

    found = fit_efficiency([seconds_of(0.8, 1.0), seconds_of(1.6, 2.0), seconds_of(8e-5, 1e-3)], Efficiency())
    assert found.memory == pytest.approx(0.8, rel=0.1)


def test_a_share_at_its_limit_leaves_the_others_free() -> None:
    """Products are faster than any share of the peak explains; a second of moved bytes shows a share of 0.25."""
    names = ("matmul", "memory")
    passes = [
        MeasuredNode("torch", names, lambda e: 1 / e.matmul + 0.1 / e.memory, 0.9),
        MeasuredNode("torch", names, lambda e: 0.01 / e.matmul + 0.25 / e.memory, 1.0),
    ]
    found = fit_efficiency(passes, Efficiency(matmul=1.0, memory=0.75))
    assert found.matmul == 1.0
    assert found.memory == pytest.approx(0.25, rel=0.5)


def test_without_measured_nodes_nothing_changes() -> None:
    assert fit_efficiency([], Efficiency()) == Efficiency()


def test_half_the_speed_at_its_width() -> None:
    # 100 / (1 + 64 / width), and the widest counts as the best.
    assert half_width({64: 50, 128: 100 / 1.5, 10**9: 100}) == pytest.approx(64)


def test_untrained_responses_end_at_random() -> None:
    lengths = untrained_lengths(32)
    # 64 characters and the end: the mean is (1 - (64/65)^32) * 65 = 25.4.
    assert sum(lengths) / len(lengths) == pytest.approx(25.4, abs=0.5)
    assert max(lengths) == 32


@pytest.mark.parametrize(
    "report",
    [
        {"nodes": {}},
        {"nodes": "x"},
        {"nodes": ["update"]},
        {"nodes": {"update": 5}},
        {"nodes": {"update": {"predicted": 1.0}}},
        {"nodes": {"update": {"predicted": 1.0, "measured": "fast"}}},
        {"nodes": {"update": {"predicted": 1.0, "measured": float("nan")}}},
        {"nodes": {"update": {"predicted": 1.0, "measured": 1.0}}, "memory": "x"},
        {"nodes": {"update": {"predicted": 1.0, "measured": 1.0}}, "memory": {"actor/0": [1]}},
    ],
)
def test_a_folder_without_measured_times_is_refused(report: object, tmp_path: Path) -> None:
    import rlflow

    write_plan(rlflow.compile(load("recipe=sft_tiny"), "local"), tmp_path)
    (tmp_path / "report.json").write_text(json.dumps(report))
    with pytest.raises(RecipeError, match="no report with measured times"):
        read_run(tmp_path)
