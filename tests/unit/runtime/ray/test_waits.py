"""Time limits of calls: multiples of what the plan predicts, with bounds."""

import math

import numpy as np
import pytest

from rlflow.runtime.objects.slices import SharedBatch
from rlflow.runtime.ray.waits import Waits
from tests.helpers import prompts


@pytest.mark.parametrize(
    ("node", "silence", "limit"),
    [("tiny", 20, 3600), ("middling", 90, 3600), ("large", 300, 20_000), ("evaluation/rollouts", 150, 3600)],
)
def test_limits_follow_the_prediction(node: str, silence: float, limit: float) -> None:
    waits = Waits({"tiny": 0.1, "middling": 30.0, "large": 1000.0}, other_s=50.0)
    wait = waits.of("update", node)
    assert (wait.silence_s, wait.limit_s) == (silence, limit)


# A slow disk writes 16 bytes a parameter at 100 MB/s: 300 million parameters in 48 s.
@pytest.mark.parametrize(
    ("method", "parameters", "silence"),
    [("build", 1e4, 300), ("save", 1e4, 20), ("restore", 3e8, 144), ("export", 7e9, 300), ("save", math.inf, 300)],
)
def test_loading_and_saving_may_take_as_long_as_slow_disks(method: str, parameters: float, silence: float) -> None:
    wait = Waits({"tiny": 0.1}, other_s=1.0, num_parameters=parameters).of(method, "tiny")
    assert (wait.silence_s, wait.limit_s) == (silence, 6 * 3600)


@pytest.mark.parametrize("concurrent", [True, False])
def test_only_waiting_for_samples_asks_an_engine_for_steps(concurrent: bool) -> None:
    """An engine that sleeps, wakes up or reports what it has done may have nothing to generate."""
    waits = Waits({}, other_s=1.0)
    methods = ("advance", "sleep", "wake", "take_activity", "begin_session", "update")
    counted = {each for each in methods if waits.of(each, concurrent=concurrent).counts_steps}
    assert counted == ({"advance"} if concurrent else set())


def test_the_text_names_node_method_and_samples() -> None:
    waits = Waits({}, other_s=1.0)
    given = prompts((1,) * 6)
    wait = waits.of("generate", "rollouts", ["x", SharedBatch(given).slice(np.array([4, 5]))])
    step, prompt, sample = given.keys[4].tolist()
    assert str(wait).startswith("Node rollouts waits for its 'generate' since ")
    assert str(wait).endswith(f", of 2 rows from step {step} prompt {prompt} sample {sample} on")
    assert str(waits.of("start_sending")).startswith("The run waits for its 'start_sending' since ")
