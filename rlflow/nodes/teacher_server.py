"""A teacher behind a server of vLLM: its likeliest words come over HTTP, and the run needs no GPU for it.

Shapes: T response tokens, K words.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Rollouts, Sequences, TopLogprobs
from rlflow.batch.segments import unfold
from rlflow.batch.top_logprobs import to_records
from rlflow.errors import EngineError, GraphError, RecipeError
from rlflow.nodes.base import Node, NodeView
from rlflow.nodes.distillation import TeacherWords
from rlflow.rewards.base import Failure
from rlflow.rewards.http import Url, check_variable, key_headers, post
from rlflow.schema import Seconds, Text

# Responses that the server reads at once.
_CONCURRENCY = 32


@dataclass(frozen=True, kw_only=True)
class ServedTopLogprobs(TeacherWords, Node, kind="served_top_logprobs", unit="sample"):
    """The likeliest words of a model that a server of vLLM has, in the place of every response token.

    The server reads prompts and responses as token ids, so that its model needs the policy's tokenizer. It must allow
    ``count`` logprobs: vLLM allows 20, and more with ``--max-logprobs``.
    """

    url: Url
    """The address of the server, which ends with ``/v1``."""
    model: Text
    """The name under which the server has the model."""
    api_key: str = "VLLM_API_KEY"
    """The environment variable that holds the key. Without it no key is sent."""
    timeout_s: Seconds = 600.0
    """The time in which the server must answer for each response."""

    def check(self, connected: frozenset[str]) -> None:
        check_variable("api_key", self.api_key)

    def check_graph(self, view: NodeView) -> None:
        super().check_graph(view)
        for generator in view.generators():
            sampling = generator.operation.sampling
            if sampling is not None and sampling.temperature != 1:
                fact = f"is {sampling.temperature:g}, and a server returns logprobs at a temperature of 1"
                raise GraphError(f"graph.{generator.name}.temperature", fact, fix="1, or a teacher with a role")

    def run(self, rollouts: Sequences, others: TopLogprobs | None = None) -> TopLogprobs:
        if rollouts.images is not None:
            raise RecipeError("node", "a server is sent tokens, and no images", fix="top_logprobs, with a role")
        if isinstance(rollouts, Rollouts):
            self._check_text(rollouts.response_ids[0].tolist(), rollouts.texts[0])
        return self.words_of(rollouts, others, self._ask)

    def _ask(self, sequences: Sequences) -> Packed:
        """Return records, B rows."""
        segments = unfold(sequences)
        rows, read = range(len(segments)), (segments.prompt_ids, segments.response_ids)
        with ThreadPoolExecutor(_CONCURRENCY) as threads:
            records = list(threads.map(self._words, *([ids[row] for row in rows] for ids in read)))
        return sequences.response_ids.like(np.concatenate(records))

    def _words(self, prompt: NDArray[Any], response: NDArray[Any]) -> NDArray[np.void]:
        """Return records [T] of one response."""
        ids = np.concatenate([prompt, response]).tolist()
        # The token that is generated is not used; the server generates one at least.
        options = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": self.count}
        answer = self._post("/completions", {"model": self.model, "prompt": ids, **options})
        try:
            places = answer["choices"][0]["prompt_logprobs"][-len(response) :]
            words = np.array([_likeliest(place, self.count) for place in places], np.float64)
            if len(words) != len(response):
                raise ValueError
        except (LookupError, TypeError, ValueError, AttributeError):
            fact = f"expected prompt_logprobs for {len(ids)} tokens from {self.url}, got {str(answer)[:80]}"
            raise EngineError(f"{fact}. Is it a server of vLLM?") from None
        return to_records(np.concatenate([words[:, :, 0], words[:, :, 1]], axis=1).astype(np.float32))

    def _check_text(self, ids: list[int], text: str) -> None:
        """Raise RecipeError where the server reads other text in a response. Its text may have special tokens too."""
        root = self.url.rstrip("/").removesuffix("/v1")
        answer = self._post("/detokenize", {"model": self.model, "tokens": ids}, root)
        read = str(answer.get("prompt")) if isinstance(answer, dict) else str(answer)
        rest = iter(read)
        if not all(letter in rest for letter in text.strip()):
            fact = f"the server's model reads {read[:80]!r} in the tokens of {text[:80]!r}"
            raise RecipeError("model", fact, fix="a teacher with the policy's tokenizer")

    def _post(self, path: str, body: dict[str, Any], url: str | None = None) -> Any:
        answer = post((url or self.url.rstrip("/")) + path, body, self.timeout_s, key_headers(self.api_key))
        if isinstance(answer, Failure):
            raise EngineError(f"The teacher's server does not answer: {answer.reason}.")
        return answer


def _likeliest(place: dict[str, dict[str, Any]], count: int) -> list[tuple[int, float]]:
    """Return the numbers and logprobs of the likeliest words. The text's own token is in ``place`` in any case."""
    ranked = sorted((entry["rank"], int(word), float(entry["logprob"])) for word, entry in place.items())
    return [(word, logprob) for _, word, logprob in ranked[:count]]
