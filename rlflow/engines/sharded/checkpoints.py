"""Checkpoints of weights and optimizer state that ranks share, for any number of ranks and any ZeRO stage.

DeepSpeed's own checkpoints are pickles that fit its ZeRO stage. Here every rank writes the ranges of weights and
moments that it trains into safetensors files. A rank that restores reads the ranges that it trains itself, from all
files that have a part of them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded.process_group import files_group
from rlflow.engines.sharded.trained_state import MOMENTS, WEIGHTS, TrainedState
from rlflow.errors import EngineError, first_line, make_printable

if TYPE_CHECKING:
    from torch import Tensor

_STEPS_FILE = "optimizer.json"
# In a file's metadata: where the ranges start, in JSON, apart from those that start at 0.
_STARTS = "starts"
# Values are copied to host memory before they are written, so much at a time. A larger weight has a file of its own.
_FILE_BYTES = 2**30
# torch counts steps in float32.
_MOST_STEPS = 2**24


def save_shards(spec: EngineSpec, folder: Path, state: TrainedState) -> None:
    """Write this rank's ranges. All ranks call this at the same time; tensor-parallel ones wait for each other.

    The options of the optimizer are not saved, because the recipe has them.
    """
    from safetensors.torch import save_file

    num_steps = state.num_steps
    if spec.rank == 0:
        (folder / _STEPS_FILE).write_text(json.dumps({"steps": num_steps}))
    for kind in _kinds(num_steps):
        for number, names in enumerate(_group_by_file(state, kind)):
            values = {name: state.get_values(name, kind).cpu() for name in names}
            ranges = {name: range_ for name, range_ in values.items() if range_.numel()}
            starts = {name: start for name in ranges if (start := state.get_range(name)[0])}
            # One entry, because safetensors writes several in any order: equal states have equal files.
            metadata = {_STARTS: json.dumps(starts)} if starts else None
            save_file(ranges, folder / f"{kind}-{spec.rank:05}-{number:05}.safetensors", metadata)


def restore_shards(spec: EngineSpec, folder: Path, state: TrainedState) -> None:
    """Load a checkpoint of any number of ranks and any ZeRO stage. All ranks call this at the same time.

    Raises an EngineError on all of them for files that are damaged, missing, or of another model.
    """
    from torch.distributed import all_gather_object

    failure, problem = None, None
    try:
        _restore(folder, state)
    except Exception as error:  # torch and safetensors raise many kinds, and the other ranks must not wait for this one
        failure, problem = error, str(error) if isinstance(error, EngineError) else first_line(error)
    problems: list[str | None] = [problem] * spec.world_size
    if spec.world_size > 1:
        all_gather_object(problems, problem, group=files_group())
    if reasons := [reason for reason in problems if reason]:
        raise EngineError(
            f"role {spec.role}: '{folder}' cannot be restored ({make_printable(reasons[0])}).\n"
            "  Fix: move this checkpoint out of the run's folder; resume=FOLDER then takes the one before."
        ) from failure
    state.update_model()


def _kinds(num_steps: int) -> Sequence[str]:
    """Return the kinds of values that there are after so many steps."""
    return (WEIGHTS, *MOMENTS) if num_steps else (WEIGHTS,)


def _group_by_file(state: TrainedState, kind: str) -> Iterator[Sequence[str]]:
    """Yield the names of the weights for each file."""
    names: list[str] = []
    size, of_kind = 0, set(state.names_of(kind))
    for name in state.names_to_write():
        if name not in of_kind:
            continue
        num_bytes = 4 * state.get_range(name)[1]
        if names and size + num_bytes > _FILE_BYTES:
            yield names
            names, size = [], 0
        names.append(name)
        size += num_bytes
    if names:
        yield names


def _restore(folder: Path, state: TrainedState) -> None:
    """Read this rank's ranges, after all files have been checked."""
    num_steps = _read_num_steps(folder)
    with ExitStack() as stack:
        ranges = {kind: _open_ranges(stack, folder, kind) for kind in _kinds(num_steps)}
        for kind, of_kind in ranges.items():
            _check_ranges(kind, of_kind, state)
        state.set_num_steps(num_steps)
        for kind, of_kind in ranges.items():
            for name in state.names_of(kind):
                start, size = state.get_range(name)
                if size:
                    state.set_values(name, kind, _read_range(of_kind[name], start, size))


def _read_num_steps(folder: Path) -> int:
    """Return how many steps the saved optimizer has made."""
    try:
        count = json.loads((folder / _STEPS_FILE).read_text())["steps"]
    except (ValueError, KeyError, TypeError):
        count = None
    if type(count) is not int or not 0 <= count <= _MOST_STEPS:
        raise EngineError(f"{_STEPS_FILE} has no number of steps")
    return count


def _open_ranges(stack: ExitStack, folder: Path, kind: str) -> dict[str, list[tuple[int, int, Any]]]:
    """Return the ranges of each weight: start, number of values, and a slice that reads them from their file."""
    from safetensors import safe_open

    ranges: dict[str, list[tuple[int, int, Any]]] = {}
    for file in sorted(folder.glob(f"{kind}-*.safetensors")):
        content = stack.enter_context(safe_open(file, "pt"))
        starts = json.loads((content.metadata() or {}).get(_STARTS, "{}"))
        for name in content.keys():  # noqa: SIM118
            values, start = content.get_slice(name), starts.get(name, 0)
            if values.get_dtype() != "F32" or len(values.get_shape()) != 1 or type(start) is not int:
                raise EngineError(f"{file.name} has no range of {name}")
            ranges.setdefault(name, []).append((start, values.get_shape()[0], values))
    return ranges


def _check_ranges(kind: str, ranges: Mapping[str, Sequence[tuple[int, int, Any]]], state: TrainedState) -> None:
    """Raise EngineError unless the ranges are those of this model, each value once."""
    expected = state.names_of(kind)
    if unknown := sorted(ranges.keys() - set(expected)):
        raise EngineError(f"it is of another model, with {unknown[0]}")
    for name in expected:
        end = 0
        for start, size in sorted((start, size) for start, size, _ in ranges.get(name, ())):
            if start != end:
                raise EngineError(f"{kind} of {name}: expected a range that starts at {end}, got {start}")
            end += size
        if end != state.get_size(name):
            raise EngineError(f"{kind} of {name}: expected {state.get_size(name)} values, got {end}")


def _read_range(ranges: Sequence[tuple[int, int, Any]], start: int, size: int) -> "Tensor":
    """Return the values from ``start`` of a flattened weight."""
    import torch

    parts, end = [], start + size
    for first, count, values in sorted(ranges, key=lambda entry: entry[0]):
        low, high = max(start, first), min(end, first + count)
        if low < high:
            parts.append(values[low - first : high - first])
    return torch.cat(parts)
