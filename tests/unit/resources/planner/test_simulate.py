"""List scheduling, against schedules worked out by hand."""

from dataclasses import replace

import pytest

import rlflow
from rlflow.resources.cluster import Gpu
from rlflow.resources.planner.prediction.task_times import collecting_seconds
from rlflow.resources.planner.simulate import PARTS
from rlflow.resources.time.speed import Efficiency, gpu_speed
from rlflow.resources.workload import Task, TaskKind, WeightSync, Workload
from tests.helpers import load
from tests.unit.resources.planner.planning import simulate, task


def of(node: str, kind: TaskKind, *after: str, role: str | None = None) -> Task:
    return task(node, role or node, kind, *after)


GRPO = Workload(
    tasks=(
        of("rollout", "generate"),
        of("reference", "score", "rollout"),
        of("actor", "update", "rollout", "reference"),
    ),
    weight_syncs=(WeightSync(source="actor", target="rollout"),),
)
SECONDS = {"rollout": 10.0, "reference": 4.0, "actor": 8.0, "actor->rollout": 1.0}


def test_on_one_pool_one_after_another() -> None:
    schedule = simulate(GRPO, SECONDS, {"rollout": 0, "reference": 0, "actor": 0})
    assert schedule.step_seconds == 23
    assert schedule.idle_share(0) == 0
    assert schedule.critical_path == ("rollout", "reference", "actor", "actor->rollout")


def test_apart_each_waits_for_what_it_reads() -> None:
    schedule = simulate(GRPO, SECONDS, {"rollout": 0, "reference": 1, "actor": 2})
    assert schedule.step_seconds == 23
    # The weight sync keeps both ends busy.
    assert schedule.idle_share(0) == pytest.approx(12 / 23)
    assert schedule.idle_share(1) == pytest.approx(19 / 23)
    assert schedule.idle_share(2) == pytest.approx(14 / 23)


def test_independent_tasks_run_at_the_same_time_on_pools_of_their_own() -> None:
    tasks = (of("a", "score"), of("b", "score"), of("c", "update", "a", "b"))
    seconds = {"a": 3.0, "b": 5.0, "c": 1.0}
    apart = simulate(Workload(tasks=tasks), seconds, {"a": 0, "b": 1, "c": 0})
    assert apart.step_seconds == 6
    assert apart.critical_path == ("b", "c")
    assert simulate(Workload(tasks=tasks), seconds, {"a": 0, "b": 0, "c": 0}).step_seconds == 9


def test_a_task_that_streams_begins_with_parts() -> None:
    """The task ends a part after the last part arrives. If its own work is longer, that starts with the first part."""
    tasks = (of("write", "generate"), replace(of("judge", "score", "write"), streams=True))
    short = simulate(Workload(tasks=tasks), {"write": 8.0, "judge": 4.0}, {"write": 0, "judge": 1})
    assert short.step_seconds == pytest.approx(8 + 4 / PARTS)
    long = simulate(Workload(tasks=tasks), {"write": 8.0, "judge": 40.0}, {"write": 0, "judge": 1})
    assert long.step_seconds == pytest.approx(8 / PARTS + 40)
    same = simulate(Workload(tasks=tasks), {"write": 8.0, "judge": 4.0}, {"write": 0, "judge": 0})
    assert same.step_seconds == 12


def test_host_tasks_keep_no_gpu_busy() -> None:
    host = replace(of("reward", "host", "write"), role=None)
    schedule = simulate(Workload(tasks=(of("write", "generate"), host)), {"write": 2.0, "reward": 1.0}, {"write": 0})
    assert schedule.step_seconds == 3
    assert schedule.idle_share(0) == pytest.approx(1 / 3)


def test_the_first_task_of_the_controller_collects_what_was_generated() -> None:
    """0.1 s, 0.08 ms for each sample and 0.6 us for each token; nothing on CPUs, whose steps are measured."""
    tasks = [of("rollout", "generate"), of("rewards", "host", "rollout")]
    tasks.append(of("advantages", "host", "rewards", "rollout"))
    tasks[1:] = [replace(task, role=None) for task in tasks[1:]]
    workload, gpu = (
        Workload(tasks=tuple(tasks)),
        Gpu(memory_gib=80, peak_tflops={"bfloat16": 1.0}, memory_gb_s=1, source=""),
    )
    speed = gpu_speed(gpu, 8, Efficiency())
    found = [
        collecting_seconds(workload, task, on) for on in (speed, replace(speed, is_cpu=True)) for task in tasks[1:]
    ]
    assert found == pytest.approx(
        [0.1 + tasks[1].samples * (0.08e-3 + 0.6e-6 * tasks[1].responses.mean), 0.0, 0.0, 0.0]
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_judge_their_own_samples_side_by_side(num_hosts: int) -> None:
    """Each of 2,048 samples takes 80 us, 0.6 us a token, and 5 us in its reward. The controller judges none."""
    plan = rlflow.compile(load("recipe=grpo_32b"), f"{num_hosts}x8@h100_80gb")
    tasks = {task.node: task for task in plan.workload.tasks}
    assert (tasks["rewards"].role, tasks["rewards"].hosts_of, tasks["rewards"].samples) == (None, "rollout", 2048)
    assert tasks["advantages"].hosts_of is None, "it reads numbers alone"
    # Reading takes 10 to 60 ms.
    expected = 0.1 + (0.085e-3 + 0.6e-6 * tasks["rewards"].responses.mean) * 2048 / num_hosts
    assert expected < plan.prediction.nodes["rewards"].seconds < expected + 0.06


def test_a_stream_waits_for_the_first_part_of_all_that_it_reads() -> None:
    """The second source ends first and starts late; the step does not get shorter where it takes longer."""
    late = replace(of("late", "generate", "first"), role="late")
    tasks = (
        of("first", "score"),
        late,
        of("long", "generate"),
        replace(of("judge", "score", "late", "long"), streams=True),
    )
    pools = {"first": 0, "late": 1, "long": 2, "judge": 3}
    steps = []
    for seconds in (0.9, 1.1):
        given = {"first": 9.0, "late": seconds, "long": 10.0, "judge": 8.0}
        steps.append(simulate(Workload(tasks=tasks), given, pools).step_seconds)
    # The first part of the late source is there after 9 + 0.9 / 8 seconds.
    assert steps == pytest.approx([9 + 0.9 / PARTS + 8, 9 + 1.1 / PARTS + 8])
