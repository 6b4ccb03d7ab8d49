"""The climb against made-up engines whose throughput and memory are known."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.runtime.tuning import HillClimb


def run(climb: HillClimb, rate: Callable[[int], float], share: Callable[[int], float], steps: int = 60) -> list[int]:
    """Return the settings of each step."""
    settings = []
    for _ in range(steps):
        settings.append(climb.setting)
        climb.record(1000.0, 1000.0 / rate(climb.setting), min(1.0, share(climb.setting)))
    return settings


def little(setting: int) -> float:
    return setting / 1e6


def test_it_goes_up_while_throughput_grows_and_keeps_the_best() -> None:
    climb = HillClimb(1000, 100, 10**6)
    settings = run(climb, lambda setting: min(setting, 4000), little)
    # A warm-up step, then two of each.
    assert settings[:9] == [1000, 1000, 1000, 1500, 1500, 2250, 2250, 3375, 3375]
    assert climb.best is not None
    assert climb.best.setting == settings[-1] == 5063  # 4000 is 18 % more than 3375
    assert not climb.is_trying
    assert list(climb.trials) == [1000, 1500, 2250, 3375, 5063, 7594]


def test_a_setting_without_a_gain_is_left_at_once() -> None:
    climb = HillClimb(2048, 100, 10**6)
    settings = run(climb, lambda setting: 100.0, little)
    assert set(settings) == {2048, 3072}
    assert settings[5:] == [2048] * 55
    slower = HillClimb(2048, 100, 10**6)
    assert run(slower, lambda setting: 1e6 / setting, little)[-1] == 2048


def test_noise_of_two_percent_is_no_gain() -> None:
    noise = iter([100.0, 100.0, 100.0, 102.0, 101.0] + [100.0] * 95)
    climb = HillClimb(2048, 100, 10**6)
    assert run(climb, lambda setting: next(noise), little)[-1] == 2048


def test_memory_bounds_it_before_it_runs_out() -> None:
    climb = HillClimb(1000, 100, 10**6)
    settings = run(climb, float, lambda setting: 0.3 + setting / 10_000)
    assert max(settings) <= 6000
    assert max(settings) == settings[-1] == 5063
    # A single trial shows only that half as much again takes at most half as much memory again.
    assert set(run(HillClimb(1000, 100, 10**6), float, lambda setting: 0.7 + setting / 10**6)) == {1000}


def test_it_stays_within_its_bounds() -> None:
    climb = HillClimb(1000, 800, 2000)
    assert set(run(climb, float, little)) == {1000, 1500, 2000}
    short = HillClimb(1000, 800, 2000, adaptive=True)
    assert set(run(short, float, lambda setting: 1.0)) == {1000, 800}


def test_an_adaptive_one_follows_what_changes() -> None:
    climb = HillClimb(2000, 100, 10**6, adaptive=True)
    assert run(climb, lambda setting: min(setting, 3000), little, 40)[-1] == 3000
    # Smaller settings are faster for longer texts.
    settings = run(climb, lambda setting: 1e6 / setting, little, 200)
    assert settings[-1] < 1000
    # Larger settings are faster again.
    assert run(climb, float, little, 400)[-1] > 3000


def test_an_adaptive_one_gives_way_when_memory_gets_short() -> None:
    climb = HillClimb(2000, 100, 10**6, adaptive=True)
    best = run(climb, lambda setting: min(setting, 3000), little, 12)[-1]
    assert not climb.is_trying
    tried = dict(climb.trials)
    climb.record(1.0, 1.0, 0.98)
    assert climb.setting < best
    assert climb.trials == tried
    # It was one long text: the next round finds what it had.
    assert run(climb, lambda setting: min(setting, 3000), little, 40)[-1] == best


def test_without_memory_it_stays_at_its_least_and_holds_no_more_trials() -> None:
    climb = HillClimb(2000, 1000, 4000, adaptive=True)
    run(climb, float, little, 20)
    assert set(run(climb, float, lambda setting: 0.99, 500)[100:]) == {1000}
    assert climb.setting == 1000
    run(climb, lambda setting: 1e6 / setting, little, 500)
    run(climb, float, little, 2000)
    assert set(climb.trials) <= {1000, 1334, 2000, 3000, 4000}


def test_without_it_nothing_changes_any_more() -> None:
    climb = HillClimb(2000, 100, 10**6)
    best = run(climb, lambda setting: min(setting, 3000), little, 40)[-1]
    assert set(run(climb, lambda setting: 1e6 / setting, little, 200)) == {best}


@given(
    start=st.integers(1, 10**5),
    rates=st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=50),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=50),
    adaptive=st.booleans(),
)
def test_any_measurement_keeps_the_setting_within_bounds(
    start: int, rates: list[float], shares: list[float], adaptive: bool
) -> None:
    climb = HillClimb(start, max(1, start // 4), 4 * start, adaptive=adaptive)
    for index in range(200):
        assert max(1, start // 4) <= climb.setting <= 4 * start
        climb.record(1.0, 1 / rates[index % len(rates)], shares[index % len(shares)])
    assert all(trial.tokens_per_second > 0 for trial in climb.trials.values())
    # 1.5**4 > 4: four settings above the start, four below.
    assert len(climb.trials) <= 9


@pytest.mark.parametrize("adaptive", [False, True])
def test_equal_steps_lead_to_equal_settings(adaptive: bool) -> None:
    runs = [run(HillClimb(1000, 10, 10**6, adaptive=adaptive), lambda s: s**0.5, little, 100) for _ in range(2)]
    assert runs[0] == runs[1]
