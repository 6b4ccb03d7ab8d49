"""Ranks meet at one address, which is closed to other networks."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rlflow.engines.sharded.process_group import rendezvous_store
from tests.helpers import spec
from tests.listening import LOOPBACK, listening


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_ranks_meet_at_one_address_that_listens_there_alone() -> None:
    address = f"127.0.0.1:{free_port()}"
    ranks = [replace(spec(), rank=rank, world_size=2, address=address) for rank in range(2)]
    earlier = listening({os.getpid()})
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rendezvous_store, ranks, timeout=60)
    first.set("said", "hello")
    assert second.get("said") == b"hello"
    new = [place for found in listening({os.getpid()}) if found not in earlier for place in found[1:]]
    assert [place.split(":")[0] in LOOPBACK for place in new] == [True]


def test_a_port_in_use_is_a_clear_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(OSError, match="ddress already in use"):
            rendezvous_store(replace(spec(), rank=0, world_size=2, address=address))
