"""The bytes and messages of a whole step on the driver. Simulated hosts have engines that take no time."""

import pytest

from benchmarks import instant_engine as instant
from benchmarks.driver import measure_steps, plan_of
from tests.conftest import HOSTS

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
TRAINERS, PROMPTS, RESPONSES = 3, 256, 16


@pytest.mark.usefixtures("hosts")
def test_messages_and_bytes_of_a_step() -> None:
    """Engines take a message for each load of samples, and each worker a few for each call of the graph."""
    samples = PROMPTS * RESPONSES
    steps = measure_steps(plan_of(HOSTS, TRAINERS, PROMPTS, RESPONSES), samples, steps=1)
    loads = 2 * samples / instant.SLOTS
    # Scoring, storing the scores and two minibatches are each called and answered; the rest does not grow with samples.
    assert steps.messages * samples <= loads + TRAINERS * 2 * 4 + 100
    assert 0 < steps.nbytes * samples <= 65536 + 100 * samples
