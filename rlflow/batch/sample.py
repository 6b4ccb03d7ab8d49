"""A sample of a run, as people read it."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from rlflow.batch.images import Thumbnail

Choice = Literal["best", "worst", "random"]
"""Why a sample of a step is read."""


@dataclass(frozen=True)
class SampleTurn:
    """A part of a response."""

    role: Literal["model", "environment"]
    """The model, or what an environment, an agent or its tools have added."""
    segment: int
    """The sequence that it is in, counted from 0."""
    tokens: int
    reward: float | None
    """The reward of a turn of the model; None for other parts."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A response of the model and its judgement."""

    choice: Choice
    """The reason for reading it: the highest or the lowest reward of the step, or a random draw."""
    step: int
    """The number of the step, counted from 1."""
    prompt_number: int
    """The number of its prompt in the step, and of the sample below, both counted from 0."""
    sample_number: int
    prompt: str
    """The prompt with its special tokens. Long texts have a gap in the middle."""
    response: str
    length: int
    """The tokens of the response."""
    finished: bool
    reward: float | None
    """The reward that its advantage is computed from; None where it has none."""
    reward_parts: Mapping[str, float | None]
    """The results of the reward's functions, before their weights."""
    advantage: float | None
    """The advantage; None where it differs between tokens, or the sample is excluded from training."""
    oldest_version: int
    """The oldest version of the policy that generated some of its tokens, and below the newest."""
    newest_version: int
    turns: tuple[SampleTurn, ...] = ()
    """The turns of a response that has several, and what was added between them."""
    turn_seconds: tuple[tuple[float, float], ...] = ()
    """For each turn of the model, the seconds before it without a question to the model, and those until its reply."""
    images: tuple[Thumbnail, ...] = ()
    """The images of its prompt."""

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as JSON can hold it: without small pictures, and without images or turns if it has none."""
        content = asdict(replace(self, images=()))
        images = [{"digest": x.digest, "width": x.width, "height": x.height} for x in self.images]
        optional = {"turns": content.pop("turns"), "turn_seconds": content.pop("turn_seconds"), "images": images}
        del content["images"]
        return content | {name: value for name, value in optional.items() if value}
