"""Free ports of this host."""

import socket


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port of ``host`` that no process uses now; an empty host stands for all interfaces."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
