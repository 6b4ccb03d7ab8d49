"""The address at which the ranks of a role find one another."""

import socket
from typing import TYPE_CHECKING

from rlflow.engines.base import EngineSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def meeting_place(spec: EngineSpec) -> "TCPStore":
    """Return the store at ``spec.address`` by which the ranks exchange their own addresses.

    Rank 0 listens on that address alone; torch would listen on all interfaces, and the store asks for no password.
    Raises OSError where the port is taken.
    """
    from torch._C._distributed_c10d import TCPStore

    host, _, port = spec.address.rpartition(":")
    if spec.rank > 0:
        return TCPStore(host, int(port), spec.world_size, is_master=False)
    listening = socket.create_server((host, int(port)), backlog=spec.world_size + 128)
    return TCPStore(host, int(port), spec.world_size, is_master=True, master_listen_fd=listening.detach())
