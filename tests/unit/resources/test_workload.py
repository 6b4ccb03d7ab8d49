"""The demands of a step on the roles, by hand."""

from dataclasses import replace

from rlflow.resources.layout import Layout
from rlflow.resources.planner.prediction.task_times import task_seconds, with_waits
from rlflow.resources.time.decoding import Generation
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Efficiency, gpu_speed
from tests.unit.resources.planner.planning import H100, SEVEN_B, demand, task


def test_turns_generate_equal_parts_and_read_the_context() -> None:
    whole = replace(task("rollout", "rollout", "generate"), prompts=Lengths((10, 30)), responses=Lengths((30, 90)))
    assert whole.turn_lengths == ((whole.prompts, whole.responses),)
    in_turns = replace(whole, turns=3)
    assert [(read.values, written.values) for read, written in in_turns.turn_lengths] == [
        ((10, 30), (10, 30)),
        ((30, 50), (10, 30)),
        ((50, 70), (10, 30)),
    ]


def test_turns_take_longer_than_one_generation() -> None:
    """Prompts are read again, and each turn waits for its longest."""
    asked = demand("rollout", SEVEN_B)
    seconds = [
        task_seconds(
            asked,
            [replace(task("rollout", "rollout", "generate"), turns=turns)],
            Layout(micro_batch_tokens=8192),
            gpu_speed(H100, 8, Efficiency()),
            kv_tokens=4e5,
        )["rollout"]
        for turns in (1, 2, 4)
    ]
    assert seconds[0] < seconds[1] < seconds[2] < 4 * seconds[0]


def test_waits_are_hidden_as_far_as_other_sequences_run_meanwhile() -> None:
    waiting = replace(task("rollout", "rollout", "generate"), turns=4, wait_s=10.0)
    turns = (Generation(5.0, 1.0, 32, 1000.0),) * 4
    assert with_waits(waiting, turns, 16) == 4 * 5 + 4 * 10
    assert with_waits(waiting, turns, 64) == 2 * 5 + 4 * 10
    assert with_waits(waiting, turns * 100, 640) == 400 * 5
    assert with_waits(replace(waiting, wait_s=0.0), turns, 64) == 4 * 5
