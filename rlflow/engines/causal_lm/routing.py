"""The choice of experts: replayed where a model is trained, and recorded where it samples.

Engines round differently, so that a router chooses other experts for some tokens than the router of the engine that
sampled them. The ratio of their probabilities is then that of two different networks. With routing replay the trained
model uses the sampler's experts; how much it weighs each is its own, with a gradient. Source: R3 (arXiv 2510.11370).

All routers of transformers choose by ``topk`` over the scores of all experts, which is answered here.
Shapes: N tokens, L layers with experts, E experts, K experts of a token.
Importing this file imports torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlflow.batch.routing import Routing, from_records, to_records
from rlflow.engines.causal_lm.host_arrays import to_device
from rlflow.engines.causal_lm.packing import Index
from rlflow.engines.causal_lm.pretrained import count_experts
from rlflow.errors import EngineError

_TOPK = (torch.topk, Tensor.topk)


class Routers:
    """The routers of a model, in the order of its layers."""

    def __init__(self, model: Any, num_experts: int) -> None:
        self._num_experts = num_experts
        self._name = type(model).__name__
        self._replayed: Tensor | None = None
        """[L, N, K]: the experts of the current pass; negative where a router chooses. None where all choose."""
        self._chosen: list[Tensor] | None = None
        """The experts that routers have chosen, while they are recorded, [N, K] each."""
        blocks = [module for module in model.modules() if hasattr(module, "experts")]
        self._num_layers = len(blocks)
        for layer, block in enumerate(blocks):
            block.forward = partial(self._forward, layer, block.forward)

    @classmethod
    def of(cls, model: Any) -> "Routers | None":
        """Return the routers of a model, which they change; None for a model without experts."""
        num_experts = count_experts(model.config)
        return cls(model, num_experts) if num_experts else None

    def replay(self, routing: Routing | None, places: Index | None, device: torch.device) -> None:
        """Use these experts from now on, where the backward pass computes a layer again, too.

        ``places`` [N] says which record is that of each token, -1 for tokens whose experts the model chooses. Without
        ``routing`` it chooses all.
        """
        self._replayed = None
        if routing is not None and places is not None and len(routing):
            experts = from_records(routing[places], self._num_experts, self._num_layers).astype(np.int32)
            experts[places < 0] = -1
            self._replayed = to_device(experts.transpose(1, 0, 2), device)

    @contextmanager
    def recording(self) -> "Iterator[Callable[[], Routing]]":
        """Record the choices of routers; yields a function that takes the records [N] of the pass before."""
        chosen: list[Tensor] = []
        self._chosen = chosen

        def take() -> Routing:
            assert len(chosen) == self._num_layers
            experts = torch.stack(chosen, dim=1).cpu().numpy()
            chosen.clear()
            return to_records(experts, self._num_experts)

        try:
            yield take
        finally:
            self._chosen = None

    def _forward(self, layer: int, forward: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        """Return the outputs of a layer's experts."""
        if self._replayed is None and self._chosen is None:
            return forward(*inputs, **named)
        choice = _Choice(self._num_experts, None if self._replayed is None else self._replayed[layer])
        with choice:
            outputs = forward(*inputs, **named)
        if len(choice.experts) != 1:
            raise EngineError(f"a {self._name} chooses its experts in a way for which there is no routing replay.")
        if self._chosen is not None:
            self._chosen.append(choice.experts[0])
        return outputs


class _Choice(TorchFunctionMode):
    """Answers a router's ``topk`` over all experts, not one over groups of experts."""

    def __init__(self, num_experts: int, replayed: Tensor | None) -> None:
        super().__init__()
        self._num_experts, self._replayed = num_experts, replayed
        self.experts: list[Tensor] = []
        """The experts of each answer, [N, K]."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function not in _TOPK or args[0].shape[-1] != self._num_experts:
            return result
        scores, experts = args[0], result.indices
        if self._replayed is not None:
            replayed = self._replayed.view(experts.shape)
            experts = torch.where(replayed < 0, experts, replayed)
            result = torch.return_types.topk((scores.gather(-1, experts), experts))
        self.experts.append(experts.flatten(0, -2))
        return result
