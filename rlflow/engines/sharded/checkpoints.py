"""Checkpoints of weights and optimizer state that ranks share, for any number of ranks and any ZeRO stage.

DeepSpeed's own checkpoints are pickles that fit its ZeRO stage. Here every rank writes what it trains into safetensors
files: for each weight a range of its flattened float32 values, and the same range of its moments. A rank that restores
reads the ranges that it trains itself, from all files that have a part of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded.process_group import files_group
from rlflow.errors import EngineError, first_line

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Parameter

_WEIGHTS, _MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
_STEP_FILE = "optimizer.json"
# A file is copied to host memory before it is written.
_FILE_BYTES = 2**30


def save_shards(spec: EngineSpec, folder: Path, weights: "Mapping[str, Parameter]", optimizer: Any) -> None:
    """Write this rank's part of the trained ``weights`` and of the optimizer's state. No rank waits for another.

    The optimizer's options are the recipe's, and are not written.
    """
    step = _step(optimizer)
    if spec.rank == 0:
        (folder / _STEP_FILE).write_text(json.dumps({"step": step}))
    for kind in (_WEIGHTS, *_MOMENTS) if step else (_WEIGHTS,):
        values = {name: _values(weight, kind, optimizer) for name, weight in weights.items() if _writes(spec, weight)}
        for number, names in enumerate(_in_files(values)):
            _save_file(
                folder / f"{kind}-{spec.rank:05}-{number:05}.safetensors",
                {name: values[name] for name in names},
                {name: str(_range(weights[name])[0]) for name in names},
            )


def restore_shards(spec: EngineSpec, folder: Path, weights: "Mapping[str, Parameter]", optimizer: Any) -> None:
    """Load what the ranks of any layout have saved. All ranks call this at the same time.

    Raises the same EngineError on all of them for files that are damaged, missing, or of another model.
    """
    from safetensors import SafetensorError
    from torch.distributed import all_gather_object

    problem: str | None = None
    try:
        step = _read_step(folder)
        _create_moments(optimizer, step)
        for kind in (_WEIGHTS, *_MOMENTS) if step else (_WEIGHTS,):
            _read_values(folder, kind, weights, optimizer)
    except (EngineError, OSError, SafetensorError) as error:
        problem = first_line(error)
    problems: list[str | None] = [None] * spec.world_size
    all_gather_object(problems, problem, group=files_group())
    if found := [each for each in problems if each is not None]:
        raise EngineError(f"role {spec.role}: '{folder}' cannot be restored ({found[0]}).")
    _update_weights(weights, optimizer)


def _range(weight: Any) -> tuple[int, int]:
    """Return where the range of the flattened weight begins that this rank trains, and how many values it has."""
    if hasattr(weight, "ds_tensor"):  # ZeRO 3, whose last shards are padded
        size = weight.ds_tensor.numel()
        start = size * weight.ds_zero_partition_rank
        return start, max(0, min(size, weight.ds_numel - start))
    if not hasattr(weight, "_hp_mapping"):  # without ZeRO, all ranks train all values
        return 0, weight.numel()
    if weight._hp_mapping is None:
        return 0, 0
    address = weight._hp_mapping.lp_fragment_address
    return address.start, address.numel


def _values(weight: Any, kind: str, optimizer: Any) -> "Tensor":
    """Return this rank's range of the weight in float32, or of one of its moments: a view of what it trains."""
    key = None if kind == _WEIGHTS else kind
    if hasattr(weight, "ds_tensor"):
        found, _ = optimizer._get_fp32_opt_state_partition(weight, release_swap_buffers=False, optim_state_key=key)
    elif hasattr(weight, "_hp_mapping"):
        found = weight._hp_mapping.get_hp_fragment(key)
    else:
        found = weight if key is None else optimizer.state[weight][key]
    values: Tensor = found.detach().view(-1)[: _range(weight)[1]]
    return values


def _writes(spec: EngineSpec, weight: Any) -> bool:
    """Return whether this rank writes its range: the first of the ranks that have the same, unless it is empty."""
    is_shared = hasattr(weight, "ds_tensor") or hasattr(weight, "_hp_mapping")
    return _range(weight)[1] > 0 and (is_shared or spec.rank == 0)


def _in_files(values: "Mapping[str, Tensor]") -> Iterator[Sequence[str]]:
    """Yield the names of the values for each file."""
    names: list[str] = []
    size = 0
    for name, value in values.items():
        if names and size + value.nbytes > _FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += value.nbytes
    if names:
        yield names


def _save_file(file: Path, values: "Mapping[str, Tensor]", starts: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    save_file({name: value.to("cpu", copy=True) for name, value in values.items()}, file, dict(starts))


def _torch_optimizer(optimizer: Any) -> Any:
    """Return the optimizer of torch that one of DeepSpeed's contains, or is."""
    return getattr(optimizer, "optimizer", optimizer)


def _stepped_tensors(optimizer: Any) -> "Sequence[Tensor]":
    """Return the tensors that torch's optimizer has a state for."""
    # Under ZeRO 3, the groups of torch's optimizer are empty between steps.
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return cast("Sequence[Tensor]", optimizer.fp32_partitioned_groups_flat)
    return [tensor for group in _torch_optimizer(optimizer).param_groups for tensor in group["params"]]


def _step(optimizer: Any) -> int:
    """Return how many steps the optimizer has made."""
    states = [_torch_optimizer(optimizer).state.get(tensor) for tensor in _stepped_tensors(optimizer)]
    return max((int(state["step"]) for state in states if state), default=0)


def _read_step(folder: Path) -> int:
    """Return how many steps the saved optimizer has made."""
    try:
        step = json.loads((folder / _STEP_FILE).read_text())["step"]
    except (ValueError, KeyError, TypeError):
        step = None
    if not isinstance(step, int) or step < 0:
        raise EngineError(f"{_STEP_FILE} has no number of steps")
    return step


def _create_moments(optimizer: Any, step: int) -> None:
    """Give the optimizer the state of so many steps, with moments that are still to be read."""
    import torch

    states = _torch_optimizer(optimizer).state
    for tensor in _stepped_tensors(optimizer):
        states[tensor].clear()
        if step:
            states[tensor]["step"] = torch.full((), step, dtype=torch.float32, device=tensor.device)
            states[tensor] |= {moment: torch.zeros_like(tensor, requires_grad=False) for moment in _MOMENTS}
    if hasattr(optimizer, "_hp_optimizer_states_linked"):
        optimizer._hp_optimizer_states_linked = False
        if step:
            optimizer._lazy_init_hp_params_optimizer_state()


def _read_values(folder: Path, kind: str, weights: "Mapping[str, Parameter]", optimizer: Any) -> None:
    """Read this rank's ranges of one kind from all files that have a part of them."""
    with ExitStack() as opened:
        saved = _saved_ranges(opened, folder, kind)
        if unknown := sorted(saved.keys() - weights.keys()):
            raise EngineError(f"it is of another model, with {unknown[0]}")
        for name, weight in weights.items():
            end = max((start + size for start, size, _ in saved.get(name, ())), default=0)
            expected = int(getattr(weight, "ds_numel", weight.numel()))
            if end > expected:
                raise EngineError(f"it is of another model: {name} has {end} values there, expected {expected}")
            start, size = _range(weight)
            if size:
                _read_range(f"{kind} of {name}", saved.get(name, ()), start, _values(weight, kind, optimizer))


def _saved_ranges(opened: ExitStack, folder: Path, kind: str) -> dict[str, list[tuple[int, int, Any]]]:
    """Return the saved ranges of each weight: start, number of values, and a slice that reads them from their file."""
    from safetensors import safe_open

    ranges: dict[str, list[tuple[int, int, Any]]] = {}
    for file in sorted(folder.glob(f"{kind}-*.safetensors")):
        content = opened.enter_context(safe_open(file, "pt"))
        starts = content.metadata() or {}
        for name in content.keys():  # noqa: SIM118
            values = content.get_slice(name)
            shape, start = values.get_shape(), starts.get(name, "")
            if len(shape) != 1 or not start.isdecimal():
                raise EngineError(f"{file.name} has no range of {name}")
            ranges.setdefault(name, []).append((int(start), shape[0], values))
    return ranges


def _read_range(what: str, saved: Sequence[tuple[int, int, Any]], start: int, target: "Tensor") -> None:
    """Fill ``target``, which begins at ``start`` of a flattened weight, from the saved ranges."""
    end, found = start + target.numel(), 0
    for saved_start, size, values in saved:
        low, high = max(start, saved_start), min(end, saved_start + size)
        if low < high:
            target[low - start : high - start].copy_(values[low - saved_start : high - saved_start])
            found += high - low
    if found < target.numel():
        raise EngineError(f"{target.numel() - found} values are missing from the {what}")


def _update_weights(weights: "Mapping[str, Parameter]", optimizer: Any) -> None:
    """Give the weights of the model the values that the optimizer has."""
    if hasattr(optimizer, "update_lp_params"):  # ZeRO 1 and 2
        optimizer.update_lp_params()
    elif hasattr(optimizer, "fp32_partitioned_groups_flat"):
        optimizer.checkpoint_event_prologue()
        for weight in cast("Mapping[str, Any]", weights).values():
            values = _values(weight, _WEIGHTS, optimizer)
            weight.ds_tensor.data.view(-1)[: values.numel()].copy_(values)
        optimizer.checkpoint_event_epilogue()
