"""The runtime on Ray: it reserves the plan's GPUs, proves that they are the planned ones, and starts the engines."""

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
from rlflow.runtime.engine_specs import check_engines
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.protocols import Engines
from rlflow.runtime.ray.cluster.binding import (
    BoundBundle,
    BoundPlan,
    LiveHost,
    check_bound,
    check_free,
    check_kinds,
    check_stores,
    match_hosts,
    placement_record,
    spare_bundles,
    wanted_bundles,
    wanted_gpus,
)
from rlflow.runtime.ray.cluster.connection import connected, ray_errors
from rlflow.runtime.ray.cluster.hosts import gpu_users, live_hosts, lost_hosts
from rlflow.runtime.ray.cluster.machine import gpu_listing, gpus_from
from rlflow.runtime.ray.cluster.services import alive_hosts

# Seconds that Ray may take to report that GPUs are free again, to reserve GPUs, and to start a Python process on every
# host, with the disks of a cluster.
_FREED_S = 2.0
_RESERVED_S = 5.0
_ANSWER_S = 120.0
_POLL_S = 0.25


class RayRuntime:
    """A runtime whose workers are actors of Ray on the GPUs of the plan."""

    def check(self, plan: Plan) -> None:
        """Check that Ray and the engines are installed, in supported versions. Raises RecipeError. Starts nothing."""
        check_engines(plan, ["ray"])
        check_extra("ray", "cluster", f"a run on {plan.cluster.shape}")

    @contextmanager
    def start(self, plan: Plan, models: Mapping[str, Model], directory: Path) -> Iterator[Engines]:
        """Start all engines, and stop them on exit.

        Raises PlacementError for hosts that are not as planned, EngineError for an engine or a Ray that fails.
        """
        # This imports Ray, which may not be installed.
        from rlflow.runtime.ray.engine_set import start_engines

        with ExitStack() as running:
            with ray_errors(RuntimeError):
                running.enter_context(connected(plan.cluster))
                binding = running.enter_context(bound(plan))
                record = placement_record(plan, binding)
                (directory / "placement.json").write_text(json.dumps(record, indent=1))
                engines = running.enter_context(start_engines(plan, models, binding, directory))
            with ray_errors():
                yield engines


@contextmanager
def bound(plan: Plan) -> Iterator[BoundPlan]:
    """Reserve the plan's GPUs in the connected Ray, prove that they are the planned ones, and release them on exit.

    Raises PlacementError, within 10 s for hosts that are missing, in use, or die in the meantime.
    """
    import_ray()
    from ray.util import placement_group, remove_placement_group

    wanted = wanted_bundles(plan)
    hosts = _hosts_with_room(plan, wanted)
    check_stores(plan, hosts)
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
            check_free(wanted_gpus(reserved), {name: now[host.node_id] for name, host in hosts.items()}, gpu_users())
            raise _timeout(f"Ray has not reserved the {len(reserved)} GPUs of the plan", _RESERVED_S, hosts.values())
        bundles = _ask(group, reserved, hosts)
        indices = check_bound(plan.cluster.hosts, wanted, reserved, hosts, bundles)
        check_kinds(plan.cluster, hosts, {bundle: bundles[index] for bundle, index in indices.items()})
        yield BoundPlan(
            group=group,
            bundle_indices=indices,
            gpu_ids={bundle: bundles[index].gpu_id for bundle, index in indices.items()},
            hosts=hosts,
        )
    finally:
        # Ray removes it anyway when this process ends, and the error that ends it comes first.
        with suppress(Exception):
            if alive_hosts() is not None:
                remove_placement_group(group)


def _hosts_with_room(plan: Plan, wanted: tuple[Bundle, ...]) -> dict[str, LiveHost]:
    """Return Ray's host for each host of the plan, once it has as many GPUs free as the plan uses."""
    counts = wanted_gpus(wanted)
    deadline = time.monotonic() + _FREED_S
    while True:
        hosts = match_hosts(plan.cluster.hosts, counts, live_hosts())
        if all(host.free_gpus >= counts[name] for name, host in hosts.items()):
            return hosts
        if time.monotonic() > deadline:
            check_free(counts, hosts, gpu_users())
        time.sleep(_POLL_S / 5)


def _until(done: Callable[[], bool], seconds: float, hosts: Mapping[str, LiveHost]) -> bool:
    """Return whether ``done`` within ``seconds``. Raises PlacementError when a host is lost meanwhile."""
    deadline = time.monotonic() + seconds
    while not done():
        if lost := lost_hosts(hosts):
            names = ", ".join(f"'{host.name}' ({host.address})" for host in lost)
            raise PlacementError(
                "cluster",
                f"lost {names} while its GPUs were being reserved",
                fix="run again when the host is back, or plan for the others (cluster=auto)",
            )
        if time.monotonic() > deadline:
            return False
    return True


def _timeout(problem: str, seconds: float, hosts: Iterable[LiveHost]) -> PlacementError:
    return PlacementError(
        "cluster",
        f"{problem} within {seconds:g} s",
        known=[f"{host.name} ({host.address})" for host in hosts],
        fix="see what 'ray status' says, and whether each of these hosts still works",
    )


def _ask(group: Any, reserved: tuple[Bundle, ...], hosts: Mapping[str, LiveHost]) -> list[BoundBundle]:
    """Return the GPU of each bundle, reported by a process inside it: one GPU of every host at a time."""
    ray = import_ray()
    from ray.exceptions import RayError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    # Without max_calls Ray starts a process for every bundle.
    ask = ray.remote(num_cpus=0, num_gpus=1, max_retries=0, max_calls=0)(_report_gpu)
    on_hosts = [[index for index, bundle in enumerate(reserved) if bundle.host == name] for name in hosts]
    bundles: dict[int, BoundBundle] = {}
    for wave in zip_longest(*on_hosts):
        indices = [index for index in wave if index is not None]
        answers = [
            ask.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, i)).remote() for i in indices
        ]
        if not _until(partial(_all_ready, answers), _ANSWER_S, hosts):
            waiting = set(ray.wait(answers, num_returns=len(answers), timeout=0)[1])
            silent = [hosts[reserved[i].host] for i, answer in zip(indices, answers, strict=True) if answer in waiting]
            raise _timeout("hosts have not reported which GPU they give", _ANSWER_S, silent)
        try:
            bundles |= {index: BoundBundle(*answer) for index, answer in zip(indices, ray.get(answers), strict=True)}
        except RayError as error:
            # A lost host is the reason to report, if there is one.
            _until(_never, _RESERVED_S, hosts)
            fact = f"a host does not report which GPU it gives ({first_line(error)})"
            raise PlacementError("cluster", fact, fix="check that all hosts have the same Python and rlflow") from None
    return [bundles[index] for index in range(len(reserved))]


def _all_ready(answers: list[Any]) -> bool:
    waiting = import_ray().wait(answers, num_returns=len(answers), timeout=_POLL_S)[1]
    return not waiting


def _never() -> bool:
    time.sleep(_POLL_S)
    return False


def _report_gpu() -> tuple[str, str, str | None]:
    """Return node id, GPU id and the GPU's name in nvidia-smi of the bundle that this process runs in."""
    context = import_ray().get_runtime_context()
    gpu_id = ",".join(context.get_accelerator_ids()["GPU"])
    return context.get_node_id(), gpu_id, next(iter(gpus_from(_listing(), gpu_id)), None)


# A process reports several bundles.
_listing = cache(gpu_listing)
