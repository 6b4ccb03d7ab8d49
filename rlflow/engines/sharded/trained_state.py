"""The values that a rank trains, in the buffers in which DeepSpeed keeps them for each ZeRO stage.

DeepSpeed trains float32 values: the weights themselves without ZeRO, else copies of them. A rank has a range of each
flattened weight, and the same range of the weight's moments.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from rlflow.engines.base import EngineSpec
from rlflow.system.compat.deepspeed import relink_moments, weight_fragment, zero3_values

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
"""The kinds of values: the weights, and what the optimizer keeps of each: Muon the first of AdamW's moments."""


class TrainedState:
    """The ranges of weights and moments that this rank trains."""

    def __init__(self, spec: EngineSpec, weights: "Mapping[str, Parameter]", optimizer: Any, stage: int = 0) -> None:
        """Take the trained weights of the model, and torch's optimizer, or DeepSpeed's from ``stage`` 1 of ZeRO."""
        self._stage = stage
        self._weights: Mapping[str, Any] = weights
        self._optimizer = optimizer
        # DeepSpeed's optimizers contain torch's. Without ZeRO there is only that.
        self._torch_optimizer = optimizer.optimizer if self._stage else optimizer
        groups = [] if self._stage else optimizer.param_groups
        self._matrices = {id(weight) for group in groups if group.get("matrices") for weight in group["params"]}
        # Without ZeRO all ranks have all values, and the first one writes them.
        self._writes = self._stage > 0 or spec.rank == 0
        if self._stage in (1, 2) and self.num_steps:
            # DeepSpeed makes the views once the first group of weights has made a step, when others have no moments.
            relink_moments(self._optimizer, now=True)

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all trained weights."""
        return list(self._weights)

    def names_of(self, kind: str) -> Sequence[str]:
        """Return the names of the weights that have values of this kind, once the optimizer has made a step."""
        if kind != MOMENTS[1]:
            return self.names
        return [name for name, weight in self._weights.items() if id(weight) not in self._matrices]

    @property
    def num_steps(self) -> int:
        """Return how many steps the optimizer has made."""
        states = [self._torch_optimizer.state.get(tensor) for tensor in self._stepped_tensors()]
        return max((int(state["step"]) for state in states if state), default=0)

    def get_size(self, name: str) -> int:
        """Return how many values a weight has on all ranks together."""
        weight = self._weights[name]
        return int(weight.ds_numel if self._stage == 3 else weight.numel())

    def get_range(self, name: str) -> tuple[int, int]:
        """Return the start and the size of this rank's range of a flattened weight. Its size may be zero."""
        weight = self._weights[name]
        if self._stage == 3:  # the last shards are padded
            size = weight.ds_tensor.numel()
            start = size * weight.ds_zero_partition_rank
            return start, max(0, min(size, weight.ds_numel - start))
        if self._stage:
            if (fragment := weight_fragment(weight)) is None:
                return 0, 0
            return fragment.lp_fragment_address.start, fragment.lp_fragment_address.numel
        return 0, weight.numel()

    def get_values(self, name: str, kind: str) -> "Tensor":
        """Return this rank's range of a weight or of one of its moments: a view of the values that it trains.

        The range must not be empty.
        """
        weight, moment = self._weights[name], None if kind == WEIGHTS else kind
        if self._stage == 3:
            values = zero3_values(self._optimizer, weight, moment)
        elif self._stage:
            fragment = weight_fragment(weight)
            values = fragment.get_hp_fragment(moment)
        else:
            values = self._torch_optimizer.state[weight][moment] if moment else weight
        trained_range: Tensor = values.detach().view(-1)[: self.get_range(name)[1]]
        return trained_range

    def set_values(self, name: str, kind: str, values: "Tensor") -> None:
        """Give this rank's range of a weight or moment other values. The range must not be empty."""
        self.get_values(name, kind).copy_(values)

    def names_to_write(self) -> Sequence[str]:
        """Return the weights of which this rank writes its range."""
        return [name for name in self._weights if self._writes and self.get_range(name)[1]]

    def set_num_steps(self, count: int) -> None:
        """Set how many steps the optimizer has made. New moments are zero."""
        import torch

        for tensor in self._stepped_tensors():
            state = self._torch_optimizer.state[tensor]
            if not count:
                state.clear()
                continue
            state["step"] = torch.full((), count, dtype=torch.float32, device=tensor.device)
            for moment in MOMENTS[:1] if id(tensor) in self._matrices else MOMENTS:
                if moment not in state:
                    state[moment] = torch.zeros_like(tensor, requires_grad=False)
        if self._stage in (1, 2):
            relink_moments(self._optimizer, now=count > 0)

    def update_model(self) -> None:
        """Give the model the values of the weights that are trained. All ranks call this at the same time."""
        if self._stage == 3:
            zero3 = self._optimizer
            zero3.checkpoint_event_prologue()
            for name, weight in self._weights.items():
                if size := self.get_range(name)[1]:
                    weight.ds_tensor.data.view(-1)[:size].copy_(self.get_values(name, WEIGHTS))
            zero3.checkpoint_event_epilogue()
        elif self._stage:
            zero = self._optimizer
            zero.update_lp_params()

    def _stepped_tensors(self) -> "Sequence[Tensor]":
        """Return the tensors for which torch's optimizer has a state."""
        if self._stage == 3:  # the groups of torch's optimizer are empty between steps
            return cast("Sequence[Tensor]", self._optimizer.fp32_partitioned_groups_flat)
        return [tensor for group in self._torch_optimizer.param_groups for tensor in group["params"]]
