"""Check that Ray binds exactly the planned GPUs: ``python -m benchmarks.placement [--json FILE] [--plans 200]``.

The planner makes random plans for simulated hosts: two to five roles with random degrees, colocated or separate. The
GPUs of each plan are reserved, and the plan is compared with Ray's own table and with what the bundles report. For
comparison, as many GPUs are reserved in a plain PACK group and assigned to the engines in the order of its bundles.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.lower import Requirements, lower
from rlflow.compiler.plan import Plan, plan
from rlflow.compiler.problem import Problem
from rlflow.compiler.wire import wire
from rlflow.errors import PlacementError
from rlflow.recipe.compose import load_cluster
from rlflow.resources.cluster import Cluster
from rlflow.resources.layout import Bundle, Resources
from rlflow.resources.planner.search.search import Search
from rlflow.resources.workload import WeightSync, Workload
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.cluster.connection import simulated
from rlflow.runtime.ray.cluster.hosts import live_hosts
from rlflow.runtime.ray.runtime import bound

SHAPES = ("2x8@cpu", "4x8@cpu", "1x7@cpu+1x8@cpu", "1x4@cpu+1x8@cpu+1x4@cpu")
ROLES = {"actor": "actor", "critic": "actor", "judge": "reference", "reference": "reference", "rollout": "rollout"}
_READY_S = 10.0


@dataclass(frozen=True)
class Outcome:
    """The counts of one plan, or the sum of several."""

    plans: int = 0
    bundles: int = 0
    mismatches: int = 0
    """Bundles whose host or GPU is not the planned one."""
    engines: int = 0
    """Tensor-parallel groups of more than one GPU."""
    split: int = 0
    """Engines that Ray bound to more than one host."""
    naive_split: int = 0
    """The same in a plain PACK group."""

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


def random_plans(cluster: Cluster, count: int, seed: int) -> Iterator[Plan]:
    """Yield plans of the 32B recipe's roles and copies of them with random pins; plans that do not fit are redrawn."""
    draw = random.Random(seed)
    recipe = rlflow.load(["recipe=grpo_32b", *(f"roles.{role}.engine=fake" for role in set(ROLES.values()))])
    graph = wire(recipe)
    given = lower(recipe, graph)
    while count:
        roles = {"actor", "rollout", *draw.sample(sorted(ROLES), draw.randint(0, 3))}
        try:
            needs = _asking(given, sorted(roles), cluster, draw)
            search = Search(needs.demands, needs.workload, cluster, {})
            yield plan(Problem(recipe, graph, cluster, {}), search)
        except PlacementError:
            continue
        count -= 1


def plans(folder: Path) -> Iterator[Plan]:
    """Yield a random plan for each shape of hosts."""
    for shape in SHAPES:
        yield from random_plans(load_cluster(shape), 1, seed=0)


def _asking(given: Requirements, roles: Sequence[str], cluster: Cluster, draw: random.Random) -> Requirements:
    demands = {demand.role: demand for demand in given.demands}
    tasks = {task.role: task for task in given.workload.tasks if task.role}
    nodes = {role: replace(tasks[ROLES[role]], node=role, role=role, after=()) for role in roles}
    scored = tuple(role for role in roles if ROLES[role] == "reference")
    for role in roles:
        reads = {"actor": ("rollout", *scored), "reference": ("rollout",), "rollout": ()}[ROLES[role]]
        nodes[role] = replace(nodes[role], after=reads)
    order = sorted(roles, key=lambda role: len(nodes[role].after))
    return Requirements(
        demands=tuple(replace(demands[ROLES[role]], role=role, pins=_wants(cluster, draw)) for role in roles),
        workload=Workload(
            tasks=tuple(nodes[role] for role in order), weight_syncs=(WeightSync(source="actor", target="rollout"),)
        ),
    )


def _wants(cluster: Cluster, draw: random.Random) -> Resources:
    """Return random pins: the size of tensor-parallel groups, perhaps their number, and perhaps GPUs of their own."""
    largest = max(host.gpus for host in cluster.hosts)
    return Resources(
        tensor_parallel_size=draw.choice([size for size in (1, 2, 2, 4, 4, 8) if size <= largest]),
        data_parallel_size=draw.choice(("auto", 1, 2, 3)),
        colocate=draw.choice(("auto", ())),
    )


def tried(plans: Iterator[Plan], *, packed: bool = False) -> Outcome:
    """Bind each plan in turn on this process's simulated hosts, with ``packed`` also in a plain PACK group."""
    return sum((_try(each, packed=packed) for each in plans), Outcome())


def _try(tried: Plan, *, packed: bool) -> Outcome:
    _until_all_are_free()
    with bound(tried) as placed:
        places = _places(placed)
    used = list(dict.fromkeys(bundle for placement in tried.roles.values() for bundle in placement.bundles))
    naive = dict(zip(used, _packed(len(used)), strict=True)) if packed else {}
    engines = list(_engines(tried))
    return Outcome(
        plans=1,
        bundles=len(used),
        mismatches=sum(places[bundle] != (bundle.host, str(bundle.gpu)) for bundle in used),
        engines=len(engines),
        split=sum(len({places[bundle][0] for bundle in engine}) > 1 for engine in engines),
        naive_split=sum(len({naive.get(bundle) for bundle in engine}) > 1 for engine in engines),
    )


def _until_all_are_free() -> None:
    """Wait until all GPUs are free, as the plan assumes; otherwise Ray may choose GPUs that are released first."""
    deadline = time.monotonic() + _READY_S
    while any(host.free_gpus < host.gpus for host in live_hosts()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _places(placed: BoundPlan) -> dict[Bundle, tuple[str, str]]:
    """Return the host of each bundle from Ray's table, and the GPU that a process in the bundle reports."""
    import_ray()
    from ray.util import placement_group_table

    names = {host.node_id: host.name for host in live_hosts()}
    node_ids = placement_group_table(placed.group)["bundles_to_node_id"]
    return {bundle: (names[node_ids[index]], placed.gpu_ids[bundle]) for bundle, index in placed.bundle_indices.items()}


def _packed(gpus: int) -> list[str]:
    """Return the host of each bundle of a plain PACK group."""
    _until_all_are_free()
    import_ray()
    from ray.util import placement_group, placement_group_table, remove_placement_group

    group = placement_group([{"GPU": 1}] * gpus, strategy="PACK")
    try:
        assert group.wait(timeout_seconds=_READY_S)
        node_ids: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        return [node_ids[index] for index in range(gpus)]
    finally:
        remove_placement_group(group)


def _engines(of: Plan) -> Iterator[tuple[Bundle, ...]]:
    for placement in of.roles.values():
        size = placement.layout.tensor_parallel_size
        if size > 1:
            yield from (placement.bundles[start : start + size] for start in range(0, len(placement.bundles), size))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plans", type=int, default=200)
    arguments = parser.parse_args()
    total = Outcome()
    print(f"{'hosts':26}{'plans':>7}{'bundles':>9}{'mismatches':>12}{'engines':>9}{'split':>7}{'in a PACK group':>17}")
    for index, shape in enumerate(SHAPES):
        cluster = load_cluster(shape)
        count = arguments.plans // len(SHAPES) + (index < arguments.plans % len(SHAPES))
        with simulated(cluster):
            of = tried(random_plans(cluster, count, seed=index), packed=True)
        print(f"{shape:26}{of.plans:7}{of.bundles:9}{of.mismatches:12}{of.engines:9}{of.split:7}{of.naive_split:17}")
        total += of
    figures = {
        "plans": total.plans,
        "bundles": total.bundles,
        "mismatches": total.mismatches,
        "engines": total.engines,
        "split_engines": total.split,
        "naive_split_engines": total.naive_split,
    }
    goals = {name: Goal("for information", True) for name in figures} | {
        "mismatches": Goal("0", total.mismatches == 0),
        "split_engines": Goal("0", total.split == 0),
    }
    return finish("placement", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
