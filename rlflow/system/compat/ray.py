"""Private names of Ray."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any


def published_address() -> str | None:
    """Return the address of the Ray that others on this machine find. Ray's public functions only connect to it."""
    from ray._private.services import find_bootstrap_address

    address: str | None = find_bootstrap_address(None)
    return address


def publish_address(address: str | None) -> None:
    """Set the address of the Ray that others on this machine find; None for no Ray.

    Ray publishes every cluster that it starts, and has no option against it.
    """
    from ray._common.utils import reset_ray_address
    from ray._private.utils import write_ray_address

    if address is None:
        reset_ray_address()
    else:
        write_ray_address(address)


@contextmanager
def loopback_address() -> Iterator[None]:
    """Let Ray start hosts that have the loopback address, as on systems where it has no clusters.

    The environment variable for it reaches the processes of Ray, but this one read it when it imported Ray.
    """
    from ray._private import ray_constants

    was_enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was_enabled


def reload_token() -> None:
    """Have Ray read mode and token from the environment again; it reads them once in each process.

    The mode comes first: a thread of Ray that still works must not look for a token that has gone.
    """
    import ray

    raylet: Any = ray._raylet  # its types are not complete
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def own_process_groups() -> Iterator[None]:
    """Have Ray start its processes in process groups of their own, apart from the group of this process.

    A SIGTERM to the group of the run, as ``timeout`` sends it, then does not end Ray before the run's last step. On
    Linux the kernel kills them when this process ends. Elsewhere Ray kills them by their group, so they stay in it.
    """
    from ray._private import services

    ray_services: Any = services
    popen = ray_services.ConsolePopen
    if sys.platform == "linux":
        ray_services.ConsolePopen = partial(popen, process_group=0)
    try:
        yield
    finally:
        ray_services.ConsolePopen = popen


def free_resources() -> dict[str, dict[str, float]]:
    """Return the free resources of each host, by node id. Ray's public function sums them up over the cluster."""
    from ray._private.state import available_resources_per_node

    free: dict[str, dict[str, float]] = available_resources_per_node()
    return free


def control_state() -> Any:
    """Return the accessor of the tables of actors and tasks. Ray's public functions ask its dashboard for them."""
    from ray._private.state import state

    return state._connect_and_get_accessor()
