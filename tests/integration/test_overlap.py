"""Whole runs that generate ahead of training: they repeat themselves, and go on where they stopped."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import RecipeError
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.protocols import Engines, Report
from rlflow.runtime.run import run
from tests.conftest import CONFIG_DIR
from tests.helpers import metrics_of
from tests.integration.test_run import StopAfter, weights

pytestmark = pytest.mark.slow
K2 = ("overlap.max_staleness=2", "steps=5")


class Delayed:
    """An engine whose calls take longer, by milliseconds that a seed draws."""

    def __init__(self, engine: Any, seed: int) -> None:
        self._engine, self._draw = engine, np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._engine, name)

        def called(*arguments: Any, **named: Any) -> Any:
            time.sleep(self._draw.uniform(0, 0.01))
            return method(*arguments, **named)

        return called if callable(method) else method


class Threads(LocalRuntime):
    """A runtime with all engines in this process, whatever the plan says. With a seed, it delays them."""

    def __init__(self, seed: int | None = None) -> None:
        self.seed = seed

    def check(self, plan: Plan) -> None:
        """Check nothing."""

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Any], directory: Path) -> Iterator[Engines]:
        with super().start(plan, models, directory) as engines:
            for index, role in enumerate(engines if self.seed is not None else ()):
                engines[role] = Delayed(engines[role], [self.seed, index])  # type: ignore[arg-type]
            yield engines


def plan_of(*overrides: str, recipe: str = "real", gpus: int = 2) -> Plan:
    apart = ["roles.rollout.colocate=[]"] if gpus > 1 else []
    plan = rlflow.compile(rlflow.load([f"recipe={recipe}", *apart, *overrides], CONFIG_DIR), f"1x{gpus}@cpu")
    assert plan.takes_turns == bool(gpus == 1 and plan.recipe.overlap.max_staleness)
    return plan


def go(plan: Plan, folder: Path, *, seed: int | None = None, resume: bool = False, until: int = 0) -> Report:
    stopper, runtime = StopAfter(until), Threads(seed)
    return run(plan, folder, runtime, [MetricsWriter(), stopper], resume=resume, stop=lambda: stopper.reached)


def assert_same(one: Report, other: Report) -> None:
    expected = weights(one)
    for name, weight in weights(other).items():
        assert torch.equal(expected[name], weight), name


def test_a_staleness_of_zero_is_the_run_without_overlap(tmp_path: Path) -> None:
    without, zero = plan_of(), plan_of("overlap={max_staleness: 0, in_flight: keep}")
    assert without.fingerprint == zero.fingerprint
    assert_same(go(without, tmp_path / "without"), go(zero, tmp_path / "zero"))
    assert metrics_of(tmp_path / "without") == metrics_of(tmp_path / "zero")


def test_delays_of_workers_change_no_bit(tmp_path: Path) -> None:
    plan = plan_of(*K2)
    whole = go(plan, tmp_path / "whole")
    assert_same(whole, go(plan, tmp_path / "delayed", seed=1))
    assert metrics_of(tmp_path / "whole") == metrics_of(tmp_path / "delayed")
    assert whole.overlap["tokens_by_staleness"].keys() == {"0", "1", "2"}
    # The mean leaves out the first step, whose tokens have version 0.
    assert whole.overlap["staleness"]["measured"] == (1 + 2 + 2 + 2) / 4
    assert 0 <= (whole.overlap["train_idle"]["measured"] or 0.0) < 1
    steps = [line for line in metrics_of(tmp_path / "whole") if "overlap/staleness_mean" in line]
    assert [line["overlap/staleness_mean"] for line in steps] == [0, 1, 2, 2, 2]


def test_on_one_gpu_three_steps_are_generated_in_one_turn(tmp_path: Path) -> None:
    plan = plan_of(*K2, gpus=1)
    run(plan, tmp_path, LocalRuntime(), [MetricsWriter()])
    lines = [line for line in metrics_of(tmp_path) if "overlap/staleness_mean" in line]
    assert [line["overlap/staleness_mean"] for line in lines] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("gpus", [1, 2])
def test_stopped_after_any_step_and_resumed(gpus: int, tmp_path: Path) -> None:
    plan = plan_of(*K2, gpus=gpus)
    whole = go(plan, tmp_path / "whole")
    for step in (1, 4):
        folder = tmp_path / str(step)
        assert go(plan, folder, until=step, seed=step).status == "stopped"
        resumed = go(plan, folder, resume=True)
        assert (resumed.status, resumed.steps) == ("finished", 5)
        assert_same(whole, resumed)
        assert metrics_of(folder) == metrics_of(tmp_path / "whole")


def test_conversations_are_generated_ahead_and_saved(tmp_path: Path) -> None:
    plan = plan_of(*K2, recipe="turns")
    go(plan, tmp_path / "whole")
    go(plan, tmp_path / "stopped", until=2)
    go(plan, tmp_path / "stopped", resume=True)
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "whole")


def test_newer_weights_generate_as_soon_as_they_are_ready(tmp_path: Path) -> None:
    report = go(plan_of(*K2, "overlap.deterministic=false"), tmp_path, seed=3)
    ages = [line["overlap/staleness_max"] for line in metrics_of(tmp_path) if "overlap/staleness_max" in line]
    assert report.status == "finished"
    assert max(ages) <= 2


def test_another_staleness_is_another_run(tmp_path: Path) -> None:
    go(plan_of(*K2), tmp_path, until=2)
    for changed in ("overlap.max_staleness=1", "overlap.max_staleness=0", "data.batch_size=5"):
        with pytest.raises(RecipeError, match=r"^resume: .* was trained with"):
            go(plan_of(*K2, changed), tmp_path, resume=True)
