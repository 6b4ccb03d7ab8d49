"""An engine whose responses follow from its weights and the keys of samples, over a stand-in for vLLM.

Two engines with the same weights give the same responses, bit for bit, and two with other weights do not. Requests go
through the thread and the sessions that vLLM's go through.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from rlflow.batch import Packed, Prompts, Repeated, Rollouts
from rlflow.engines.base import EngineSpec, Sampling, sample_seed
from rlflow.engines.fake import FakeEngine
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse
from rlflow.engines.journal import Journal
from rlflow.engines.serving.activity import EngineActivity
from rlflow.engines.serving.batching import Batcher, Request
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

SLOTS = 512
_DIGITS = 10


@dataclass(frozen=True)
class _Output:
    """The answer of vLLM to a request that is done."""

    request_id: str
    outputs: Sequence[Any]
    finished: bool = True


class ScriptedCore:
    """A stand-in for vLLM: each step adds a token to every request, of a response that is known beforehand."""

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self._responses: dict[str, list[int]] = {}
        self.forgets: Callable[[int], bool] = lambda number: False
        """Returns whether the request of this number, counted from 0, is forgotten."""
        self._num_requests = 0

    def add_request(self, name: str, prompt: Mapping[str, Any], params: Sequence[int], lora_request: Any) -> None:
        self._responses[name], self._left[name] = list(params), len(params)
        if self.forgets(self._num_requests):
            del self._left[name]
        self._num_requests += 1

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self._left.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self._left)

    def step(self) -> list[_Output]:
        self._left = {name: left - 1 for name, left in self._left.items()}
        done = [name for name, left in self._left.items() if left == 0]
        for name in done:
            del self._left[name]
        return [
            _Output(name, [SimpleNamespace(token_ids=self._responses.pop(name), finish_reason="stop")]) for name in done
        ]


class ScriptedEngine(SessionEngine, FakeEngine):
    """An engine over ``ScriptedCore``. Its responses have up to ``max_tokens`` digits."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self.core = ScriptedCore()
        self._batcher = Batcher(spec.role, lambda: self.core)
        self.journal = Journal(spec.journal, spec.role)
        self.shapes: Mapping[str, Any] = {}
        """The shapes of its first weights, by name, which all later ones must have."""
        self._digest = 0

    @property
    def capacity(self) -> tuple[int, int]:
        return SLOTS, 2**40

    @property
    def decode_steps(self) -> int:
        return self._batcher.decode_steps

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        requests = [
            Request([0], self._response(key, sampling)[len(before.ids) :], before)
            for key, before in zip(samples.keys, partial or [NO_RESPONSE] * len(samples), strict=True)
        ]
        return self._batcher.submit(requests)

    def _response(self, key: Any, sampling: Sampling) -> list[int]:
        draw = np.random.default_rng([sample_seed(self._spec.seed, key), self._digest])
        return list(map(int, draw.integers(0, _DIGITS, draw.integers(1, sampling.max_tokens, endpoint=True))))

    def abort(self, futures: "Collection[Future[Any]]") -> None:
        """Wait for the responses, which take a few steps."""
        for future in futures:
            future.exception()

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        ids = Packed.from_rows([[*each.partial.ids, *each.output.token_ids] for each in responses], np.int32)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=ids,
            logprobs=self._logprobs(ids),
            versions=Repeated(np.array([each.version for each in responses], np.int32), ids.lengths),
            temperature=sampling.scoring_temperature,
            finished=np.ones(len(ids), np.bool_),
            texts=tuple("".join(map(str, ids[row])) for row in range(len(ids))),
            rows=samples.rows,
        )

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Take the digest of the weights. Raises EngineError where some are missing, or have another shape."""
        self._batcher.call(lambda core: self._load(weights, version))

    def _load(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        self._batcher.version = None
        shapes, digest = {}, hashlib.sha256()
        for name, tensor in weights:
            if name not in shapes:
                digest.update(name.encode() + tensor.numpy().tobytes())
            shapes[name] = tuple(tensor.shape)
        self.shapes = self.shapes or shapes
        if shapes != self.shapes:
            raise EngineError(f"role {self._spec.role}: the weights do not fit the model.")
        self._digest = int.from_bytes(digest.digest()[:8], "big")
        self._batcher.version = self.journal.version = version

    def take_activity(self) -> list[EngineActivity]:
        return self._batcher.take_activity()


def mean_digit(texts: Sequence[str], rows: Sequence[Any]) -> list[float]:
    """Return the mean digit of each text as its reward."""
    return [float(np.mean([int(digit) for digit in text])) for text in texts]
