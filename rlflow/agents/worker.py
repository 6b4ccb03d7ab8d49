"""A worker process of agents: runs many episodes at once in one event loop.

The fork server of ``rewards`` starts it, and kills it with all that it started.
"""

import asyncio
import os
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from rlflow.agents.base import Agent, Client, LimitReachedError, ModelService, Outcome, WorkerBrokenError
from rlflow.agents.load import load_agent
from rlflow.agents.messages import EpisodeEnded, StartEpisode, StopEpisode, pack, receive_messages
from rlflow.agents.running import EPISODE, RunningEpisode
from rlflow.errors import first_line
from rlflow.rewards.base import MAX_FLOAT32, Failure, LoadedCallable


@dataclass(frozen=True)
class AgentSpec:
    """The name and options of an agent, from which the fork server loads it."""

    environment: str
    options: Mapping[str, Any]
    timeout_s: float
    """The longest time that an agent may keep its worker from all others."""
    kind: ClassVar[str] = "environment"

    def load(self, name: str) -> LoadedCallable:
        """Load the agent. Raises RecipeError at the paths ``environment`` and ``options``."""
        agent = load_agent(self.environment, self.options)
        serve = partial(_serve, agent, self.timeout_s)
        return LoadedCallable(_no_call, 1, 0.0, prepare=agent.prepare, serve=serve)


def _no_call(texts: Sequence[str], rows: Sequence[Any]) -> Sequence[Any]:
    raise NotImplementedError("agents get messages instead")


def _serve(agent: Agent, limit_s: float, end: socket.socket) -> None:
    asyncio.run(_Worker(agent, limit_s).run(end))


class _Worker:
    """Answers the messages of an engine until it closes its end."""

    def __init__(self, agent: Agent, limit_s: float) -> None:
        self._agent, self._limit_s = agent, limit_s
        self._episodes: dict[str, asyncio.Task[None]] = {}

    async def run(self, end: socket.socket) -> None:
        """Run the episodes that the engine starts."""
        import aiohttp

        reader, self._writer = await asyncio.open_connection(sock=end)
        (self._service,) = await receive_messages(reader)
        self._running, loop = RunningEpisode(self._service.model.tokenizer), asyncio.get_running_loop()
        loop.set_task_factory(self._running.create_task)
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        # Replies take as long as they take: the engine knows of slow ones.
        limits = aiohttp.ClientTimeout(total=None, connect=60)
        async with aiohttp.ClientSession(connector=connector, timeout=limits) as self._http:
            failure = await self._open(self._service)
            with suppress(EOFError):
                while True:
                    for message in await receive_messages(reader):
                        if isinstance(message, StartEpisode):
                            EPISODE.set(message.episode)
                            self._episodes[message.episode] = asyncio.create_task(self._run(message, failure))
                        elif isinstance(message, StopEpisode) and (task := self._episodes.get(message.episode)):
                            task.cancel()

    async def _open(self, service: ModelService) -> Failure | None:
        try:
            await self._agent.open(service)
        except Exception as error:  # an agent may raise anything
            return Failure("unavailable", f"does not start ({first_line(error)})")
        return None

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """End the process if an agent blocks the event loop: the work of a thread."""
        while True:
            has_answered = threading.Event()
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(has_answered.set)
            if not has_answered.wait(self._limit_s):
                self._running.mark_as_blocking()
                os._exit(1)
            time.sleep(self._limit_s / 4)

    async def _run(self, message: StartEpisode, failure: Failure | None) -> None:
        client = Client(self._service, message.token, message.seed, self._http)
        outcome: Outcome | Failure = failure or Failure("raised", "was cancelled")
        try:
            if failure is None:
                outcome = _outcome(await self._agent.run(client, message.row))
        except LimitReachedError:
            outcome = Outcome(finished=False)
        except asyncio.CancelledError:
            pass  # by the engine, which waits for the message that follows, or by the agent itself
        except WorkerBrokenError as error:
            print(f"a worker of agents ends: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        except BaseException as error:  # an agent may raise anything, SystemExit included
            outcome = Failure("raised", f"failed ({first_line(error)})")
        del self._episodes[message.episode]
        self._writer.write(pack([EpisodeEnded(message.episode, outcome, client.call_rewards)]))
        with suppress(ConnectionError):  # the engine has ended
            await self._writer.drain()


def _outcome(result: Outcome | float) -> Outcome | Failure:
    """Return what an agent returned as an outcome, unless it has numbers that cannot be stored."""
    outcome = result if isinstance(result, Outcome) else Outcome(float(result))
    numbers = (outcome.reward, *outcome.metrics.values())
    if all(abs(number) <= MAX_FLOAT32 for number in numbers):
        return outcome
    return Failure("invalid", f"gave {outcome.reward} as its reward, or such a number with it")
