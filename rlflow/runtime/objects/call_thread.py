"""A thread that makes calls for those who must not wait, among them the garbage collector."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Thread


class CallThread:
    """A thread that makes calls in the order in which they were added.

    Calls may be added at any moment. An executor's ``submit`` holds a lock of the whole process, and waits for itself
    when the garbage collector interrupts it and submits as well; the queue here can be interrupted.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self.is_over = False
        """True once the thread has ended. Calls that are added now are made at once."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Make calls until the end of the block, and then those that are left."""
        thread = Thread(target=self._work, name=self._name, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._calls.put(None)
            thread.join()

    def add(self, call: Callable[[], object]) -> None:
        """Make a call, which must not raise, in the thread. Returns at once."""
        self._calls.put(call)
        if self.is_over:
            self._make_calls(block=False)

    def _work(self) -> None:
        self._make_calls(block=True)
        self.is_over = True
        # Others may have added calls just before they could see this.
        self._make_calls(block=False)

    def _make_calls(self, *, block: bool) -> None:
        """Make calls up to the end mark, or as many as there are."""
        with suppress(Empty):
            while (call := self._calls.get(block)) is not None:
                call()
                del call  # it may hold the last reference to a batch, which the wait for the next call would keep
