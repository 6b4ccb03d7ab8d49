"""The report of engines that lag, with the reason."""

from typing import Any

from rlflow.report.engines import describe_lagging, describe_replaced


def line(engine: int, step: int = 1, **values: Any) -> dict[str, Any]:
    usual = {"role": "rollout", "seconds": 1.0, "tokens": 100, "running": 10, "cache": 0.5, "preemptions": 0}
    return {"engine": engine, "step": step, **usual, **values}


def test_engines_that_end_together_are_not_reported() -> None:
    assert describe_lagging([]) == []
    assert describe_lagging([line(0), line(1)]) == []
    assert describe_lagging([line(0)] * 3) == []


def test_the_engine_that_ends_last_is_reported_with_the_cause() -> None:
    others = [line(0), line(1)]
    long = [*others, *[line(2, running=5, tokens=50)] * 4]
    assert describe_lagging(long) == [
        "rollout: engine 2 lags in 1 of 1 steps, others wait 75% of its time: it has the longest responses"
    ]
    assert describe_lagging([*others, *[line(2, cache=1.0)] * 4])[0].endswith("its KV cache is full")
    assert describe_lagging([*others, *[line(2, tokens=50)] * 4])[0].endswith(
        "it generates 5 tokens/s per response, the median is 10"
    )
    assert (
        "engine 2 lags in 2 of 3 steps"
        in describe_lagging([*long, *[{**each, "step": 2} for each in long], line(0, step=3)])[0]
    )


def test_failed_engines_are_reported() -> None:
    lines = [line(0), {"role": "rollout", "engine": 1, "step": 1, "failed": "worker 1 died."}]
    assert describe_replaced(lines) == ["rollout: engine 1 replaced in step 1: worker 1 died."]
    assert describe_lagging(lines) == []
