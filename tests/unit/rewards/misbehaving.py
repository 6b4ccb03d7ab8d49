"""Reward functions that do what they should not, chosen by the response."""

import asyncio
import ctypes
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlflow.rewards.base import batched

Texts = Sequence[str]
Rows = Sequence[Mapping[str, Any]]


def reward(texts: Texts, rows: Rows) -> Any:
    return DOES[texts[0]](texts)


@batched(4)
def by_fours(texts: Texts, rows: Rows) -> list[float]:
    if "hang" in texts:
        hang(texts)
    return [float(len(texts))] * len(texts)


async def waits(texts: Texts, rows: Rows) -> list[float]:
    """Return for each text the most calls that were in flight at once with its own; "raise" fails."""
    in_flight, most = 0, 0

    async def ask(text: str) -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.05)
        if text == "raise":
            raise ValueError
        in_flight -= 1

    await asyncio.gather(*map(ask, texts))
    return [float(most)] * len(texts)


@batched(4)
def told_its_time(texts: Texts, rows: Rows, *, timeout_s: float) -> list[float]:
    """Exceed the time limit that is passed in."""
    hang(texts)
    return []


def hang(texts: Texts) -> None:
    while True:
        pass


def hang_on(texts: Texts) -> None:
    """Hang, and ignore all signals."""
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
    hang(texts)


def leave_a_daemon(texts: Texts) -> None:
    """Start a daemon and hang."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execlp("sleep", "sleep", rest(texts))
        os._exit(0)
    hang(texts)


def rest(texts: Texts) -> str:
    """Return a number of seconds that no other process sleeps."""
    return f"1234.{os.getpid()}"


def interrupt(texts: Texts) -> None:
    # A shell that starts tests in the background has them ignore the signal.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def crash(texts: Texts) -> None:
    ctypes.string_at(0)


def recurse(texts: Texts) -> Any:
    return recurse(texts)


DOES: dict[str, Callable[[Texts], Any]] = {
    "good": lambda texts: [1.5],
    "another number": lambda texts: [2.5],
    "number as text": lambda texts: ["2.5"],
    "hang": hang,
    "hang on": hang_on,
    "sleep": lambda texts: time.sleep(1000),
    "stop itself": lambda texts: os.kill(os.getpid(), signal.SIGSTOP),
    "leave a daemon": leave_a_daemon,
    "exit": lambda texts: os._exit(0),
    "exit politely": lambda texts: sys.exit(0),
    "kill itself": lambda texts: os.kill(os.getpid(), signal.SIGKILL),
    "kill itself by another": lambda texts: os.kill(os.getpid(), 40),
    "crash": crash,
    "recurse": recurse,
    "close everything": lambda texts: os.closerange(3, 256),
    "NaN": lambda texts: [float("nan")],
    "infinite": lambda texts: [float("-inf")],
    "huge": lambda texts: [1e39],
    "nothing": lambda texts: None,
    "a text": lambda texts: ["no"],
    "too few": lambda texts: [],
    "too many": lambda texts: [1.0, 2.0],
    "endless": lambda texts: itertools.repeat(1.0),
    "8 GB": lambda texts: bytearray(8 << 30),
    "interrupt": interrupt,
}
