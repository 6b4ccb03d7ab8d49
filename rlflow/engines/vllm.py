"""Generates with vLLM."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import EngineSpec, Sampling

if TYPE_CHECKING:
    from torch import Tensor


class VllmEngine:
    parallel: ClassVar[frozenset[str]] = frozenset({"data", "tensor", "pipeline"})
    package: ClassVar[str | None] = "vllm"
    concurrent: ClassVar[bool] = True

    def __init__(self, spec: EngineSpec) -> None:
        raise NotImplementedError

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        raise NotImplementedError

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        raise NotImplementedError


ENGINE = VllmEngine
