"""The match between the hosts and GPUs of a plan and those of Ray: before the reservation, and after it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.errors import PlacementError
from rlflow.resources.cluster import Cluster, Host
from rlflow.resources.layout import GIB, Bundle

_CLUSTER = "cluster"
# The part of a host's store that the batches made there may take. The rest is for rows that its workers fetch from
# other hosts, for objects that Ray frees a second late, and for weights on their way.
_BATCH_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class LiveHost:
    """A host as Ray knows it."""

    node_id: str
    """Ray's id of the host, which changes with every start of Ray."""
    name: str
    hostname: str
    address: str
    port: int
    """The port on which Ray listens."""
    store_bytes: int
    """The size of its object store."""
    gpus: int
    free_gpus: int
    alive: bool
    simulated: bool = False
    """The host is a process of this machine, and its GPUs are numbers."""

    def has_name(self, name: str) -> bool:
        """Return whether ``name`` is one of the host's names, or its address or id."""
        return name in (self.name, self.hostname, self.address, self.node_id)


@dataclass(frozen=True)
class BoundBundle:
    """The GPU that Ray has given to one bundle of the placement group."""

    node_id: str
    gpu_id: str
    """The number of the GPU for the host's driver."""
    device_name: str | None = None
    """Its name in nvidia-smi; None without nvidia-smi."""


@dataclass(frozen=True, kw_only=True)
class BoundPlan:
    """A plan whose bundles are reserved in Ray."""

    group: Any
    """Ray's placement group."""
    bundle_indices: Mapping[Bundle, int]
    """The index of each bundle in the group."""
    gpu_ids: Mapping[Bundle, str]
    """For CUDA_VISIBLE_DEVICES on the bundle's host."""
    hosts: Mapping[str, LiveHost]
    """Ray's host for each host of the plan, by the plan's name."""

    @property
    def simulated(self) -> bool:
        return any(host.simulated for host in self.hosts.values())

    @property
    def addresses(self) -> Mapping[str, str]:
        """Return the address of each host, by the plan's name."""
        return {name: host.address for name, host in self.hosts.items()}


def wanted_bundles(plan: Plan) -> tuple[Bundle, ...]:
    """Return each GPU that the plan uses, once: by host in the plan's order, then by number."""
    order = {host.name: index for index, host in enumerate(plan.cluster.hosts)}
    used = {bundle for placement in plan.roles.values() for bundle in placement.bundles}
    return tuple(sorted(used, key=lambda bundle: (order[bundle.host], bundle.gpu)))


def wanted_gpus(wanted: Iterable[Bundle]) -> dict[str, int]:
    """Return how many GPUs the plan uses of each host."""
    counts: dict[str, int] = {}
    for bundle in wanted:
        counts[bundle.host] = counts.get(bundle.host, 0) + 1
    return counts


def spare_bundles(planned: Sequence[Host], wanted: Sequence[Bundle], hosts: Mapping[str, LiveHost]) -> list[Bundle]:
    """Return GPUs to reserve beside the wanted ones, because Ray gives out those with low numbers first.

    They are the GPUs that the plan leaves out below another one that it uses, if the host has them free.
    """
    counts = wanted_gpus(wanted)
    spare: list[Bundle] = []
    for host in planned:
        last = max((bundle.gpu for bundle in wanted if bundle.host == host.name), default=-1)
        left_out = [bundle for gpu in host.usable if gpu < last and (bundle := Bundle(host.name, gpu)) not in wanted]
        if left_out and hosts[host.name].free_gpus >= counts[host.name] + len(left_out):
            spare += left_out
    return spare


def match_hosts(planned: Sequence[Host], wanted: Mapping[str, int], live: Sequence[LiveHost]) -> dict[str, LiveHost]:
    """Return Ray's host for each host that the plan uses.

    Generated names (host-0, host-1, ...) stand for any host, other names for the host with that name.

    Raises PlacementError for hosts that are missing or have too few GPUs. Their GPUs may still be taken.
    """
    alive = sorted((host for host in live if host.alive), key=sort_key)
    matches = _by_name(wanted, alive)
    if all(host.name == f"host-{index}" for index, host in enumerate(planned)):
        if any(name not in matches or matches[name].gpus < count for name, count in wanted.items()):
            matches = _first_fit(wanted, alive, "free_gpus")
        if len(matches) < len(wanted):
            # Hosts that would have enough if all were free: the next check names who uses the others.
            matches = _first_fit(wanted, alive, "gpus")
    known = [f"{host.name} ({host.gpus} GPUs)" for host in alive]
    if missing := [name for name in wanted if name not in matches]:
        missing_hosts = ", ".join(f"'{name}' ({wanted[name]} GPUs)" for name in missing)
        raise PlacementError(
            _CLUSTER,
            f"the plan uses {len(wanted)} hosts, and Ray has none for {missing_hosts}",
            known=known,
            fix="plan for the live hosts (cluster=auto), or start Ray on the missing ones",
        )
    if small := [name for name, count in wanted.items() if matches[name].gpus < count]:
        raise PlacementError(
            _CLUSTER,
            f"the plan uses {wanted[small[0]]} GPUs of host '{small[0]}', and Ray has {matches[small[0]].gpus} on it",
            known=known,
            fix="plan for Ray's GPUs (cluster=auto), or start Ray with all GPUs of the host",
        )
    return matches


def check_free(wanted: Mapping[str, int], hosts: Mapping[str, LiveHost], users: Mapping[str, Sequence[str]]) -> None:
    """Raise PlacementError for hosts with too few free GPUs. ``users`` lists by node id who uses the others."""
    facts = []
    for name, host in hosts.items():
        if host.free_gpus < wanted[name]:
            taken = f" (taken: {', '.join(users[host.node_id])})" if host.node_id in users else ""
            facts.append(f"the plan uses {wanted[name]} GPUs of '{host.name}' and {host.free_gpus} are free{taken}")
    if facts:
        raise PlacementError(
            _CLUSTER,
            _first_few(facts),
            fix="wait for them, stop what uses them, or plan for the free ones (cluster=auto)",
        )


def check_bound(
    planned: Sequence[Host],
    wanted: Sequence[Bundle],
    reserved: Sequence[Bundle],
    hosts: Mapping[str, LiveHost],
    bound: Sequence[BoundBundle],
) -> dict[Bundle, int]:
    """Return the index in ``bound`` of each wanted bundle: on its host, and with the GPU of its number if Ray gave it.

    ``bound`` has the GPUs of all ``reserved`` bundles, the wanted ones among them. Raises PlacementError when a bundle
    is not on its planned host, when two have the same GPU, or for a GPU that the plan may not use.
    """
    names = {host.node_id: name for name, host in hosts.items()}
    places = [(names.get(place.node_id, place.node_id), place.gpu_id) for place in bound]
    wrong = [
        f"GPU {bundle.gpu} of '{bundle.host}' is on '{place[0]}'"
        for bundle, place in zip(reserved, places, strict=True)
        if bundle.host != place[0]
    ]
    several = sorted({place for place in places if places.count(place) > 1})
    wrong += [f"GPU {gpu} of '{host}' is given twice" for host, gpu in several]
    if wrong:
        raise PlacementError(
            _CLUSTER, f"Ray has bound other GPUs than planned: {_first_few(wrong)}", fix="run it again"
        )
    indices: dict[Bundle, int] = {}
    for name in hosts:
        by_id = {bound[index].gpu_id: index for index, bundle in enumerate(reserved) if bundle.host == name}
        wanted_here = [bundle for bundle in wanted if bundle.host == name]
        same = {bundle: by_id.pop(str(bundle.gpu)) for bundle in wanted_here if str(bundle.gpu) in by_id}
        rest = [by_id[gpu_id] for gpu_id in sorted(by_id, key=_natural)]
        indices |= same | dict(zip([bundle for bundle in wanted_here if bundle not in same], rest, strict=False))
    usable = {host.name: host.free for host in planned if host.free is not None}
    for bundle, index in indices.items():
        gpu = bound[index].gpu_id
        if bundle.host in usable and gpu.isdecimal() and int(gpu) not in (usable[bundle.host] or ()):
            raise PlacementError(
                _CLUSTER,
                f"Ray has given GPU {gpu} of '{hosts[bundle.host].name}', which the plan may not use",
                known=usable[bundle.host] or (),
                fix="start Ray on the host with CUDA_VISIBLE_DEVICES set to the allowed GPUs",
            )
    return indices


def check_kinds(cluster: Cluster, hosts: Mapping[str, LiveHost], bound: Mapping[Bundle, BoundBundle]) -> None:
    """Raise PlacementError for a GPU of another kind than planned, where both names are known."""
    kinds = {host.name: host.gpu for host in cluster.hosts}
    for bundle, got in bound.items():
        planned = cluster.gpus[kinds[bundle.host]].device_name
        if None not in (planned, got.device_name) and planned != got.device_name and not hosts[bundle.host].simulated:
            raise PlacementError(
                _CLUSTER,
                f"the plan is for GPUs of the kind {kinds[bundle.host]} ({planned}), and GPU {got.gpu_id} of"
                f" '{hosts[bundle.host].name}' is {got.device_name}",
                fix="plan for Ray's GPUs (cluster=auto, or their kind as in cluster=2x8@h200)",
            )


def check_stores(plan: Plan, hosts: Mapping[str, LiveHost]) -> None:
    """Raise PlacementError for a host whose object store is too small for the predicted peak of a step."""
    for name, gib in plan.prediction.data.store_peak_gib.items():
        if name not in hosts or gib * GIB <= (limit := _BATCH_SHARE * hosts[name].store_bytes):
            continue
        larger = f"start Ray there with --object-store-memory={ceil(gib * GIB / _BATCH_SHARE)} or more, or "
        raise PlacementError(
            "data.batch_size",
            f"a step needs {gib * GIB / 2**20:.1f} MiB of the object store of '{hosts[name].name}' at once, and batches"
            f" may take {limit / 2**20:.1f} MiB, half of it",
            fix=f"{'' if hosts[name].simulated else larger}smaller batch_size, group_size or max_tokens",
        )


def placement_record(plan: Plan, bound: BoundPlan) -> dict[str, Any]:
    """Return the content of ``placement.json``: the planned and the bound GPUs of each worker."""
    return {
        "simulated": bound.simulated,
        "hosts": {
            name: {"name": host.name, "node_id": host.node_id, "address": host.address, "gpus": host.gpus}
            for name, host in bound.hosts.items()
        },
        "roles": {
            role: [
                [
                    {
                        "planned": {"host": bundle.host, "gpu": bundle.gpu},
                        "bound": {"host": bound.hosts[bundle.host].name, "gpu": bound.gpu_ids[bundle]},
                    }
                    for bundle in worker.bundles
                ]
                for worker in placement.workers
            ]
            for role, placement in plan.roles.items()
        },
    }


def _by_name(wanted: Iterable[str], alive: Sequence[LiveHost]) -> dict[str, LiveHost]:
    """Return the host with each name. A host is used for one name only."""
    matches: dict[str, LiveHost] = {}
    for name in wanted:
        matching = [host for host in alive if host.has_name(name) and host not in matches.values()]
        if matching:
            matches[name] = matching[0]
    return matches


def _first_fit(wanted: Mapping[str, int], alive: Sequence[LiveHost], field: str) -> dict[str, LiveHost]:
    """Assign hosts to names, the largest count first, each to the smallest host that has enough.

    If hosts for all names exist, this finds them.
    """
    left = list(alive)
    chosen: dict[str, LiveHost] = {}
    for name in sorted(wanted, key=lambda name: -wanted[name]):
        enough = [host for host in left if getattr(host, field) >= wanted[name]]
        if enough:
            chosen[name] = min(enough, key=lambda host: getattr(host, field))
            left.remove(chosen[name])
    return {name: chosen[name] for name in wanted if name in chosen}


def _first_few(facts: Sequence[str]) -> str:
    more = [f"and {len(facts) - 3} more"] if len(facts) > 3 else []
    return "; ".join([*facts[:3], *more])


def sort_key(host: LiveHost) -> tuple[Any, ...]:
    """Return a key that sorts hosts by name."""
    return (_natural(host.name), host.node_id)


def _natural(text: str) -> list[tuple[int, str]]:
    """Return a key that sorts host-2 before host-10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", text)]
