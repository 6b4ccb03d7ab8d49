"""A model's trained weights and its optimizer's state, in safetensors files: the weights, and each kind of moment."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter
    from torch.optim import Optimizer

_WEIGHTS, _SUFFIX = "weights", ".safetensors"


def save_state(folder: Path, weights: Mapping[str, "Parameter"], optimizer: "Optimizer") -> None:
    """Write a file for the weights and one for each tensor that the optimizer keeps of a weight.

    The optimizer's options are the recipe's, and are not written.
    """
    from safetensors.torch import save_file

    kinds: dict[str, dict[str, Tensor]] = {_WEIGHTS: {name: weight.detach() for name, weight in weights.items()}}
    for name, weight in weights.items():
        for kind, value in optimizer.state.get(weight, {}).items():
            kinds.setdefault(kind, {})[name] = value
    for kind, tensors in kinds.items():
        # One file at a time: tensors on a GPU are copied to the host before they are written.
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / f"{kind}{_SUFFIX}")


def restore_state(role: str, folder: Path, weights: Mapping[str, "Parameter"], optimizer: "Optimizer") -> None:
    """Load what ``save_state`` wrote into the weights and the optimizer.

    Raises EngineError for files of another model.
    """
    import torch

    loaded = _load(role, folder, _WEIGHTS, weights)
    with torch.no_grad():
        for name, weight in weights.items():
            weight.copy_(loaded[name])
    state: list[dict[str, Any]] = [{} for _ in weights]
    kinds = sorted(file.name.removesuffix(_SUFFIX) for file in folder.glob(f"*{_SUFFIX}"))
    for kind in kinds:
        if kind != _WEIGHTS:
            loaded = _load(role, folder, kind, weights)
            for values, name in zip(state, weights, strict=True):
                # On the CPU a loaded tensor is a view of the file, which may be deleted while the run goes on.
                values[kind] = loaded[name].clone()
    by_number = {number: values for number, values in enumerate(state) if values}
    optimizer.load_state_dict({"state": by_number, "param_groups": optimizer.state_dict()["param_groups"]})


def _load(role: str, folder: Path, kind: str, weights: Mapping[str, "Parameter"]) -> "dict[str, Tensor]":
    """Return the tensors of one kind, one for each weight, on the weights' device."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / f"{kind}{_SUFFIX}"
    try:
        loaded = load_file(file, device=str(next(iter(weights.values())).device))
    except (FileNotFoundError, SafetensorError) as error:
        raise EngineError(f"role {role}: '{file}' cannot be read ({error}).") from None
    for name in sorted(weights.keys() | loaded.keys()):
        expected = tuple(weights[name].shape) if name in weights else None
        found = tuple(loaded[name].shape) if name in loaded else None
        is_count = kind != _WEIGHTS and found == ()  # of steps
        if found != expected and not (expected and is_count):
            raise EngineError(
                f"role {role}: '{file}' is of another model: {name} has shape {found} there, expected {expected}."
            )
    return loaded
