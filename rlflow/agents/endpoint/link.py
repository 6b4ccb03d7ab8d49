"""The endpoint's end of the socket to its engine's process."""

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from rlflow.agents.base import LIMIT_CODES
from rlflow.agents.endpoint.errors import ApiError
from rlflow.agents.messages import Call, CancelCall, Count, Refusal, Reply, pack, receive_messages


class EngineLink:
    """Sends calls to the engine, and gives each its answer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._numbers = count(1)
        self._open: dict[int, tuple[str, asyncio.Future[Reply | Refusal]]] = {}
        self._unsent: list[Any] = []

    async def call(self, episode: str, prompt_ids: bytes, max_tokens: int, is_repeated: bool) -> Reply:
        """Return the engine's reply to a prompt. Raises ApiError if it refuses."""
        number = next(self._numbers)
        future: asyncio.Future[Reply | Refusal] = asyncio.get_running_loop().create_future()
        self._open[number] = episode, future
        self.send(Call(number, episode, prompt_ids, max_tokens, is_repeated))
        try:
            answer = await future
        except asyncio.CancelledError:  # the client has gone away
            self.send(CancelCall(number))
            raise
        finally:
            del self._open[number]
        if isinstance(answer, Refusal):
            raise ApiError(answer.text, code=LIMIT_CODES[answer.reason])
        return answer

    def count(self, episode: str, name: str) -> None:
        """Tell the engine about something that is counted."""
        self.send(Count(episode, name))

    def end_calls(self, episode: str) -> None:
        """Refuse the open calls of an episode that has ended."""
        for number, (name, future) in self._open.items():
            if name == episode and not future.done():
                future.set_result(Refusal(number, "ended", "the episode has ended"))

    async def read(self, reader: asyncio.StreamReader, receive: Callable[[Any], None]) -> None:
        """Give replies to their calls and all other messages to ``receive``, until the engine's process ends."""
        while True:
            try:
                messages = await receive_messages(reader)
            except EOFError:
                return
            for message in messages:
                if not isinstance(message, Reply | Refusal):
                    receive(message)
                elif message.number in self._open and not self._open[message.number][1].done():
                    self._open[message.number][1].set_result(message)

    def send(self, message: Any) -> None:
        """Send a message in one frame with all others of this turn of the loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(message)

    def _flush(self) -> None:
        self._writer.write(pack(self._unsent))
        self._unsent.clear()
