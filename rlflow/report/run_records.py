"""The contents of a run's files, as far as pages show them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le
from pydantic import AfterValidator, AllowInfNan, BaseModel, ConfigDict, Field, TypeAdapter

# Seconds in about 30,000 years. Sums of such numbers stay finite.
_MOST_SECONDS = 1e12


def _finite_or_none(value: float | None) -> float | None:
    """Return the value as JSON in a browser can hold it."""
    return value if value is not None and math.isfinite(value) else None


Figure = Annotated[float | None, AfterValidator(_finite_or_none)]
"""A number that a page shows, or None."""
Seconds = Annotated[float, Ge(-_MOST_SECONDS), Le(_MOST_SECONDS), AllowInfNan(False)]
Counted = Annotated[int, Ge(0), Le(2**53)]
Tokens = Annotated[int, Ge(-(2**53)), Le(2**53)]
"""Tokens of an interval, fewer than none where requests were aborted in it."""
Step = Annotated[int, Ge(0), Le(2**31 - 1)]


class _Record:
    """The base of records. Types are exact, and fields that no page shows are ignored."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True)


class PlannedRecipe(BaseModel):
    """The recipe in ``plan.json``. Values without a field here are kept as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    name: str
    steps: Step
    graph: Mapping[str, Any] = {}


@dataclass(frozen=True)
class PlannedTime(_Record):
    """The predicted time of a node in a step."""

    start: Seconds
    seconds: Seconds


@dataclass(frozen=True)
class PlanRecord(_Record):
    """The part of ``plan.json`` that pages show."""

    recipe: PlannedRecipe
    nodes: Mapping[str, PlannedTime] = field(default_factory=dict)
    step_seconds: Figure = None


@dataclass(frozen=True)
class ReportRecord(_Record):
    """The part of ``report.json`` that pages show."""

    status: str
    steps: Step
    seconds: Figure
    eval_before: Figure
    eval_after: Figure
    step: Mapping[str, Figure]
    nodes: Mapping[str, Mapping[str, Figure]]
    memory: Mapping[str, Mapping[str, Mapping[str, Figure]]]
    store: Mapping[str, Mapping[str, Figure]]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class ImageRecord(_Record):
    """An image of a sample's prompt."""

    digest: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    width: Counted
    height: Counted


@dataclass(frozen=True)
class TurnRecord(_Record):
    """A part of a sample's response."""

    role: str
    segment: Counted
    tokens: Counted
    reward: Figure


@dataclass(frozen=True)
class SampleRecord(_Record):
    """A line of ``samples.jsonl``."""

    step: Step
    choice: str
    prompt: str
    response: str
    length: Counted
    finished: bool
    reward: Figure
    reward_parts: Mapping[str, Figure]
    advantage: Figure
    images: tuple[ImageRecord, ...] = ()
    turns: tuple[TurnRecord, ...] = ()
    turn_seconds: tuple[tuple[Seconds, Seconds], ...] = ()


@dataclass(frozen=True)
class ActivityRecord(_Record):
    """A line of ``engines.jsonl``: a second of an engine."""

    role: str
    engine: Counted
    step: Step
    at: Seconds
    seconds: Seconds
    tokens: Tokens
    cache: Seconds
    preemptions: Counted


@dataclass(frozen=True)
class ReplacementRecord(_Record):
    """A line of ``engines.jsonl``: an engine that failed and was replaced."""

    role: str
    engine: Counted
    step: Step
    failed: str


@dataclass(frozen=True)
class EventRecord(_Record):
    """A line of ``events.jsonl``."""

    step: Step
    text: str
    kind: str = ""


def _check_metrics(line: dict[str, Any]) -> dict[str, float]:
    """Return the numbers of a line of metrics, since nodes may add other values. Raises ValueError without a step."""
    numbers = {name: value for name, value in line.items() if isinstance(value, float)}
    step = numbers.get("step", math.nan)
    times = [numbers.get(name, math.nan) for name in line if name == "seconds" or name.startswith("seconds/")]
    if not 0 <= step < 2**31 or not step.is_integer() or not all(0 <= value <= _MOST_SECONDS for value in times):
        raise ValueError("step must be a whole number, and times must be seconds")
    return numbers


PLAN = TypeAdapter(PlanRecord)
REPORT = TypeAdapter(ReportRecord)
SAMPLE = TypeAdapter(SampleRecord)
EVENT = TypeAdapter(EventRecord)
ENGINE: TypeAdapter[ReplacementRecord | ActivityRecord] = TypeAdapter(ReplacementRecord | ActivityRecord)
# Whole numbers become floats, because they may be of any size.
_Value = Annotated[float | Any, Field(union_mode="left_to_right")]
METRICS_LINE: TypeAdapter[dict[str, float]] = TypeAdapter(
    Annotated[dict[str, _Value], AfterValidator(_check_metrics)], config=ConfigDict(strict=True)
)
