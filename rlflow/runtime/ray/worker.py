"""One engine in a process of its own."""

import queue
import socket
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec, WeightBackend
from rlflow.engines.buckets import Bucket, build_buckets
from rlflow.engines.registry import engine_kind
from rlflow.errors import EngineError
from rlflow.runtime.objects.results import ObjectProcess
from rlflow.runtime.ray.engine_specs import build
from rlflow.runtime.weights.gpu import Receivers, send, sender

if TYPE_CHECKING:
    from torch import Tensor


class EngineWorker(ObjectProcess):
    """Its methods are called from several threads at once: what an engine is asked waits in none of its callers' way.

    Libraries keep state by thread, so an engine that is not made for several is only ever called from one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._alone: ThreadPoolExecutor | None = ThreadPoolExecutor(1)
        self._sending: Generator[Bucket] = build_buckets(())
        self._sender: Any = None
        self._arriving: queue.Queue[Bucket | str | None] = queue.Queue(1)
        self._under_way: list[str] = []

    def ready(self) -> None:
        """The process is there."""

    def steps(self) -> int:
        """Of the engine so far, where it takes more prompts while it writes."""
        steps: int = self._engine.decode_steps
        return steps

    def under_way(self) -> list[str]:
        """The methods of the engine that are being called."""
        return list(self._under_way)

    def meeting_port(self) -> int:
        """A free port, for the workers of this one's role to meet at."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def build(self, engine: str, spec: EngineSpec) -> None:
        """Raises EngineError and UserErrors."""
        if engine_kind(engine).concurrent:
            self._alone = None
        self._engine = self._run(build, engine, spec)

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        """A method of the engine."""
        self._under_way.append(method)
        try:
            return self._run(partial(getattr(self._engine, method), *arguments, **named))
        finally:
            self._under_way.remove(method)

    def send_weights(self, keep: bool) -> None:
        """From the first bucket again. Without ``keep`` the weights are gone through, for ranks that only gather."""
        self._run(self._sending.close)
        self._sending = build_buckets(self._engine.weights(), copy_data=keep)

    def next_bucket(self) -> tuple[Bucket | None, bool]:
        """A bucket and True; at the end, None and False."""
        bucket: Bucket | None = self._run(next, self._sending, None)
        return bucket, bucket is not None

    def forget_receivers(self) -> None:
        """Leave the engines that weights went to: some of them are new."""
        if self._sender is not None:
            self._run(self._sender.shutdown)
            self._sender = None

    def send_directly(self, backend: WeightBackend, receivers: Receivers, rank: int, address: str) -> None:
        """All weights from GPU to GPU; every rank of the role is asked at once."""
        if self._sender is None:
            self._sender = self._run(lambda: sender(self._engine, backend, receivers, rank=rank, address=address))
        self._run(send, self._sender, backend)

    def expect_weights(self) -> None:
        """Comes before ``offer`` and ``take_weights``."""
        self._arriving = queue.Queue(1)

    def take_weights(self, version: int) -> float:
        """Takes over what ``offer`` brings, until the end of it. Raises EngineError for weights that break off.

        Returns the seconds that the engine itself took, without those in which it waited for a bucket.
        """
        arriving = self._arriving
        stream = _Stream(arriving)
        began = time.perf_counter()
        try:
            self.call("load_weights", iter(stream), version)
            return time.perf_counter() - began - stream.waited
        finally:
            # Whoever offers more after a failure does not wait for ever.
            self._arriving = queue.Queue()
            while not arriving.empty():
                arriving.get_nowait()

    def offer(self, arriving: "Bucket | str | None") -> None:
        """The next bucket; None after the last one, or why there will be none. Waits while the one before is taken."""
        self._arriving.put(arriving)

    def _run(self, function: Any, *arguments: Any) -> Any:
        return function(*arguments) if self._alone is None else self._alone.submit(function, *arguments).result()


class _Stream:
    """The tensors of all buckets that arrive."""

    def __init__(self, arriving: "queue.Queue[Bucket | str | None]") -> None:
        self._arriving = arriving
        self.waited = 0.0
        """Seconds."""

    def __iter__(self) -> "Iterator[tuple[str, Tensor]]":
        while (bucket := self._next()) is not None:
            if isinstance(bucket, str):
                raise EngineError(bucket)
            yield from bucket.tensors()

    def _next(self) -> "Bucket | str | None":
        began = time.perf_counter()
        bucket = self._arriving.get()
        self.waited += time.perf_counter() - began
        return bucket
