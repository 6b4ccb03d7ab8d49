"""Trains, scores and values with DeepSpeed."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlflow.batch import Logprobs, Metrics, Minibatch, Sequences, ValueEstimates
from rlflow.engines.base import EngineSpec, TokenLoss

if TYPE_CHECKING:
    from torch import Tensor


class DeepSpeedEngine:
    parallel: ClassVar[frozenset[str]] = frozenset({"data", "sequence"})
    package: ClassVar[str | None] = "deepspeed"
    concurrent: ClassVar[bool] = False

    def __init__(self, spec: EngineSpec) -> None:
        raise NotImplementedError

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        raise NotImplementedError

    def values(self, sequences: Sequences) -> ValueEstimates:
        raise NotImplementedError

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        raise NotImplementedError

    def weights(self) -> "Iterator[tuple[str, Tensor]]":
        raise NotImplementedError

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def restore(self, folder: Path) -> None:
        raise NotImplementedError

    def export(self, folder: Path) -> None:
        raise NotImplementedError


ENGINE = DeepSpeedEngine
