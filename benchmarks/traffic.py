"""Count the bytes of all messages that this process exchanges with others through Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import ray
from ray.actor import ActorMethod

from rlflow.runtime.ray import process


@dataclass
class Traffic:
    nbytes: int = 0
    messages: int = 0

    def count(self, content: Any) -> None:
        """Add the size of ``content`` as Ray serializes it, without Ray's own envelope."""
        context = ray._private.worker.global_worker.get_serialization_context()
        self.nbytes += context.serialize(content).total_bytes
        self.messages += 1


@contextmanager
def counted() -> Iterator[Traffic]:
    """Count the messages to and from processes that are called inside the context."""
    traffic = Traffic()
    remote, told, put = ActorMethod._remote, process.as_future, ray.put

    def counted_remote(method: Any, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        traffic.count((args, kwargs))
        return remote(method, args, kwargs, **options)

    def counted_told(*arguments: Any) -> Any:
        answer = told(*arguments)
        answer.add_done_callback(lambda done: None if done.exception() else traffic.count(done.result()))
        return answer

    def counted_put(value: Any, **options: Any) -> Any:
        traffic.count(value)
        return put(value, **options)

    with (
        patch.object(ActorMethod, "_remote", counted_remote),
        patch.object(process, "as_future", counted_told),
        patch.object(ray, "put", counted_put),
    ):
        yield traffic
