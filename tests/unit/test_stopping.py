"""SIGTERM, as Slurm and Kubernetes send it, stops a run as Ctrl-C does."""

import os
import signal

import pytest

from rlflow.stop_signals import stop_on_signals


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_stops_after_the_step_and_the_second_at_once(first: int, second: int) -> None:
    announced: list[str] = []
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    def stop_twice() -> None:
        with stop_on_signals(lambda: announced.append("stopping")) as stopping:
            assert not stopping.is_set()
            os.kill(os.getpid(), first)
            assert stopping.is_set()
            assert stopping.exit_code == 128 + first
            assert announced == ["stopping"]
            os.kill(os.getpid(), second)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        stop_twice()
    assert interrupt.value.args == (128 + first,)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
