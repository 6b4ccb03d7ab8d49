"""Where a role's workers are."""

from collections.abc import Iterator
from dataclasses import dataclass

from rlflow.resources.layout import Layout

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
