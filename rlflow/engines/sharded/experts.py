"""Experts in parallel: each rank of a group has some experts of every layer, and gets the tokens that chose them.

Tokens are sent to the ranks of their experts and the results back, each by an all-to-all of rows (Lepikhin et al. 2020,
section 3.2). transformers' plans say which modules are experts; torch shards what a rank has of them once more.
Tensor-parallel ranks have the same tokens, so each sends a part of them.
Shapes: N tokens of this rank, K experts of a token, H hidden size, R ranks of a group, M tokens that this rank gets.
Importing this file imports torch.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_to_all_single
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Module

from rlflow.engines.sharded.shard_values import cut_weight, local_values
from rlflow.engines.sharded.styles import refuse, styled_modules
from rlflow.engines.sharded.tensor_parallel import sum_gradients, sum_over
from rlflow.errors import EngineError
from rlflow.system.compat.torch import computing_with

_EXPERTS = "ep_dispatch_experts"
# The style of the weights inside follows from that of their module.
_WEIGHTS_OF_EXPERTS = "grouped_gemm"


def find_experts(model: Any) -> Iterator[Module]:
    """Yield the modules that a plan of transformers names as experts. Raises EngineError for plans of other kinds."""
    plan: dict[str, str] = model.ep_plan or {}
    if unknown := sorted(set(plan.values()) - {_EXPERTS, _WEIGHTS_OF_EXPERTS}):
        refuse(model, "expert", f"style '{unknown[0]}'")
    for _, module, style in styled_modules(model, plan):
        if style == _EXPERTS:
            yield module


def divide_experts(experts: Any, mesh: DeviceMesh, tensor: DeviceMesh | None) -> None:
    """Leave each rank of a group its part of the experts of a layer, and let the module exchange tokens.

    ``tensor``: the ranks with the same tokens.
    """
    size = mesh.size()
    if experts.num_experts % size:
        raise EngineError(f"{experts.num_experts} experts cannot be divided evenly among {size} ranks.")
    for name, _ in list(experts.named_parameters(recurse=False)):
        cut_weight(experts, name, mesh, 0)
    experts.num_experts //= size
    dispatch = _Dispatch(experts, mesh.get_group(), size)
    experts.forward = dispatch if tensor is None else _OfPart(dispatch, tensor)


class _OfPart:
    """The forward pass of experts on a part of the tokens that several ranks have, and the sum of what each gives."""

    def __init__(self, dispatch: "_Dispatch", mesh: DeviceMesh) -> None:
        self._dispatch, self._group = dispatch, mesh.get_group()
        self._rank, self._size = mesh.get_local_rank(), mesh.size()

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return [N, H], of which other ranks compute some rows."""
        rows = torch.arange(len(hidden), device=hidden.device).tensor_split(self._size)[self._rank]
        hidden, weights = (sum_gradients(values, self._group) for values in (hidden, weights))
        outputs = self._dispatch(hidden[rows], chosen[rows], weights[rows])
        return sum_over(torch.zeros_like(hidden).index_copy(0, rows, outputs), self._group)


class _Dispatch:
    """The forward pass of experts of which this rank has a part."""

    def __init__(self, experts: Any, group: ProcessGroup, size: int) -> None:
        self._experts, self._compute = experts, experts.forward
        self._group, self._size = group, size

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return [N, H] from hidden states [N, H], the chosen experts [N, K], and their weights [N, K]."""
        top_k = chosen.shape[1]
        order = chosen.flatten().argsort(stable=True)
        sent, received, ids = self._exchange_counts(chosen)
        tokens = _exchange(hidden[order // top_k], sent, received, self._group)
        back = _exchange(self._of_experts(tokens, ids), received, sent, self._group)
        unsorted = torch.empty_like(back).index_copy(0, order, back)
        combined = (unsorted.view(len(hidden), top_k, -1) * weights[..., None]).sum(1)
        return combined.to(hidden.dtype)

    def _exchange_counts(self, chosen: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Return how many tokens each rank gets and sends, and [M], which of this rank's experts each of its M has."""
        num_local = self._experts.num_experts
        # [R, experts of a rank]: how many tokens each expert gets.
        counts = chosen.flatten().bincount(minlength=num_local * self._size).view(self._size, -1)
        coming = torch.empty_like(counts)
        all_to_all_single(coming, counts, group=self._group)
        # The host waits for the GPU here, once in each layer.
        sent, received = torch.stack([counts.sum(1), coming.sum(1)]).tolist()
        local_ids = torch.arange(num_local, device=chosen.device).repeat(self._size)
        return sent, received, local_ids.repeat_interleave(coming.flatten())

    def _of_experts(self, tokens: Tensor, ids: Tensor) -> Tensor:
        """Return [M, H]: what this rank's experts ``ids`` [M] make of the tokens [M, H]."""
        shards = {name: local_values(weight) for name, weight in self._experts.named_parameters(recurse=False)}
        if not len(ids):
            # A rank without tokens takes part in the backward pass too.
            nothing = sum((weight.sum() for weight in shards.values()), start=tokens.new_zeros(()))
            return tokens + 0 * nothing
        with computing_with(self._experts, shards):
            outputs: Tensor = self._compute(tokens, ids[:, None], tokens.new_ones(len(ids), 1))
        return outputs


def _exchange(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    exchanged: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return exchanged


class _Exchange(torch.autograd.Function):
    """Send some rows to each rank, and get some from each; gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    result = rows.new_empty(sum(received), *rows.shape[1:])
    all_to_all_single(result, rows.contiguous(), list(received), list(sent), group=group)
    return result
