"""The endpoint process, ``python -m rlflow.agents.endpoint FD PARENT``: FD is a socket to its engine's process.

The first frame from the engine has the model. The endpoint answers with its port, or with the reason why it cannot
start. It ends when the engine's process does.
"""

import asyncio
import logging
import os
import resource
import socket
import sys
from contextlib import suppress
from typing import Any

from aiohttp import web

from rlflow.agents.endpoint.episodes import Episodes
from rlflow.agents.endpoint.link import EngineLink
from rlflow.agents.endpoint.server import Server
from rlflow.agents.endpoint.service import Service
from rlflow.agents.messages import OpenEpisode, Ping, pack, receive_messages
from rlflow.errors import EngineError
from rlflow.system.processes import limit_memory

# Bytes that requests and templates may allocate on top of what the process has when it starts.
_MEMORY_LIMIT = 2 * 2**30
# Connections that wait to be accepted, when thousands of episodes start.
_MAX_WAITING = 4096


async def serve(end: socket.socket, parent: int) -> None:
    """Serve requests until the engine's process closes the socket, or ends; ``parent`` is its number."""
    reader, writer = await asyncio.open_connection(sock=end)
    (model,) = await receive_messages(reader)
    link, episodes = EngineLink(writer), Episodes()
    try:
        service = Service(model, link)
    except EngineError as error:
        writer.write(pack([str(error)]))
        await writer.drain()
        return
    limit_memory(_MEMORY_LIMIT)
    file_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit, file_limit))
    runner = web.AppRunner(Server(service, episodes).app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=_MAX_WAITING).start()
    writer.write(pack([runner.addresses[0][1]]))

    def receive(message: Any) -> None:
        if isinstance(message, OpenEpisode):
            episodes.open(message)
        elif isinstance(message, Ping):
            link.send(message)
        else:
            episodes.close(message.episode)
            link.end_calls(message.episode)

    ends = [asyncio.create_task(link.read(reader, receive)), asyncio.create_task(wait_for_end_of(parent))]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)


async def wait_for_end_of(parent: int) -> None:
    """Wait until the engine's process ends. A child that it forked may keep the socket open."""
    while os.getppid() == parent:
        await asyncio.sleep(1.0)


if __name__ == "__main__":
    logging.disable()  # aiohttp and renderers would log what clients send
    with suppress(EOFError, ConnectionError):
        asyncio.run(serve(socket.socket(fileno=int(sys.argv[1])), parent=int(sys.argv[2])))
