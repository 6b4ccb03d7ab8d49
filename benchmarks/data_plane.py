"""Measure what it costs to move a batch between processes: ``python -m benchmarks.data_plane [--json FILE]``.

The batch has 4096 samples of up to 8192 tokens (long-tailed, 1800 on average) and six fields with a value per token.
Each of four workers on one Ray has generated a quarter of the batch, row by row. It makes arrays of its part, the whole
batch is redistributed over the ranks, and every value is read. These methods are measured in turn:

- ``packed``: rlflow's method.
- ``padded torch``, ``padded numpy``: through one controller, as many systems do. Each worker returns its quarter,
  padded to the longest of the batch, with 64-bit integers and an attention mask; this process concatenates the quarters
  and sends each rank its chunk. Ray maps numpy arrays into the receiver's memory, and copies torch tensors.
- ``padded torch, by reference``, ``padded numpy, by reference``: the same bytes in micro-batches of 32 rows, which go
  directly from worker to worker; this process holds only references.
- ``packed, by reference``: the same without padding. This is what verl does with references in Ray's store.
- ``TransferQueue``: the data plane that verl offers, with jagged tensors and a storage process for each worker. It runs
  in a Ray of its own, and its clearing does not count. The first run installs it below the environment's folder.

Each method runs twice in a row with free memory, and the second time counts. The lower bound is one copy of the packed
bytes within a process, to new memory as any second copy needs it.

Then whole steps of GRPO run in rlflow's own loop, with engines that generate without a model: 256 x 16 and 512 x 32
samples with such lengths. The benchmark compares the bytes in the object store with the plan's, and counts the bytes
that were spilled and the bytes of all messages of the controller.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import rlflow
from benchmarks.long_writer import LONGEST, WriterWorker, lengths_of
from benchmarks.plain_batches import Controller, Padding, checksum
from benchmarks.reporting import Goal, finish
from benchmarks.traffic import counted
from benchmarks.transfer_queue import QueueWorker, TransferQueue, transfer_queue
from rlflow.batch import Batch, Packed, Sequences
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.runtime.objects.object_process import ObjectProcess
from rlflow.runtime.objects.ray_api import import_ray, wait_all
from rlflow.runtime.objects.sharding import divide_rows
from rlflow.runtime.objects.slices import SharedBatch
from rlflow.runtime.objects.store import blocks_of
from rlflow.runtime.ray.cluster.connection import simulated
from rlflow.runtime.ray.engine_set import RayEngines
from rlflow.runtime.ray.process import as_future
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training

WORKERS, SAMPLES = 4, 4096
MICRO_BATCH_TOKENS = 32768
REPEATS = 5
# Prompts and responses to each of the steps that are measured.
SIZES = ((256, 16), (512, 32))
STORE = 3_000_000_000
# The padded batch exists twice while it passes through the controller.
STORE_OF_WAYS = 6_000_000_000


@dataclass(frozen=True, eq=False, kw_only=True)
class Six(Batch):
    """A batch with two integer fields and four float fields."""

    keys: NDArray[np.int64]
    ids: Packed
    versions: Packed
    logprobs: Packed
    reference: Packed
    values: Packed
    returns: Packed


WHOLE, REAL = ("ids", "versions"), ("logprobs", "reference", "values", "returns")


class Holder(Padding):
    """A worker's part of the batch, row by row, as an engine has generated it."""

    def __init__(self, rank: int, lengths: NDArray[np.int64]) -> None:
        rows = np.array_split(np.arange(len(lengths)), WORKERS)[rank]
        draw = np.random.default_rng(rank)
        self.keys = np.stack([np.zeros_like(rows), rows // 16, rows % 16], axis=1)
        self.rows: dict[str, list[NDArray[Any]]] = {
            name: [draw.integers(1, 1 << 20, length, np.int32) for length in lengths[rows]] for name in WHOLE
        }
        self.rows |= {name: [draw.random(length, np.float32) for length in lengths[rows]] for name in REAL}
        super().__init__(self.rows, int(lengths.max()))

    def make(self) -> Six:
        columns = {name: Packed.from_rows(rows, rows[0].dtype) for name, rows in self.rows.items()}
        return Six(keys=self.keys, **columns)

    def read_packed(self, given: Six) -> int:
        """Return a checksum over every value, read in micro-batches as engines read."""
        total = 0
        cuts = np.flatnonzero(np.diff(np.cumsum(given.ids.lengths) // MICRO_BATCH_TOKENS)) + 1
        for rows in np.split(np.arange(len(given)), cuts):
            part = given.take(rows)
            for name in self.rows:
                total ^= checksum(getattr(part, name).values)
        return total


class Workers:
    """Four worker processes, which reuse memory as rlflow's do, or allocate it as Python does."""

    def __init__(self, lengths: NDArray[np.int64], *, reuse_memory: bool) -> None:
        remote = import_ray().remote(ObjectProcess).options(num_cpus=0)
        self.actors = [remote.remote() for _ in range(WORKERS)]
        if reuse_memory:
            import_ray().get([actor.reuse_memory.remote() for actor in self.actors])
        holders = [import_ray().cloudpickle.dumps(Holder(rank, lengths)) for rank in range(WORKERS)]
        import_ray().get([actor.load_object.remote(holder) for actor, holder in zip(self.actors, holders, strict=True)])

    def call(self, rank: int, method: str, *arguments: Any) -> Any:
        return as_future(self.actors[rank].call_and_put.remote(True, method, *arguments), f"worker {rank}")

    def made(self) -> Six:
        return Six.concatenate(wait_all([self.call(rank, "make") for rank in range(WORKERS)]))

    def padding(self) -> int:
        """Return the number of values in the store that belong to no row."""
        batch = self.made()
        rows = sum(int(getattr(batch, name).lengths.sum()) for name in (*WHOLE, *REAL))
        return sum(block.count for block in blocks_of(batch)) - rows

    def ours(self) -> int:
        batch = self.made()
        whole = SharedBatch(batch)
        cut = divide_rows(Sequences(keys=batch.keys, prompt_ids=batch.ids, response_ids=batch.ids), WORKERS)
        sums = [self.call(rank, "read_packed", whole.slice(rows).to_message()) for rank, rows in enumerate(cut)]
        return int(np.bitwise_xor.reduce(wait_all(sums)))


def settled() -> None:
    """Wait until the object store is empty; Ray frees objects once a second."""
    deadline = time.monotonic() + 20
    while store_stats().object_store_bytes_used > 1 << 20:
        assert time.monotonic() < deadline, "the object store is not empty after 20 s"
        time.sleep(0.05)


def store_stats() -> Any:
    """Return Ray's statistics of the first host's object store."""
    from ray._private.internal_api import node_stats

    node = import_ray().nodes()[0]
    stats = node_stats(node["NodeManagerAddress"], node["NodeManagerPort"], include_memory_info=False)
    return stats.store_stats


def seconds(way: Callable[[], int]) -> tuple[float, int]:
    """Run a method twice; return the seconds of the second time, and the checksum."""
    for _ in range(2):
        settled()
        began = time.perf_counter()
        result = way()
        took = time.perf_counter() - began
    return took, result


def copied(source: list[NDArray[Any]], to_new: bool) -> float:
    """Return the seconds of one copy, to new or to used memory."""
    targets = source
    if not to_new:
        targets = [array.copy() for array in source]
    began = time.perf_counter()
    for array, used in zip(source, targets, strict=True):
        target = np.frombuffer(mmap(-1, array.nbytes), array.dtype) if to_new else used
        target[:] = array
    return time.perf_counter() - began


def moved_by_queue() -> tuple[float, int]:
    """Return the median seconds of TransferQueue, and the checksum."""
    lengths = lengths_of(SAMPLES)
    holders = [Holder(rank, lengths) for rank in range(WORKERS)]
    keys = [["_".join(map(str, key)) for key in holder.keys] for holder in holders]
    taken = []
    with transfer_queue(WORKERS, STORE):
        queue = TransferQueue([QueueWorker(key, each.rows) for key, each in zip(keys, holders, strict=True)], keys)
        del holders
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            result = queue.move()
            taken.append(time.perf_counter() - began)
            queue.clear()
    return median(taken[1:]), result


def moved() -> tuple[dict[str, float], int, int]:
    """Return the median seconds of every method, the padding in rlflow's stored batch, and the checksum."""
    lengths = lengths_of(SAMPLES)
    taken: dict[str, list[float]] = {}
    sums = set()
    workers = Workers(lengths, reuse_memory=True)
    controller = Controller(Workers(lengths, reuse_memory=False).actors)
    ways: Mapping[str, Callable[[], int]] = {
        "packed": workers.ours,
        "padded torch": lambda: controller.through_it(as_torch=True),
        "padded numpy": lambda: controller.through_it(as_torch=False),
        "padded torch, by reference": lambda: controller.by_reference(as_torch=True),
        "padded numpy, by reference": lambda: controller.by_reference(as_torch=False),
        "packed, by reference": controller.packed_by_reference,
    }
    source = [np.ones(int(lengths.sum()), np.int32) for _ in (*WHOLE, *REAL)]
    for _ in range(REPEATS):
        for name, way in ways.items():
            took, result = seconds(way)
            taken.setdefault(name, []).append(took)
            sums.add(result)
        taken.setdefault("memcpy", []).append(copied(source, to_new=True))
        taken.setdefault("memcpy to memory in use", []).append(copied(source, to_new=False))
    assert len(sums) == 1, "all methods must read the same values"
    return {name: median(values) for name, values in taken.items()}, workers.padding(), sums.pop()


@dataclass(frozen=True)
class Steps:
    """The measurements for one size of a step."""

    samples: int
    seconds: float
    stored: int
    """Bytes of all edges in the store."""
    peak_over_predicted: float
    controller_bytes: int
    """Bytes of the controller's messages in a step."""


def plan_of(prompts: int, group_size: int) -> Plan:
    """Return the plan of steps on a host with two CPUs, where every role uses both."""
    pins = [f"roles.{role}.{pin}" for role in ("actor", "rollout", "reference") for pin in ("engine=fake", "gpus=2")]
    quantiles = np.quantile(lengths_of(20000), (np.arange(200) + 0.5) / 200)
    recipe = rlflow.load(
        [
            "recipe=grpo_tiny_cluster",
            *pins,
            "models.policy={recipe: null, random_weights: true, characters: '0123456789+='}",
            "models.policy.architecture={model_type: qwen3, hidden_size: 64, intermediate_size: 128,"
            " num_attention_heads: 2, num_hidden_layers: 2, num_key_value_heads: 1, head_dim: 32, vocab_size: 13,"
            f" max_position_embeddings: {LONGEST + 64}}}",
            f"data.batch_size={prompts}",
            f"graph.rollouts={{group_size: {group_size}, max_tokens: {LONGEST}}}",
            f"expect.response_tokens={[round(each) for each in quantiles]}",
        ]
    )
    return rlflow.compile(recipe, "1x2@cpu")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of both sizes of a step."""
    yield from (plan_of(*size) for size in SIZES)


def steps_of(prompts: int, group_size: int, steps: int = 5) -> Steps:
    """Measure steps of this size."""
    plan = plan_of(prompts, group_size)
    recipe, models = plan.recipe, models_in_use(plan.recipe)
    data_options = recipe.data
    tokenizer = load_tokenizer("policy", models["policy"])
    rows = load_rows(data_options, "split")
    data = open_training_data(data_options, tokenizer, rows, recipe.seed)
    with (
        patch("rlflow.runtime.ray.role_workers.EngineWorker", WriterWorker),
        TemporaryDirectory() as folder,
        RayRuntime().start(plan, models, Path(folder)) as engines,
    ):
        assert isinstance(engines, RayEngines)
        hosted = engines.place_with_tokens(data)
        training = Training.of(plan, engines, hosted)
        took = []
        train_step(training, 0)
        with counted() as traffic:
            train_step(training, 1)
        for step in range(steps):
            settled()
            took.append(train_step(training, step + 2)["seconds"])
        (peak,) = engines.store_usage.peaks.values()
        stored = round(sum(engines.store_use().edges.values()))
    (predicted,) = plan.prediction.data.store_peak_gib.values()
    samples = prompts * group_size
    return Steps(samples, median(took), stored, peak / (predicted * 2**30), traffic.nbytes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    json_file = parser.parse_args().json
    cluster = plan_of(*SIZES[0]).cluster
    with simulated(cluster, STORE_OF_WAYS):
        ways, padding, read = moved()
        spilled_by_ways = store_stats().spilled_bytes_total
    ways["TransferQueue"], read_from_queue = moved_by_queue()
    assert read_from_queue == read, "all methods must read the same values"
    with simulated(cluster, STORE):
        small, large = (steps_of(*size) for size in SIZES)
        spilled = spilled_by_ways + store_stats().spilled_bytes_total
    table = Table("method", "seconds", "relative to packed")
    for name, took in ways.items():
        table.add_row(name, f"{took:.3f}", f"{took / ways['packed']:.2f}")
    Console().print(table)
    table = Table("samples", "seconds", "stored", "peak / predicted", "controller messages", "bytes per sample")
    for each in (small, large):
        peak, messages = f"{each.peak_over_predicted:.3f}", f"{each.controller_bytes / 1024:.0f} KiB"
        row = (f"{each.seconds:.2f}", f"{each.stored / 1e6:.0f} MB", peak, messages)
        table.add_row(str(each.samples), *row, f"{each.controller_bytes / each.samples:.1f}")
    Console().print(table)
    worst = max(small.peak_over_predicted, large.peak_over_predicted, key=lambda ratio: abs(ratio - 1))
    figures = {
        "transfer_queue_over_rlflow": ways["TransferQueue"] / ways["packed"],
        "packed_references_over_rlflow": ways["packed, by reference"] / ways["packed"],
        "padded_torch_over_packed": ways["padded torch"] / ways["packed"],
        "padded_numpy_over_packed": ways["padded numpy"] / ways["packed"],
        "padded_torch_by_reference_over_packed": ways["padded torch, by reference"] / ways["packed"],
        "padded_numpy_by_reference_over_packed": ways["padded numpy, by reference"] / ways["packed"],
        "packed_over_memcpy": ways["packed"] / ways["memcpy"],
        "controller_bytes_per_sample": max((each.controller_bytes - 65536) / each.samples for each in (small, large)),
        "pad_tokens": padding,
        "spilled_bytes": float(spilled),
        "store_peak_over_predicted": worst,
        "time_over_bytes_growth": (large.seconds / small.seconds) / (large.stored / small.stored),
    }
    met = {
        "transfer_queue_over_rlflow": ("at least 10", figures["transfer_queue_over_rlflow"] >= 10),
        "packed_references_over_rlflow": ("at least 1", figures["packed_references_over_rlflow"] >= 1),
        "padded_torch_over_packed": ("at least 15", figures["padded_torch_over_packed"] >= 15),
        "padded_numpy_over_packed": ("at least 5", figures["padded_numpy_over_packed"] >= 5),
        "padded_torch_by_reference_over_packed": ("for comparison", True),
        "padded_numpy_by_reference_over_packed": ("for comparison", True),
        "packed_over_memcpy": ("at most 3", figures["packed_over_memcpy"] <= 3),
        "controller_bytes_per_sample": ("at most 100 above 64 KiB", figures["controller_bytes_per_sample"] <= 100),
        "pad_tokens": ("none", figures["pad_tokens"] == 0),
        "spilled_bytes": ("none", figures["spilled_bytes"] == 0),
        "store_peak_over_predicted": ("0.9 to 1.1", 0.9 <= worst <= 1.1),
        "time_over_bytes_growth": ("at most 1", figures["time_over_bytes_growth"] <= 1),
    }
    return finish("data_plane", figures, {name: Goal(*goal) for name, goal in met.items()}, json_file)


if __name__ == "__main__":
    raise SystemExit(main())
