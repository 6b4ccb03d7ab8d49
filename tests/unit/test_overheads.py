"""The benchmark of what recording and checking cost: what it replaces, and how it compares runs."""

import pkgutil
import random

import numpy as np
import pytest

from benchmarks.overheads import _VARIANTS, deadline_shares, shares_of
from benchmarks.stepped_runs import STAND_INS, Seconds


@pytest.mark.parametrize("name", [name for functions in STAND_INS.values() for name in functions])
def test_what_a_stand_in_replaces_exists(name: str) -> None:
    assert callable(pkgutil.resolve_name(name))


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
            seconds = work * share * speeds[run] * draw.uniform(0.99, 1.01)
            times[place].append(Seconds(run, seconds, seconds, {}))
    found = {part: float(np.median(shares)) for part, shares in shares_of(times, "cpu").items()}
    assert found == pytest.approx(costs, abs=0.003)


def test_the_cost_of_deadlines_is_found_between_steps_that_get_longer() -> None:
    usual = [Seconds(0, 1.0 + step, 2.0, {}) for step in range(20)]
    bare = [Seconds(0, 0.9 * (1.0 + step), 2.0, {}) for step in range(20)]
    assert deadline_shares([usual, bare], "cpu") == pytest.approx(np.full(20, 0.1))
    assert deadline_shares([usual, bare], "wall") == pytest.approx(np.zeros(20))
