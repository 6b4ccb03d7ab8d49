"""The experts of the tokens of vLLM's requests, on CPUs, where vLLM itself does not report them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlflow.batch.routing import Routing, to_records
from rlflow.system.compat import vllm


class RoutingRecorder:
    """Records the experts that a worker of vLLM uses for each token, by request.

    Tokens of a cached prompt are not computed again. Their experts are found by their place in the KV cache.
    """

    def __init__(self, runner: Any, num_experts: int) -> None:
        """Record what vLLM's model runner computes from now on."""
        self._runner, self._num_experts = runner, num_experts
        self._execute = runner.execute_model
        self._chosen: list[Any] = []
        """The experts that each layer has chosen in the current step."""
        self._cached: Routing | None = None
        """The records of the tokens in the KV cache, by slot."""
        self._requests: dict[str, list[Routing]] = {}
        """The records of each request, in pieces, under vLLM's own name. Those of a token that is computed again do not
        change."""
        vllm.capture_experts(runner.get_model(), lambda experts: self._chosen.append(experts.clone()))
        runner.execute_model = self._execute_and_record

    def take(self, names: Sequence[str]) -> list[Routing | None]:
        """Return the records of requests that are at their end, before vLLM's next step. None for one not started."""
        pieces = {_given_name(name): name for name in self._requests}
        return [np.concatenate(self._requests.pop(pieces[name])) if name in pieces else None for name in names]

    def _execute_and_record(self, scheduled: Any, *arguments: Any, **named: Any) -> Any:
        self._chosen.clear()
        output = self._execute(scheduled, *arguments, **named)
        for name in scheduled.finished_req_ids:
            self._requests.pop(name, None)
        if self._chosen:
            self._record(scheduled.num_scheduled_tokens)
        return output

    def _record(self, counts: dict[str, int]) -> None:
        batch, num_tokens = self._runner.input_batch, sum(counts.values())
        experts = np.stack([layer.numpy() for layer in self._chosen], axis=1)
        new = to_records(experts[:num_tokens], self._num_experts)
        table = batch.block_table[0]
        block_tokens, blocks = table.block_size, table.get_numpy_array()
        if self._cached is None:
            self._cached = np.zeros(self._runner.kv_cache_config.num_blocks * block_tokens, new.dtype)
        first = 0
        for row, name in enumerate(batch.req_ids):
            start, count = int(batch.num_computed_tokens_cpu[row]), counts[name]
            pieces = self._requests.setdefault(name, [])
            num_known = sum(map(len, pieces))
            begin = min(num_known, start)
            positions = np.arange(begin, start + count)
            slots = blocks[row, positions // block_tokens] * block_tokens + positions % block_tokens
            self._cached[slots[start - begin :]] = new[first : first + count]
            pieces.append(self._cached[slots[num_known - begin :]])
            first += count


def _given_name(name: str) -> str:
    """Return the name that a request was added under, to which vLLM adds random characters."""
    return name.partition("-")[0]
