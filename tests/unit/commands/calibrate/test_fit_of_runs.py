"""Calibration from the reports of runs, with reports written by hand."""

from dataclasses import replace
from typing import Any

import pytest

import rlflow
from rlflow.commands.calibrate.fit import calibration_from_runs, measured_nodes
from rlflow.compiler import compile_recipe
from rlflow.compiler.plan import Plan
from rlflow.recipe.compose import load_cluster
from rlflow.resources.time.calibration import CPU_EFFICIENCY, calibration_figures, calibration_from
from rlflow.resources.time.speed import Efficiency
from rlflow.runtime.measurements import StepTimes, compare_memory
from tests.conftest import CONFIG_DIR
from tests.helpers import load

LOCAL = load_cluster("local")


def plan() -> Plan:
    return rlflow.compile(load("recipe=sft_tiny"), "local")


def report(planned: Plan, *, slower: float, more_gib: float = 0.0) -> dict[str, Any]:
    seconds = planned.prediction.nodes["update"].seconds
    held = sum(planned.prediction.processes["local"]["update"].values())
    return {
        "nodes": {"update": {"predicted": seconds, "measured": slower * seconds}},
        "memory": {"local": {"update": {"predicted": held, "measured": held + more_gib}}},
    }


@pytest.mark.parametrize("slower", [0.8, 3.0, 20.0])
def test_the_next_plan_predicts_what_the_run_measured(slower: float) -> None:
    first = plan()
    found = calibration_from_runs([(first, report(first, slower=slower, more_gib=0.25))], {})
    again = compile_recipe(first.recipe, LOCAL, found)
    assert again.prediction.nodes["update"].seconds == pytest.approx(
        slower * first.prediction.nodes["update"].seconds, rel=0.1
    )
    assert sum(again.prediction.processes["local"]["update"].values()) == pytest.approx(
        sum(first.prediction.processes["local"]["update"].values()) + 0.25
    )


def test_a_run_says_nothing_about_the_memory_of_other_engines() -> None:
    local, served = plan(), rlflow.compile(load("recipe=grpo_tiny_cluster"), "local")
    held = sum(served.prediction.processes["rollout/0"]["generate"].values())
    memory = {"rollout/0": {"generate": {"predicted": held, "measured": held + 0.25}}}
    runs = [(local, report(local, slower=1.0))] * 3 + [(served, {"nodes": {}, "memory": memory})]
    found = calibration_from_runs(runs, {})
    more = {engine: found[f"cpu/{engine}"].process_gib - CPU_EFFICIENCY.process_gib for engine in ("torch", "vllm")}
    assert more == pytest.approx({"torch": 0.0, "vllm": 0.25})


@pytest.mark.slow
def test_the_hosts_of_a_run_have_judged_its_samples_side_by_side() -> None:
    """Two hosts have judged 1,024 of 2,048 samples each. The controller has computed all advantages."""
    penalty = ("+graph.kl={node: kl_divergence}", "+graph.penalized={node: kl_penalty, kl_coef: 0.1}")
    planned = rlflow.compile(load("recipe=grpo_32b", *penalty, "++graph.advantages.rewards=penalized"), "2x8@h100_80gb")
    for name, samples in (("kl", 1024), ("advantages", 2048)):
        (node,) = measured_nodes(planned, {"nodes": {name: {"measured": 1.0}}}, {})
        assert node.predict(Efficiency(host_sample_s=1.0)) == samples


def test_a_plan_states_its_calibration_and_the_file_reads_it_back() -> None:
    calibration = calibration_from({"cpu": {"matmul": 0.5, "engines": {"torch": {"call_s": 0.25}}}}, LOCAL)
    assert calibration["cpu/torch"] == Efficiency(matmul=0.5, call_s=0.25)
    figures = calibration_figures(calibration)
    assert figures == {"cpu": {"matmul": 0.5, "engines": {"torch": {"call_s": 0.25}}}}
    planned = compile_recipe(plan().recipe, LOCAL, calibration)
    assert planned.prediction.calibration == figures
    without = compile_recipe(plan().recipe, LOCAL, calibration_from({"cpu": {"matmul": 0.5}}, LOCAL))
    # One call of the trainer in a step.
    slower = planned.prediction.nodes["update"].seconds - without.prediction.nodes["update"].seconds
    assert slower == pytest.approx(0.25)


def test_the_measured_step_is_the_median_without_the_first() -> None:
    planned = plan()
    times = StepTimes(planned)
    for seconds in (9.0, 1.0, 3.0, 2.0):
        times.add({"seconds": seconds, "seconds/update": seconds / 2, "reward": 1.0})
    assert times.step() == {"predicted": planned.prediction.step_seconds, "measured": 2.0}
    assert times.nodes()["update"]["measured"] == 1.0


def test_steps_that_are_generated_together_count_as_one() -> None:
    """The first of each two steps generates for both; the last step is half of a pair."""
    planned = compile_recipe(load("recipe=fake", "overlap.max_staleness=1", config_dir=CONFIG_DIR), LOCAL)
    assert planned.steps_per_turn == 2
    times = StepTimes(planned)
    for seconds in (99.0, 1.0, 8.0, 2.0, 9.0, 3.0, 12.0):
        times.add({"seconds": seconds})
    assert times.step()["measured"] == (5.0 + 6.0) / 2


def test_a_process_is_compared_phase_by_phase() -> None:
    planned = plan()
    prediction = replace(planned.prediction, processes={"actor/0": {"update": {"weights": 1.0, "process": 0.5}}})
    compared = compare_memory(replace(planned, prediction=prediction), {"actor/0": {"update": 2**31, "score": 2**30}})
    assert compared == {
        "actor/0": {"update": {"predicted": 1.5, "measured": 2.0}, "score": {"predicted": None, "measured": 1.0}}
    }
