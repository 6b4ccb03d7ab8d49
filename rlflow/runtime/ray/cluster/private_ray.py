"""A Ray that only its own run can use: it listens on this machine alone, and asks for a token that nobody else has.

Whoever can talk to a Ray may run programs as its user. Ray's own default is to listen on every network interface.
"""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

# The processes of a Ray inherit these from the one that starts it. Ray has one switch for its own address, named after
# the systems where it is off by default; gloo and NCCL would take the first interface that leads to other hosts.
_LOOPBACK = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


@contextmanager
def private_ray() -> Iterator[None]:
    """Make every Ray that starts inside private to this process and to those that it starts."""
    from ray._private import ray_constants

    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    reaches_out = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False  # read when Ray is imported, which is long ago
    try:
        with environment({**_LOOPBACK, **token}):
            _read_token()
            yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = reaches_out
        _read_token()


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, and restore them on exit; None unsets a variable."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _read_token() -> None:
    """Have Ray read mode and token from the environment again.

    The mode comes first: a thread of Ray that is still at work must not look for a token that has gone.
    """
    import ray

    raylet: Any = ray._raylet  # its types are not complete
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
