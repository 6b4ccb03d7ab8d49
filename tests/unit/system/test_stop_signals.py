"""SIGTERM, as Slurm and Kubernetes send it, stops a run as Ctrl-C does."""

import os
import signal

import pytest

from rlflow.system.stop_signals import stop_on_signals

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_stops_after_the_step_and_ctrl_c_after_it_at_once(first: int) -> None:
    announced: list[str] = []
    before = [signal.getsignal(number) for number in SIGNALS]

    def stop_twice() -> None:
        with stop_on_signals(lambda: announced.append("stopping")) as stopping:
            assert not stopping.is_set()
            os.kill(os.getpid(), first)
            assert stopping.is_set()
            assert stopping.exit_code == 128 + first
            assert announced == ["stopping"]
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        stop_twice()
    assert interrupt.value.args == (128 + first,)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("first", SIGNALS)
def test_sigterm_after_the_first_signal_changes_nothing(first: int) -> None:
    announced: list[str] = []
    with stop_on_signals(lambda: announced.append("stopping")) as stopping:
        for number in (first, signal.SIGTERM, signal.SIGTERM):
            os.kill(os.getpid(), number)
        assert stopping.exit_code == 128 + first
    assert announced == ["stopping"]
