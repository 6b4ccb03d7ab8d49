"""A worker process: one engine of one rank of a role."""

import gc
import os
import queue
import threading
from collections.abc import Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec, GpuTransport
from rlflow.engines.buckets import Bucket, build_buckets
from rlflow.engines.memory import PhasePeaks
from rlflow.engines.registry import engine_kind
from rlflow.engines.times import Span, Times
from rlflow.errors import EngineError
from rlflow.runtime.engine_specs import build
from rlflow.runtime.objects.object_process import ObjectProcess, Pulse
from rlflow.runtime.weights.gpu import Receivers, make_sender, send_weights
from rlflow.system.ports import free_port

if TYPE_CHECKING:
    from torch import Tensor


class EngineWorker(ObjectProcess):
    """A process around one engine. Ray calls its methods from several threads, so that no call waits for another.

    Libraries keep state per thread. An engine that is not made for several threads is only ever called from one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._engine: Any = None
        self._engine_thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1)
        """The one thread that calls the engine; None for a concurrent engine."""
        self._sending: Generator[Bucket] = build_buckets(())
        self._sender: Any = None
        self._incoming: queue.Queue[Bucket | str | None] = queue.Queue(1)
        self._calls_in_progress: list[str] = []
        self._calls = Times()

    def prepare(self, variables: Mapping[str, str]) -> None:
        """Set environment variables, before an engine imports the libraries that read them.

        As a runtime environment of Ray they would cost half a second a process, in which Ray starts Python twice.
        """
        os.environ.update(variables)
        self.reuse_memory()

    def pulse(self) -> Pulse:
        """Return a sign of life, with the number of steps of a concurrent engine."""
        return Pulse(os.getpid(), getattr(self._engine, "progress", None))

    def calls_in_progress(self) -> list[str]:
        """Return the methods of the engine that are running."""
        return list(self._calls_in_progress)

    def free_port(self) -> int:
        """Return a free port of this host, where the workers of the role can meet."""
        return free_port("")

    def build(self, engine: str, spec: EngineSpec) -> None:
        """Build the engine. Raises EngineError and UserErrors."""
        if engine_kind(engine).concurrent:
            self._engine_thread = None
        self._engine = self._run(build, engine, spec)
        # Every hand-over of a GPU collects garbage, which need not walk through the libraries and the model each time.
        gc.collect()
        gc.freeze()
        self._peaks = PhasePeaks(spec.device)
        self._peaks.record(self._engine)

    def stay(self) -> None:
        """Wait as long as the process lives."""
        threading.Event().wait()

    def follow(self, engine: str, spec: EngineSpec) -> None:
        """Run the part of an engine on this host, which is not its first. Raises EngineError when it ends."""
        engine_kind(engine).engine.follow(spec)
        raise EngineError(f"role {spec.role}: a rank of an engine has ended.")

    def record_calls(self) -> None:
        """Record the calls of the engine from now on, for a trace."""
        self._calls = Times(self._engine)

    def take_calls(self) -> list[Span]:
        """Return the calls of the engine since the last time."""
        return self._calls.take()

    def peak_bytes(self) -> dict[str, int]:
        """Return the peak memory of the process in each phase so far."""
        return dict(self._peaks.bytes)

    def take_memory_share(self) -> float:
        """Return the used share of the GPU's memory at the peak since the last call."""
        return self._peaks.take_share()

    def call(self, method: str, /, *arguments: Any, **named: Any) -> Any:
        """Call a method of the engine."""
        self._calls_in_progress.append(method)
        try:
            return self._run(partial(getattr(self._engine, method), *arguments, **named))
        finally:
            self._calls_in_progress.remove(method)

    def start_sending(self, copy_data: bool) -> None:
        """Start again from the first bucket. Ranks that only help to gather the weights do not ``copy_data``."""
        self._run(self._sending.close)
        self._sending = build_buckets(self._engine.weights(), copy_data=copy_data)

    def next_bucket(self) -> tuple[Bucket | None, bool]:
        """Return a bucket and True; after the last one, None and False."""
        bucket: Bucket | None = self._run(next, self._sending, None)
        return bucket, bucket is not None

    def start_receiving(self) -> None:
        """Prepare for ``push_bucket`` and ``receive_weights``."""
        self._incoming = queue.Queue(1)

    def push_bucket(self, bucket: "Bucket | str | None") -> None:
        """Add the next bucket: None after the last one, or the reason why no more will come.

        Waits until the engine has started to load the bucket before it.
        """
        self._incoming.put(bucket)

    def receive_weights(self, version: int) -> None:
        """Load the buckets that ``push_bucket`` adds. Raises EngineError when no more will come."""
        incoming = self._incoming
        try:
            self.call("load_weights", _tensors_of(incoming), version)
        finally:
            # After a failure nobody waits for room in the queue.
            self._incoming = queue.Queue()
            while not incoming.empty():
                incoming.get_nowait()

    def send_gpu_to_gpu(self, transport: GpuTransport, receivers: Receivers, rank: int, address: str) -> None:
        """Send all weights from GPU to GPU. All ranks of the role are called at once."""
        if self._sender is None:
            self._sender = self._run(
                lambda: make_sender(self._engine, transport, receivers, rank=rank, address=address)
            )
        self._run(send_weights, self._sender, transport)

    def disconnect_receivers(self) -> None:
        """Disconnect from the engines that receive weights, since some of them are new."""
        if self._sender is not None:
            self._run(self._sender.shutdown)
            self._sender = None

    def _run(self, function: Any, *arguments: Any) -> Any:
        """Call a function in the thread of the engine."""
        if self._engine_thread is None:
            return function(*arguments)
        return self._engine_thread.submit(function, *arguments).result()


def _tensors_of(incoming: "queue.Queue[Bucket | str | None]") -> "Iterator[tuple[str, Tensor]]":
    """Yield the tensors of all buckets that arrive in a queue."""
    while (bucket := incoming.get()) is not None:
        if isinstance(bucket, str):
            raise EngineError(bucket)
        yield from bucket.tensors()
