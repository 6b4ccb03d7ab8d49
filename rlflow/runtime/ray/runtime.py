"""Every worker an actor of Ray, where the plan says."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rlflow.compiler.plan import Plan
from rlflow.errors import PlacementError, first_line
from rlflow.extras import check_extra
from rlflow.recipe import Model
from rlflow.resources.layout import Bundle
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.protocols import Engines
from rlflow.runtime.ray.cluster.binding import (
    Bound,
    LiveHost,
    Placed,
    check_bound,
    check_free,
    check_kinds,
    match_hosts,
    placement_record,
    spare_bundles,
    wanted_bundles,
    wanted_gpus,
)
from rlflow.runtime.ray.cluster.hosts import connected, holders, live_hosts, lost, ray_errors
from rlflow.runtime.ray.cluster.machine import gpu_listing, gpus_from
from rlflow.runtime.ray.engine_specs import check_engines

# Ray is late to say that GPUs are free again.
_FREED_S = 2.0
_RESERVED_S = 5.0
# A process of Python on every host, with the disks of a cluster.
_TOLD_S = 120.0
_POLL_S = 0.25


class RayRuntime:
    """Workers are actors, pinned to the GPUs of the plan."""

    def check(self, plan: Plan) -> None:
        """Raises RecipeError for an engine, or a Ray, that is not installed or of another version. Starts nothing."""
        check_engines(plan, ["ray"])
        check_extra("ray", "cluster", f"a run on {plan.cluster.shape}")

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> Iterator[Engines]:
        """Raises PlacementError for hosts that are not as planned, EngineError for an engine, or a Ray, that fails."""
        # With Ray, which may not be installed.
        from rlflow.runtime.ray.engine_set import start_engines

        with ExitStack() as running:
            with ray_errors(RuntimeError):
                running.enter_context(connected(plan.cluster))
                placed = running.enter_context(bound(plan))
                record = placement_record(plan, placed)
                (directory / "placement.json").write_text(json.dumps(record, indent=1))
                engines = running.enter_context(start_engines(plan, models, placed, directory))
            with ray_errors():
                yield engines


@contextmanager
def bound(plan: Plan) -> Iterator[Placed]:
    """The plan's GPUs, reserved in the Ray that this process is in, proven to be those planned, and let go on exit.

    Raises PlacementError: within 10 s for hosts that are missing, taken, or die in the meantime.
    """
    import_ray()
    from ray.util import placement_group, remove_placement_group

    wanted = wanted_bundles(plan)
    hosts = _hosts_with_room(plan, wanted)
    reserved = (*wanted, *spare_bundles(plan.cluster.hosts, wanted, hosts))
    group = placement_group(
        [{"GPU": 1}] * len(reserved),
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": hosts[bundle.host].node_id} for bundle in reserved],
        name=f"rlflow {plan.recipe.name}",
    )
    try:
        if not _until(lambda: group.wait(timeout_seconds=_POLL_S), _RESERVED_S, hosts):
            now = {host.node_id: host for host in live_hosts()}
            check_free(wanted_gpus(reserved), {name: now[host.node_id] for name, host in hosts.items()}, holders())
            raise _late(f"Ray has not given the {len(reserved)} GPUs of the plan", _RESERVED_S, hosts.values())
        told = _ask(group, reserved, hosts)
        indices = check_bound(plan.cluster.hosts, wanted, reserved, hosts, told)
        check_kinds(plan.cluster, hosts, {bundle: told[index] for bundle, index in indices.items()})
        yield Placed(
            group=group,
            bundle_indices=indices,
            gpu_ids={bundle: told[index].gpu_id for bundle, index in indices.items()},
            hosts=hosts,
        )
    finally:
        # Ray lets go of it anyway when this process leaves, and why that is comes first.
        with suppress(Exception):
            remove_placement_group(group)


def _hosts_with_room(plan: Plan, wanted: tuple[Bundle, ...]) -> dict[str, LiveHost]:
    """Ray's host for each of the plan, with as many GPUs free as it uses."""
    counts = wanted_gpus(wanted)
    deadline = time.monotonic() + _FREED_S
    while True:
        hosts = match_hosts(plan.cluster.hosts, counts, live_hosts())
        if all(host.free_gpus >= counts[name] for name, host in hosts.items()):
            return hosts
        if time.monotonic() > deadline:
            check_free(counts, hosts, holders())
        time.sleep(_POLL_S / 5)


def _until(done: Callable[[], bool], seconds: float, hosts: Mapping[str, LiveHost]) -> bool:
    """Whether it is done within ``seconds``. Raises PlacementError when a host is lost meanwhile."""
    deadline = time.monotonic() + seconds
    while not done():
        if gone := lost(hosts):
            names = ", ".join(f"'{host.name}' ({host.address})" for host in gone)
            raise PlacementError(
                "cluster",
                f"lost {names} while its GPUs were being reserved",
                fix="run it again when the host is back, or plan for the others (cluster=auto)",
            )
        if time.monotonic() > deadline:
            return False
    return True


def _late(what: str, seconds: float, hosts: Iterable[LiveHost]) -> PlacementError:
    return PlacementError(
        "cluster",
        f"{what} within {seconds:g} s",
        known=[f"{host.name} ({host.address})" for host in hosts],
        fix="see what 'ray status' says, and whether each of these hosts still works",
    )


def _ask(group: Any, reserved: tuple[Bundle, ...], hosts: Mapping[str, LiveHost]) -> list[Bound]:
    """What each bundle of the group has got, told by a process inside it: a GPU of every host at a time."""
    ray = import_ray()
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Without max_calls Ray starts a process for every bundle.
    ask = ray.remote(num_cpus=0, num_gpus=1, max_retries=0, max_calls=0)(_tell)
    on_hosts = [[index for index, bundle in enumerate(reserved) if bundle.host == name] for name in hosts]
    told: dict[int, Bound] = {}
    for wave in zip_longest(*on_hosts):
        indices = [index for index in wave if index is not None]
        answers = [
            ask.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote() for i in indices
        ]
        if not _until(partial(_are_there, answers), _TOLD_S, hosts):
            waiting = set(ray.wait(answers, num_returns=len(answers), timeout=0)[1])
            silent = [hosts[reserved[i].host] for i, answer in zip(indices, answers, strict=True) if answer in waiting]
            raise _late("hosts have not said which GPU they give", _TOLD_S, silent)
        try:
            told |= {index: Bound(*answer) for index, answer in zip(indices, ray.get(answers), strict=True)}
        except RayError as error:
            # Why, if it is a host that is lost.
            _until(_never, _RESERVED_S, hosts)
            raise PlacementError("cluster", f"a host does not say which GPU it gives ({first_line(error)})") from None
    return [told[index] for index in range(len(reserved))]


def _are_there(answers: list[Any]) -> bool:
    waiting = import_ray().wait(answers, num_returns=len(answers), timeout=_POLL_S)[1]
    return not waiting


def _never() -> bool:
    time.sleep(_POLL_S)
    return False


def _tell() -> tuple[str, str, str | None]:
    """In a bundle: the id of its node, and of its GPU, and what nvidia-smi calls that."""
    context = import_ray().get_runtime_context()
    gpu_id = ",".join(context.get_accelerator_ids()["GPU"])
    return context.get_node_id(), gpu_id, next(iter(gpus_from(_listing(), gpu_id)), None)


# A process tells for several bundles.
_listing = cache(gpu_listing)
