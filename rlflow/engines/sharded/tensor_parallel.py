"""Tensor parallelism: neighbouring ranks have the same tokens, and each a part of the heads, MLPs and vocabulary.

A layer's first products have a part of the outputs, its last one sums over the ranks (Shoeybi et al. 2019, section 3).
transformers' plans say which layers these are; torch shards what a rank has of them once more.
Importing this file imports torch.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, all_reduce
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Linear, Module
from torch.nn.functional import linear

from rlflow.engines.sharded.shard_values import cut_weight, local_values
from rlflow.engines.sharded.styles import refuse, styled_modules
from rlflow.resources.models.architecture import heads_divide
from rlflow.system.compat.torch import computing_with

_COLUMNS, _ROWS, _OF_HEADS = "colwise", "rowwise", "replicated_with_grad_allreduce"


def cut_layers(model: Any, mesh: DeviceMesh) -> None:
    """Leave each rank of a group its part of the layers that a plan of transformers names, and of the vocabulary.

    Experts stay whole, to be divided. Raises EngineError for a plan with other styles, and for sizes that the ranks
    cannot share evenly.
    """
    config, size, group = model.config.get_text_config(), mesh.size(), mesh.get_group()
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", heads)
    if not heads_divide(heads, key_heads, size) or key_heads % size:
        refuse(model, "tensor", f"{size} ranks cannot share {heads} attention heads ({key_heads} of keys and values)")
    experts = tuple(model.ep_plan or ())
    plan = {pattern: style for pattern, style in (model.tp_plan or {}).items() if not pattern.startswith(experts)}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = {name: (module, style) for name, module, style in styled_modules(model, plan) if module not in ends}
    if not modules:
        refuse(model, "tensor", "transformers has no plan for it")
    for name, (module, style) in modules.items():
        if style == _COLUMNS:
            _cut(model, module, mesh, 0)
            module.forward = _computing(module, local_values)
        elif style == _ROWS:
            _cut(model, module, mesh, 1)
            module.forward = _Rows(module, group)
        elif style == _OF_HEADS:
            module.forward = _computing(module, lambda weight: sum_gradients(weight, group))
        else:
            refuse(model, "tensor", f"style '{style}' of {name}")
    for name in {name.rpartition(".")[0] for name, (_, style) in modules.items() if style == _COLUMNS}:
        layer = model.get_submodule(name)
        for child, product in layer.named_children():
            if isinstance(product, Linear) and f"{name}.{child}" not in modules:
                refuse(model, "tensor", f"{name}.{child} has no style")
        layer.register_forward_pre_hook(_SumsGradientsOfInput(group), with_kwargs=True)
    _cut_vocabulary(model, mesh)


def _cut(model: Any, module: Module, mesh: DeviceMesh, dim: int) -> None:
    """Leave this rank its part of a layer's weight, and of the bias of its part of the outputs."""
    for name, weight in list(module.named_parameters(recurse=False)):
        if dim < weight.dim():
            if weight.shape[dim] % mesh.size():
                refuse(model, "tensor", f"{mesh.size()} ranks cannot share a width of {weight.shape[dim]}")
            cut_weight(module, name, mesh, dim)


def _cut_vocabulary(model: Any, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the embeddings and of the output layer, which computes with it by itself."""
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embeddings.weight
    for module in (embeddings,) if head is None or is_tied else (embeddings, head):
        _cut(model, module, mesh, 0)
    if is_tied:
        head.weight = embeddings.weight
    embeddings.forward = _Embeddings(embeddings, mesh)


def sum_over(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return the sum of the ranks' values, whose gradient is the same on all of them."""
    summed: Tensor = _Sum.apply(values, group)  # type: ignore[no-untyped-call]
    return summed


def sum_gradients(values: Tensor, group: ProcessGroup) -> Tensor:
    """Return values that are the same on all ranks, and have the sum of the gradients that the ranks compute."""
    same: Tensor = _SumGradients.apply(values, group)  # type: ignore[no-untyped-call]
    return same


def _computing(module: Any, prepare: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Return the forward pass of a module with prepared weights."""
    forward = module.forward

    def compute(*inputs: Any) -> Tensor:
        weights = {name: prepare(weight) for name, weight in module.named_parameters(recurse=False)}
        with computing_with(module, weights):
            outputs: Tensor = forward(*inputs)
        return outputs

    return compute


class _Rows:
    """A product with this rank's part of the inputs, summed over the ranks."""

    def __init__(self, module: Any, group: ProcessGroup) -> None:
        self._module, self._group = module, group

    def __call__(self, values: Tensor) -> Tensor:
        summed = sum_over(linear(values, local_values(self._module.weight)), self._group)
        return summed if self._module.bias is None else summed + self._module.bias


class _Embeddings:
    """The embeddings of the tokens in this rank's part of the vocabulary, summed over the ranks."""

    def __init__(self, module: Any, mesh: DeviceMesh) -> None:
        self._compute, self._group = _computing(module, local_values), mesh.get_group()
        self._count = module.num_embeddings // mesh.size()
        self._first = mesh.get_local_rank() * self._count
        if module.padding_idx is not None:
            # Its embedding has no gradient, on the rank that has it.
            place = module.padding_idx - self._first
            module.padding_idx = place if 0 <= place < self._count else None

    def __call__(self, ids: Tensor) -> Tensor:
        places = ids - self._first
        is_here = (places >= 0) & (places < self._count)
        return sum_over(self._compute(torch.where(is_here, places, 0)) * is_here[..., None], self._group)


class _SumsGradientsOfInput:
    """A hook that gives the hidden states, which several products read, the gradients of all ranks in one sum."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __call__(self, module: Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "hidden_states" in named:
            return inputs, {**named, "hidden_states": sum_gradients(named["hidden_states"], self._group)}
        return (sum_gradients(inputs[0], self._group), *inputs[1:]), named


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        return _summed(values, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.group), None


def _summed(values: Tensor, group: ProcessGroup) -> Tensor:
    result = values.clone(memory_format=torch.contiguous_format)
    all_reduce(result, group=group)
    return result
