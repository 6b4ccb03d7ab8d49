"""What a role may pin, and how it is cut up over its GPUs.

Where a role's workers are.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from rlflow.schema import Count, Section

Auto = Literal["auto"]
Offload = Literal["none", "optimizer", "weights"]
Attention = Literal["sdpa", "flash_attention_2"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Resources(Section):
    """What a role may pin. What is ``auto`` the planner decides; a value is a constraint."""

    gpus: Count | Auto = "auto"
    colocate: tuple[str, ...] | Auto = "auto"
    """Roles that use the same GPUs; ``[]``: GPUs of its own."""
    label: str | None = None
    """Only hosts with this label, or of this kind of GPU."""
    tensor_parallel_size: Count | Auto = "auto"
    pipeline_parallel_size: Count | Auto = "auto"
    data_parallel_size: Count | Auto = "auto"
    sequence_parallel_size: Count | Auto = "auto"
    zero_stage: Annotated[int, Ge(0), Le(3)] | Auto = "auto"
    offload: Offload | Auto = "auto"
    micro_batch_tokens: Count | Auto = "auto"
    """Tokens that go through the model at once."""
    gradient_checkpointing: bool | Auto = "auto"
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | Auto = "auto"
    attention: Attention | Auto = "auto"
    """Of engines that run a model of transformers: torch's own, or flash-attn, which ``auto`` takes where it is
    installed and the GPU and the model's type have it."""
    eager: bool | Auto = "auto"
    """Of an engine that serves: without CUDA graphs, which it has on GPUs by itself."""
    deterministic: bool = False
    """A role that trains on GPUs uses operations that give the same bits every time, where torch and flash-attn have
    them. It is slower; on CPUs it changes nothing."""
    timeout_minutes: Annotated[float, Gt(0)] = 10.0
    """The ranks of a role that trains or scores wait so long for one another in an exchange before the run ends."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Every degree that was chosen. None: the engine has no such thing."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel_size: int = 1
    expert_parallel_size: int = 1
    zero_stage: int | None = None
    offload: Offload | None = None
    micro_batch_tokens: int
    gradient_checkpointing: bool = False
    gpu_memory_utilization: float | None = None
    eager: bool | None = None
    """Without CUDA graphs."""
    sleeps: bool = False
    """It gives its memory up to the host while other roles on its GPUs work."""

    @property
    def num_gpus(self) -> int:
        return self.data_parallel_size * self.model_parallel_size * self.sequence_parallel_size

    @property
    def model_parallel_size(self) -> int:
        """GPUs that the weights of one copy lie on, however their state is sharded."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


Share = list[tuple[str, tuple[int, ...]]]
"""Of a pool its hosts, each with the GPUs it has there."""


@dataclass(frozen=True)
class Bundle:
    """The resources of one worker's share: one GPU."""

    host: str
    gpu: int


@dataclass(frozen=True)
class Worker:
    bundles: tuple[Bundle, ...]
    """Tensor-parallel groups one after another, each inside one host."""


@dataclass(frozen=True)
class RolePlacement:
    layout: Layout
    workers: tuple[Worker, ...]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        return tuple(bundle for worker in self.workers for bundle in worker.bundles)


def workers(layout: Layout, share: Share) -> Iterator[Worker]:
    """Groups lie inside hosts, one after another; a worker of several pipeline stages has as many groups."""
    size = layout.tensor_parallel_size
    together = size * layout.sequence_parallel_size
    groups = []
    for host, gpus in share:
        bundles = [Bundle(host, gpu) for gpu in gpus[: len(gpus) // together * together]]
        groups += [bundles[start : start + size] for start in range(0, len(bundles), size)]
    stages = layout.pipeline_parallel_size
    for first in range(0, layout.data_parallel_size * layout.sequence_parallel_size * stages, stages):
        yield Worker(tuple(bundle for group in groups[first : first + stages] for bundle in group))
