"""Compare placement with pinned sizes with brute force: ``python -m benchmarks.pins [--json FILE] [--cases 2000]``.

Every case is a random cluster, with uneven and partly occupied hosts, two kinds of GPU and a label, and one to four
roles of a tiny model with random pins. Plans are compared with ``benchmarks.brute_force``. A plan is illegal if it
breaks a pin, puts a group on two hosts, uses a GPU that is taken, reserved or without the label, or gives a GPU to two
pools.
"""

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.brute_force import faults, is_feasible
from benchmarks.reporting import Goal, finish
from rlflow.errors import PlacementError
from rlflow.recipe.compose import load_cluster
from rlflow.resources.cluster import Cluster, Gpu, Host
from rlflow.resources.demand import Demand, RoleJob
from rlflow.resources.layout import Resources
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.search.search import Search
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.workload import Task, TaskKind, WeightSync, Workload

_MODEL = Architecture(
    model_type="llama",
    hidden_size=96,
    intermediate_size=192,
    num_hidden_layers=8,
    num_attention_heads=24,
    num_key_value_heads=24,
    head_dim=4,
    vocab_size=64,
    max_position_embeddings=4096,
)
_WAYS = ("tensor", "pipeline", "data", "sequence")
_TRAINER, _SERVER = frozenset({"data", "sequence"}), frozenset({"data", "tensor", "pipeline"})
_ENGINES: Mapping[str, Sequence[frozenset[str]]] = {
    "actor": (_TRAINER, _TRAINER, frozenset({"sequence"}), frozenset(_WAYS)),
    "critic": (_TRAINER, _TRAINER, frozenset(_WAYS)),
    "reference": (_TRAINER, frozenset({"sequence"}), frozenset()),
    "rollout": (_SERVER, _SERVER, _SERVER, frozenset(_WAYS), frozenset()),
}
_JOBS: Mapping[str, RoleJob] = {"actor": "train", "critic": "train", "reference": "score", "rollout": "serve"}
_KINDS = ("a100_80gb", "h100_80gb")


@dataclass(frozen=True)
class Case:
    cluster: Cluster
    demands: tuple[Demand, ...]

    def __str__(self) -> str:
        hosts = ", ".join(
            f"{host.name} {host.gpus}x{host.gpu} usable {host.usable} {host.labels}" for host in self.cluster.hosts
        )
        roles = "; ".join(f"{demand.role} {sorted(demand.parallel)} {_pinned(demand.pins)}" for demand in self.demands)
        return f"{hosts} | {roles}"


def _pinned(pins: Resources) -> str:
    given = Resources()
    changed = {
        of.name: getattr(pins, of.name) for of in fields(pins) if getattr(pins, of.name) != getattr(given, of.name)
    }
    return " ".join(f"{name}={value}" for name, value in changed.items())


def random_cases(count: int, seed: int) -> Iterator[Case]:
    draw = random.Random(seed)
    gpus = {kind: load_cluster(f"1x8@{kind}").gpus[kind] for kind in _KINDS}
    for _ in range(count):
        cluster = _random_cluster(draw, gpus)
        names = draw.sample(sorted(_ENGINES), draw.choices((1, 2, 3, 4), (15, 40, 30, 15))[0])
        yield Case(cluster, tuple(_random_demand(draw, role, names, cluster) for role in sorted(names)))


def _random_cluster(draw: random.Random, gpus: Mapping[str, Gpu]) -> Cluster:
    while True:
        hosts = []
        for index in range(draw.choice((1, 2, 2, 3, 3, 4))):
            size = draw.choice((8, 8, 8, 7, 6, 5, 4, 4, 3, 2, 1))
            free = tuple(gpu for gpu in range(size) if draw.random() < 0.7) if draw.random() < 0.3 else None
            hosts.append(
                Host(
                    name=f"host-{index}",
                    gpus=size,
                    gpu=draw.choice(_KINDS),
                    free=free,
                    reserved=draw.random() < 0.05,
                    labels=("fast",) if draw.random() < 0.4 else (),
                )
            )
        if any(host.usable for host in hosts):
            return Cluster(hosts=tuple(hosts), gpus=gpus)


def _random_demand(draw: random.Random, role: str, roles: Sequence[str], cluster: Cluster) -> Demand:
    parallel = draw.choice(_ENGINES[role])
    total = sum(len(host.usable) for host in cluster.hosts)
    degrees = {}
    for way, sizes in (("tensor", (1, 2, 2, 3, 4, 4, 6, 8)), ("pipeline", (1, 2, 2, 3)), ("sequence", (1, 2, 2, 3, 4))):
        if way in parallel and draw.random() < (0.5 if way == "tensor" else 0.15):
            degrees[way] = draw.choice(sizes)
    group = prod(degrees.values())
    gpus = draw.randint(1, total) if draw.random() < 0.4 else None
    if gpus is not None and draw.random() < 0.8:
        gpus = max(1, gpus // group) * group
    if "data" in parallel and draw.random() < 0.25:
        most = max(1, (gpus or total) // group)
        divisors = [copies for copies in range(1, most + 1) if gpus is None or gpus % copies == 0]
        degrees["data"] = draw.choice(divisors)
    others = [other for other in roles if other != role]
    wants: dict[str, Any] = {f"{way}_parallel_size": degree for way, degree in degrees.items()}
    if draw.random() < 0.3:
        wants["colocate"] = (
            () if not others or draw.random() < 0.5 else tuple(draw.sample(others, draw.randint(1, len(others))))
        )
    if gpus is not None:
        wants["gpus"] = gpus
    if draw.random() < 0.25:
        wants["label"] = draw.choice((*_KINDS, "fast", "fast"))
    return Demand(
        role=role,
        engine="fake",
        parallel=parallel,
        job=_JOBS[role],
        architecture=_MODEL,
        pins=Resources(**wants),
    )


def _workload(demands: Sequence[Demand]) -> Workload:
    """Return a small step: the rollouts are generated, then scored, then trained on."""
    generated = tuple(demand.role for demand in demands if demand.job == "serve")
    scored = tuple(demand.role for demand in demands if demand.job == "score")
    trained = tuple(demand.role for demand in demands if demand.job == "train")
    kinds: tuple[tuple[TaskKind, tuple[str, ...], tuple[str, ...]], ...] = (
        ("generate", generated, ()),
        ("score", scored, generated),
        ("update", trained, (*generated, *scored)),
    )
    tasks = tuple(
        Task(
            node=role,
            role=role,
            kind=kind,
            after=after,
            samples=256,
            group_size=8,
            prompts=Lengths.log_normal(64, 128),
            responses=Lengths.log_normal(200, 384),
            longest=512,
        )
        for kind, roles, after in kinds
        for role in roles
    )
    return Workload(
        tasks=tasks, weight_syncs=tuple(WeightSync(source=trained[0], target=role) for role in generated if trained)
    )


@dataclass
class Outcome:
    """Counts over all cases."""

    cases: int = 0
    feasible: int = 0
    refused_feasible: int = 0
    illegal: int = 0


def tried(cases: Iterator[Case]) -> Outcome:
    """Plan every case and compare with brute force; print what is wrong."""
    outcome = Outcome()
    for case in cases:
        feasible = is_feasible(case.demands, case.cluster)
        try:
            result = Search(case.demands, _workload(case.demands), case.cluster, {}).best()
            reason = "nothing fits"
        except PlacementError as error:
            result, reason = None, str(error).splitlines()[0]
        outcome.cases += 1
        outcome.feasible += feasible
        if feasible and result is None:
            outcome.refused_feasible += 1
            print(f"refused: {case}: {reason}")
        wrong = []
        if result is not None:
            wrong = faults(case.demands, case.cluster, result.candidate.partition, result.roles)
            wrong += [] if feasible else ["brute force finds no way"]
        if wrong:
            outcome.illegal += 1
            print(f"illegal: {case}: {', '.join(wrong)}")
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    outcome = tried(random_cases(arguments.cases, arguments.seed))
    figures = {name: getattr(outcome, name) for name in ("cases", "feasible", "refused_feasible", "illegal")}
    goals = {name: Goal("for information", True) for name in figures} | {
        name: Goal("0", figures[name] == 0) for name in ("refused_feasible", "illegal")
    }
    return finish("pins", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
