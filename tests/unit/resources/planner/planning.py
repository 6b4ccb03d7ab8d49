"""Demands, tasks and clusters for tests of planning."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlflow.engines.sharded.settings import TRAINING_MEMORY
from rlflow.resources.cluster import Cluster, Gpu, Host
from rlflow.resources.demand import Demand
from rlflow.resources.layout import Resources, RolePlacement
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.candidate import SearchResult
from rlflow.resources.planner.search.search import Search
from rlflow.resources.planner.simulate import Schedule, StepScheduler
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.workload import Task, TaskKind, WeightSync, Workload

ALL = frozenset({"data", "tensor", "pipeline", "sequence"})
# Qwen2.5-7B, and a model of which a GPU holds any number.
SEVEN_B = Architecture(
    model_type="qwen2",
    hidden_size=3584,
    intermediate_size=18944,
    num_hidden_layers=28,
    num_attention_heads=28,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=152064,
    max_position_embeddings=32768,
)
SMALL = Architecture(
    model_type="llama",
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=24,
    num_key_value_heads=24,
    head_dim=4,
    vocab_size=64,
    max_position_embeddings=4096,
)
H100 = Gpu(
    memory_gib=79.6,
    peak_tflops={"bfloat16": 989.4},
    memory_gb_s=3350,
    link_gb_s=450,
    network_gb_s=50,
    source="test",
)


def cluster(*gpus: int, **host: Any) -> Cluster:
    hosts = tuple(Host(name=f"host-{i}", gpus=count, gpu="h100", **host) for i, count in enumerate(gpus))
    return Cluster(hosts=hosts, gpus={"h100": H100})


def demand(role: str, model: Architecture | None = SMALL, parallel: frozenset[str] = ALL, **wants: Any) -> Demand:
    """Return a demand: ``actor`` and ``critic`` train, ``rollout`` generates, others score."""
    return Demand(
        role=role,
        engine="fake",
        parallel=parallel,
        job="train" if role.startswith(("actor", "critic")) else "serve" if role.startswith("rollout") else "score",
        architecture=model,
        training=replace(TRAINING_MEMORY, logits=14, logits_at_once=float("inf")),
        pins=Resources(**wants),
    )


def task(node: str, role: str, kind: TaskKind, *after: str, longest: int = 1024, samples: int = 256) -> Task:
    lengths = Lengths.log_normal(0.4 * longest, 0.75 * longest)
    return Task(
        node=node,
        role=role,
        kind=kind,
        after=after,
        samples=samples,
        group_size=8,
        prompts=Lengths.log_normal(0.1 * longest, 0.25 * longest),
        responses=lengths,
        longest=longest,
    )


def workload(demands: Sequence[Demand], longest: int = 1024, samples: int = 256) -> Workload:
    """Return a step that generates, then scores, then trains. The rollout roles follow the first that trains."""
    generating = [d.role for d in demands if d.job == "serve"]
    training = [d.role for d in demands if d.job == "train"]
    scoring = [d.role for d in demands if d.job == "score"]
    sizes: dict[str, Any] = {"longest": longest, "samples": samples}
    tasks = [task(role, role, "generate", **sizes) for role in generating]
    tasks += [task(role, role, "score", *generating, **sizes) for role in scoring]
    tasks += [task(role, role, "update", *generating, *scoring, **sizes) for role in training]
    syncs = tuple(WeightSync(source=training[0], target=role) for role in generating if training)
    return Workload(tasks=tuple(tasks), weight_syncs=syncs)


def search(demands: Sequence[Demand], on: Cluster, **sizes: int) -> Search:
    return Search(demands, workload(demands, **sizes), on, {})


def place(demands: Sequence[Demand], on: Cluster, **sizes: int) -> SearchResult | None:
    return search(demands, on, **sizes).best()


def check(placed: RolePlacement, on: Cluster) -> None:
    """Check that each tensor- and sequence-parallel group is inside one host, and each GPU is free and taken once."""
    size = placed.layout.tensor_parallel_size * placed.layout.sequence_parallel_size
    assert placed.layout.num_gpus == len(placed.bundles)
    assert len(set(placed.bundles)) == len(placed.bundles)
    for start in range(0, len(placed.bundles), size):
        assert len({bundle.host for bundle in placed.bundles[start : start + size]}) == 1
    usable = {(host.name, gpu) for host in on.hosts for gpu in host.usable}
    assert {(bundle.host, bundle.gpu) for bundle in placed.bundles} <= usable


def simulate(work: Workload, seconds: Mapping[str, float], pool_of: Mapping[str, int]) -> Schedule:
    """Schedule a step: ``seconds`` has every node and weight sync, ``pool_of`` the pool of each role."""
    return StepScheduler(work, pool_of).schedule(seconds)
