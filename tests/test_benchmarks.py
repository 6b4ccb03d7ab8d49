"""Every benchmark composes and plans what it runs: a recipe that a newer rule refuses is seen here."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import ROOT

# These run no recipe: they measure rewards or modules alone, or draw demands and recipes with mistakes at random.
WITHOUT_PLANS = {"fixes", "fsdp_memory", "fuzz_recipes", "pins", "rewards", "update_budgets"}
# These have many plans, or large ones, or make a model, or import TRL.
SLOW = {"algorithms", "data_plane", "faults", "grpo_vs_trl", "overlap", "overlap_search", "own_runs", "placement"}
SLOW |= {"planning_time", "staleness", "tail"}
# An engine alone.
WITHOUT_PLANS |= {"agent_faults", "agent_tokens", "decode_cost"}
# Formulas alone.
WITHOUT_PLANS |= {"serving_times"}


def programs() -> list[str]:
    """Return the names of benchmarks that can be started."""
    return sorted(
        path.stem for path in (ROOT / "benchmarks").glob("*.py") if 'if __name__ == "__main__"' in path.read_text()
    )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in SLOW else ())
        for name in programs()
        if name not in WITHOUT_PLANS
    ],
)
def test_a_benchmark_plans_what_it_runs(name: str, tmp_path: Path) -> None:
    plans = list(import_module(f"benchmarks.{name}").plans(tmp_path))
    assert plans
    assert all(plan.roles for plan in plans)


def test_the_others_have_no_plans() -> None:
    assert set(programs()) >= WITHOUT_PLANS
    assert [name for name in WITHOUT_PLANS if hasattr(import_module(f"benchmarks.{name}"), "plans")] == []
