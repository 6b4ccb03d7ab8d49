"""Pickled messages over a stream socket, each behind its length."""

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 16


class Channel:
    """One end. Messages come from our own processes alone: what is unpickled is trusted."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._received = bytearray()

    def send(self, message: bytes) -> None:
        """Raises OSError when the other end has gone, or does not read within the socket's timeout."""
        self.socket.sendall(_LENGTH.pack(len(message)) + message)

    def messages(self) -> list[Any] | None:
        """Those that are whole, after waiting for bytes; None when the other end has gone. Raises TimeoutError."""
        try:
            new = self.socket.recv(_CHUNK)
        except ConnectionResetError:
            new = b""
        if not new:
            return None
        self._received += new
        whole = []
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                break
            whole.append(pickle.loads(memoryview(self._received)[_LENGTH.size : end].tobytes()))
            del self._received[:end]
        return whole
