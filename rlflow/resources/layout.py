"""The layout of a role: what a recipe may pin, how the planner splits the role over GPUs, and where its workers are."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from rlflow.schema import Count, Minutes, Section

Auto = Literal["auto"]
Offload = Literal["none", "optimizer", "weights"]
OFFLOAD_STAGES: Mapping[Offload, int] = {"none": 0, "optimizer": 1, "weights": 3}
"""The first ZeRO stage in which the ranks of a trained role shard what is offloaded."""
Attention = Literal["sdpa", "flash_attention_2"]
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Resources(Section):
    """The resource options of a role. The planner decides what is ``auto``; any other value is a constraint."""

    gpus: Count | Auto = "auto"
    """The number of GPUs."""
    colocate: tuple[str, ...] | Auto = "auto"
    """Roles that share the same GPUs; ``[]``: GPUs of its own."""
    label: str | None = None
    """Use only hosts with this label or kind of GPU."""
    tensor_parallel_size: Count | Auto = "auto"
    """GPUs of one host that divide each layer among them."""
    pipeline_parallel_size: Count | Auto = "auto"
    """Groups of GPUs that hold one part of an engine's layers each. If a host has too few GPUs for all, they are spread
    evenly over several."""
    data_parallel_size: Count | Auto = "auto"
    """Ranks or engines that each work on their own part of a batch."""
    sequence_parallel_size: Count | Auto = "auto"
    """GPUs of one host that divide the tokens of each sequence among them."""
    expert_parallel_size: Count | Auto = "auto"
    """GPUs of one host that divide the experts of each layer among them. Ranks that train exchange tokens. In an engine
    the GPUs are those of a tensor-parallel group, with whole experts in place of a part of each."""
    num_replicas: Count | Auto = "auto"
    """Copies of a sharded model, each on its part of the data-parallel ranks: with one per host, weights are gathered
    inside hosts."""
    zero_stage: Annotated[int, Ge(0), Le(3)] | Auto = "auto"
    """The state that ranks divide among them: 0 nothing, 1 the optimizer state, 2 also gradients, 3 also weights."""
    offload: Offload | Auto = "auto"
    """The state that the host's memory holds in place of the GPU's: the optimizer state, or also weights."""
    micro_batch_tokens: Count | Auto = "auto"
    """Tokens in one pass through the model."""
    micro_batch_patches: Count | Auto = "auto"
    """Patches of images in one pass: what the part of a model that reads images divides them into."""
    gradient_checkpointing: bool | Auto = "auto"
    """Compute activations again in the backward pass, which takes less memory and more time."""
    kept_layers: Annotated[int, Ge(0)] | Auto = "auto"
    """The last layers, whose activations are kept in spite of ``gradient_checkpointing``. ``auto`` keeps none where
    that is pinned."""
    gpu_memory_utilization: Annotated[float, Gt(0), Le(1)] | Auto = "auto"
    """The share of a GPU's memory that an engine which generates may use."""
    attention: Attention | Auto = "auto"
    """The attention kernel of engines that run a transformers model: torch's own, or flash-attn. ``auto`` takes
    flash-attn where it is installed and supports the GPU and the model's type."""
    eager: bool | Auto = "auto"
    """Serve without CUDA graphs; by default an engine uses them on GPUs."""
    deterministic: bool = False
    """Train on GPUs with operations that give the same bits every time, as far as torch and flash-attn have them. This
    is slower; on CPUs it changes nothing."""
    timeout_minutes: Minutes = 10.0
    """How long the ranks of a role that trains or scores wait for each other in an exchange before the run fails."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The degrees that the planner chose. None: the engine has no such option."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    sequence_parallel_size: int = 1
    expert_parallel_size: int = 1
    hosts_per_engine: int = 1
    """Hosts over which the pipeline stages of an engine are spread, evenly."""
    num_replicas: int | None = None
    """Copies of the sharded state among the data-parallel ranks."""
    reduces_once: bool = False
    """Ranks keep the gradients of all weights until the last pass of a step, and reduce them once."""
    zero_stage: int | None = None
    offload: Offload | None = None
    micro_batch_tokens: int
    micro_batch_patches: int | None = None
    """Patches of images in a pass, unless a single prompt has more. None: only tokens limit them."""
    gradient_checkpointing: bool = False
    kept_layers: int = 0
    """The last layers, whose activations are kept in spite of ``gradient_checkpointing``."""
    gpu_memory_utilization: float | None = None
    eager: bool | None = None
    """The engine runs without CUDA graphs."""
    sleeps: bool = False
    """The role moves its memory to the host while other roles on its GPUs work."""
    stays: bool = False
    """The role keeps its memory while other roles on its GPUs work, because all of them fit side by side. Roles that
    neither sleep nor stay give up what torch caches for them."""
    receives_awake: bool = False
    """The role is awake, with all of its memory, when it receives weights. Otherwise it wakes in two parts: its weights
    before they arrive, and all else when the role that sends them has given up its buffers."""

    @property
    def num_gpus(self) -> int:
        """Return the number of GPUs that the role uses."""
        return self.data_parallel_size * self.group_size * self.hosts_per_engine

    @property
    def num_shards(self) -> int:
        """Return the number of parts into which the state is divided where it is sharded."""
        return self.data_parallel_size * self.sequence_parallel_size // (self.num_replicas or 1)

    @property
    def group_size(self) -> int:
        """Return the number of GPUs of a group that must be inside one host."""
        return self.model_parallel_size * self.sequence_parallel_size // self.hosts_per_engine

    @property
    def ranks_per_share(self) -> int:
        """Return the number of workers with the same rows: those of a group, each with a part of the work."""
        return self.model_parallel_size * self.sequence_parallel_size // self.gpus_per_worker

    @property
    def gpus_per_worker(self) -> int:
        """Return the number of GPUs of a worker: those of an engine, or one where the workers are ranks of torch."""
        return self.model_parallel_size if self.num_replicas is None else 1

    @property
    def model_parallel_size(self) -> int:
        """Return the number of GPUs that hold one copy of the weights, however its state is sharded."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def recomputed_share(self, num_layers: int) -> float:
        """Return the share of a model's layers whose activations are computed again in the backward pass."""
        return 1 - self.kept_layers / num_layers if self.gradient_checkpointing else 0.0


def hosts_of_engine(stages: int, stage_gpus: int, largest_group: int) -> int:
    """Return the fewest hosts whose groups of at most ``largest_group`` GPUs hold an engine's stages evenly."""
    even = (hosts for hosts in range(1, stages) if stages % hosts == 0)
    return next((hosts for hosts in even if stages // hosts * stage_gpus <= largest_group), stages)


PoolGpus = list[tuple[str, tuple[int, ...]]]
"""The GPUs of a pool: its hosts, each with the ids of its GPUs."""


@dataclass(frozen=True)
class Bundle:
    """The resources of one worker's share: one GPU of a host."""

    host: str
    gpu: int


@dataclass(frozen=True)
class Worker:
    """A process of a role, or the processes of one engine, with their GPUs."""

    bundles: tuple[Bundle, ...]
    """Its GPUs, host by host: of an engine, a tensor-parallel group for each pipeline stage."""

    def on_hosts(self, layout: Layout) -> list[tuple[Bundle, ...]]:
        """Return its GPUs on each host of its engine."""
        size = len(self.bundles) // layout.hosts_per_engine
        return [self.bundles[start : start + size] for start in range(0, len(self.bundles), size)]


@dataclass(frozen=True)
class RolePlacement:
    """The layout of a role and the GPUs of its workers."""

    layout: Layout
    workers: tuple[Worker, ...]

    @property
    def bundles(self) -> tuple[Bundle, ...]:
        """Return the GPUs of all workers."""
        return tuple(bundle for worker in self.workers for bundle in worker.bundles)


def workers(layout: Layout, pool: PoolGpus) -> Iterator[Worker]:
    """Yield the workers of a role on the GPUs of its pool. Groups stay inside hosts."""
    size, together = layout.gpus_per_worker, layout.group_size
    bundles = [Bundle(host, gpu) for host, gpus in pool for gpu in gpus[: len(gpus) // together * together]]
    for start in range(0, layout.num_gpus, size):
        yield Worker(tuple(bundles[start : start + size]))
