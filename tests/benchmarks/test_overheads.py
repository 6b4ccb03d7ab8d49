"""The benchmark of what recording and checking cost: what it replaces, and how it compares runs."""

import pkgutil
import random

import pytest

from benchmarks.overheads import _ON_RAY, _VARIANTS, compare
from benchmarks.stepped_runs import STAND_INS, Seconds


def test_what_a_stand_in_replaces_exists() -> None:
    for functions in STAND_INS.values():
        for name in functions:
            assert callable(pkgutil.resolve_name(name)), name


@pytest.mark.slow
def test_the_cost_of_each_part_is_found_between_runs_of_different_speed() -> None:
    """A step takes 1 with all parts but the trace; steps, runs and single times differ by more than the parts cost."""
    draw = random.Random(0)
    speeds = [draw.uniform(0.9, 1.1) for _ in _VARIANTS]
    costs = {"journal": 0.02, "guards": 0.0, "samples": 0.01, "trace": 0.03}
    times: list[list[Seconds]] = [[] for _ in _VARIANTS]
    for step in range(120):
        work = draw.uniform(0.5, 2.0)
        for place, without in enumerate(_VARIANTS):
            run = (place + step) % len(_VARIANTS)
            share = 0.97 + sum(cost for part, cost in costs.items() if part not in without)
            seconds = work * share * speeds[run] * draw.uniform(0.99, 1.01) * draw.choice([1, 1, 1, 1, 1.3])
            times[place].append(Seconds(run, seconds, seconds, {}))
    for part, cost in costs.items():
        found = compare(times, "cpu", _VARIANTS, [part])
        assert found.share == pytest.approx(cost, abs=0.003)
        assert found.low < cost < found.high < found.low + 0.006
    assert compare(times, "cpu", _VARIANTS, ["journal", "samples"]).share == pytest.approx(0.03, abs=0.003)


@pytest.mark.slow
def test_the_cost_of_deadlines_is_found_between_steps_that_get_longer() -> None:
    draw = random.Random(0)
    usual = [Seconds(0, (1.0 + step) * draw.uniform(0.99, 1.01), 2.0, {}) for step in range(50)]
    bare = [Seconds(0, 0.98 * (1.0 + step) * draw.uniform(0.99, 1.01), 2.0, {}) for step in range(50)]
    found = compare([usual, bare], "cpu", _ON_RAY, ["deadlines"])
    assert found.share == pytest.approx(0.02, abs=0.004)
    assert found.low < 0.02 < found.high < found.low + 0.01
