"""Restoring DeepSpeed's checkpoints: without running code from them, and with another number of ranks.

DeepSpeed writes one file of weights and moments per rank. Its converter makes them into a folder in which every weight
is whole, which any number of ranks can load. All these files are pickles.
"""

import os
import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded.process_group import files_group, wait_for_files
from rlflow.errors import EngineError, RecipeError, first_line

UNIVERSAL = "universal"
"""The name of the converted folder, beside DeepSpeed's own."""
# A file that the converter writes beside the folder. rlflow does not use it.
_LATEST = "latest_universal"
# torch.load reads it, and it outweighs the argument weights_only=False.
_DATA_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
# ZeRO stages whose checkpoints DeepSpeed can convert into each other.
_CONVERTIBLE_STAGES = ({0}, {1, 2}, {3})


def needs_conversion(spec: EngineSpec, saved: Mapping[str, int], current: Mapping[str, int]) -> bool:
    """Return whether a checkpoint with the ``world_size`` and ``zero_stage`` of ``saved`` must be converted first.

    Raises RecipeError for a ZeRO stage that cannot load it at all.
    """
    stages = next(stages for stages in _CONVERTIBLE_STAGES if current["zero_stage"] in stages)
    if saved["zero_stage"] not in stages:
        raise RecipeError(
            f"roles.{spec.role}.zero_stage",
            f"the checkpoint was saved by {saved['world_size']} ranks with ZeRO {saved['zero_stage']}, which "
            f"{current['world_size']} ranks with ZeRO {current['zero_stage']} cannot load",
            fix=f"roles.{spec.role}.zero_stage={saved['zero_stage']}",
        )
    # Without ZeRO, one file holds everything.
    return saved != current and current["zero_stage"] > 0


@contextmanager
def loading_data_only() -> Iterator[None]:
    """Let ``torch.load`` read tensors and plain values only, although DeepSpeed asks it for any object.

    A checkpoint may come from anyone, and any other class in a pickle may run any code.
    """
    import torch

    before = os.environ.get(_DATA_ONLY)
    os.environ[_DATA_ONLY] = "1"
    try:
        with torch.serialization.safe_globals(_classes_in_checkpoints()):
            yield
    finally:
        if before is None:
            del os.environ[_DATA_ONLY]
        else:
            os.environ[_DATA_ONLY] = before


def _classes_in_checkpoints() -> list[Any]:
    """Return the classes that DeepSpeed puts into checkpoints. They hold values, and do nothing when created."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils import fragment_address

    def stage(kind: Any, name: str) -> Any:
        """Return a member of the enumeration: all that ``getattr`` may do in a checkpoint.

        Before version 3.11.4, Python stores members of an enumeration as a call of ``getattr``.
        """
        if kind is not ZeroStageEnum:
            raise UnpicklingError("getattr of something else than a ZeRO stage")
        return kind[name]

    return [LossScaler, ZeroStageEnum, fragment_address, (stage, "builtins.getattr")]


def reason(error: Exception) -> str:
    """Return why a checkpoint cannot be loaded, for a sentence about it."""
    if isinstance(error, UnpicklingError):
        return "a file in it has objects besides tensors and plain values, which could run any code"
    return first_line(error) or type(error).__name__


@contextmanager
def converted_checkpoint(spec: EngineSpec, folder: Path, tag: str, num_shards: int) -> Iterator[None]:
    """Convert the checkpoint ``tag`` of ``num_shards`` ranks to ``folder / UNIVERSAL``, and delete that on exit.

    Rank 0 converts, which takes disk space of about twice the checkpoint. Every rank calls this at the same time.
    Raises the same EngineError on all of them if the conversion fails.
    """
    from torch.distributed import broadcast_object_list

    problem = ""
    try:
        if spec.rank == 0:
            delete_converted(folder)
            problem = _convert(folder / tag, folder / UNIVERSAL, num_shards)
        shared = [problem]
        broadcast_object_list(shared, src=0, group=files_group())
        if shared[0]:
            raise EngineError(f"role {spec.role}: '{folder}' cannot be restored ({shared[0]}).")
        yield
        wait_for_files()
    finally:
        if spec.rank == 0:
            delete_converted(folder)


def delete_converted(folder: Path) -> None:
    """Delete what a conversion has written, also one of a run that was killed."""
    shutil.rmtree(folder / UNIVERSAL, ignore_errors=True)
    with suppress(OSError):  # the folder may be read-only
        (folder / _LATEST).unlink()


@contextmanager
def universal_loading(engine: Any) -> Iterator[None]:
    """Make DeepSpeed's ``engine`` load the universal format, which otherwise its configuration fixes for good."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False


def _convert(source: Path, target: Path, num_shards: int) -> str:
    """Run DeepSpeed's converter; return the reason if it fails, else an empty string."""
    # The converter itself accepts any number of files.
    if (found := len(list(source.glob("*_optim_states.pt")))) != num_shards:
        return f"it has {found} of {num_shards} shards"
    from deepspeed.checkpoint import ds_to_universal

    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        # More workers would be forked, which a process with threads and a GPU does not survive.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        # The converter prints its progress.
        with loading_data_only(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            ds_to_universal.main(arguments)
    except Exception as error:  # the converter raises errors of many kinds for missing files
        return reason(error)
    return ""
