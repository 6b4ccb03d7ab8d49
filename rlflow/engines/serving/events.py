"""A thread that handles events, many of a kind at once."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

Handler = Callable[[list[Any]], None]


class EventThread:
    """A thread that calls handlers with the items that were posted to them, one handler after another.

    The longer handlers take, the more items they get at once.
    """

    def __init__(self, name: str, handlers: Sequence[Handler], call: Callable[[Handler, list[Any]], None]) -> None:
        """Have ``call`` call ``handlers``, in this order for the items of one round. It must not raise."""
        self._handlers, self._call = handlers, call
        self._events: list[tuple[Handler, list[Any]]] = []
        self._lock = threading.Lock()
        """Guards ``_events``."""
        self._thread = ThreadPoolExecutor(1, name)

    def post(self, handler: Handler, items: Iterable[Any]) -> None:
        """Have the thread call a handler with these items, and all that wait for it by then. Returns at once."""
        with self._lock:
            self._events.append((handler, list(items)))
            is_first = len(self._events) == 1
        if is_first:
            with suppress(RuntimeError):  # the process ends, and its other threads still post
                self._thread.submit(self._handle)

    def _handle(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for handler in self._handlers:
            if items := [item for its_handler, posted in events if its_handler == handler for item in posted]:
                self._call(handler, items)
