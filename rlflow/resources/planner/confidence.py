"""Error bands of predicted memory and step times, from published runs that they were not fitted to, and verdicts."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import TrainingMemory


class Verdict(StrEnum):
    """A statement on whether a predicted peak fits into a limit, given the errors of such predictions."""

    FITS = "FITS"
    TIGHT = "TIGHT"
    DOES_NOT_FIT = "DOES NOT FIT"


class Margin(IntEnum):
    """The part of an error band for which there is room, the safest first."""

    SAFE = 0
    """The whole band fits."""
    EXPECTED = 1
    """The prediction fits, but not the upper end of its band."""
    POSSIBLE = 2
    """Only the lower end of the band fits."""


@dataclass(frozen=True)
class Band:
    """The range in which nine of ten measured values lie, as factors of the predicted one."""

    low: float
    high: float

    def factor(self, margin: Margin) -> float:
        """Return the factor of the predicted value that has to fit for a margin."""
        return {Margin.SAFE: self.high, Margin.EXPECTED: 1.0, Margin.POSSIBLE: self.low}[margin]

    def verdict(self, peak_gib: float, limit_gib: float) -> Verdict:
        """Return ``FITS`` or ``DOES_NOT_FIT`` where the whole range is on one side of the limit, else ``TIGHT``."""
        if peak_gib * self.high <= limit_gib:
            return Verdict.FITS
        return Verdict.TIGHT if peak_gib * self.low <= limit_gib else Verdict.DOES_NOT_FIT


class Kind(StrEnum):
    """The kinds of configurations whose errors are counted apart."""

    ADAPTERS_ALONE = "LoRA on one GPU"
    ALONE = "all weights on one GPU"
    ADAPTERS_SHARDED = "LoRA on several GPUs"
    SHARDED = "all weights on several GPUs"
    MODEL_PARALLEL = "layers or experts divided among GPUs"


def kind_of(layout: Layout, training: TrainingMemory) -> Kind:
    """Return the kind of a role that trains or scores."""
    if layout.model_parallel_size > 1 or layout.expert_parallel_size > 1:
        return Kind.MODEL_PARALLEL
    if layout.num_gpus > 1:
        return Kind.SHARDED if training.lora is None else Kind.ADAPTERS_SHARDED
    return Kind.ALONE if training.lora is None else Kind.ADAPTERS_ALONE


# The 5th and 95th percentiles of measured over predicted memory in published runs that state their lengths and what
# they measured, each system predicted without itself and weighted as ten rows at most. Few rows have divided layers,
# so their band is that of all. ``python -m benchmarks.published`` prints them ("band").
MEMORY_BANDS: Mapping[Kind, Band] = {
    Kind.ADAPTERS_ALONE: Band(0.83, 1.21),
    Kind.ALONE: Band(0.96, 1.17),
    Kind.ADAPTERS_SHARDED: Band(0.86, 1.07),
    Kind.SHARDED: Band(0.83, 1.06),
    Kind.MODEL_PARALLEL: Band(0.71, 1.17),
}


class TimeKind(StrEnum):
    """The kinds of steps whose predicted times have errors of their own."""

    TRAINS = "without generation"
    GENERATES = "with generation"


# The 5th and 95th percentiles of measured over predicted step times, with systems weighted and left out in the same
# way ("range" in what the command prints). The lengths of all responses are known: a plan's range holds for the lengths
# that the recipe expects.
TIME_BANDS: Mapping[TimeKind, Band] = {
    TimeKind.TRAINS: Band(0.68, 2.05),
    TimeKind.GENERATES: Band(0.70, 2.26),
}

# The median error of a predicted step time, with systems weighted and left out in the same way.
TIME_ERROR = 0.14
