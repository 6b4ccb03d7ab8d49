"""Weights that no rank holds whole.

Checkpoints that another number of ranks goes on from.
"""

import shutil
from argparse import Namespace
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec, Head
from rlflow.engines.causal_lm.kernels import attention_of
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.sharded.process_group import files_group, wait_for_files
from rlflow.errors import EngineError, RecipeError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_sharded(spec: EngineSpec, config: dict[str, Any], *, head: Head) -> "PreTrainedModel":
    """Load the model of a role; weights of a path are sharded as it is built when ``config`` asks for ZeRO 3.

    Rank 0 reads these layer by layer. New ones are drawn whole in the memory of the host, so that they are the same
    however they are sharded.
    """
    import torch

    sharded = config["zero_optimization"]["stage"] == 3
    with _as_transformers_shards(config) if sharded and spec.model.path is not None else nullcontext():
        return load_model(
            spec.model_name,
            spec.model,
            device="cpu" if sharded else spec.device,
            dtype=getattr(torch, spec.model.dtype),
            seed=spec.seed,
            attention=attention_of(spec),
            head=head,
            trains="Trains" in spec.capabilities,
        )


class _Zero3:
    """What transformers asks of DeepSpeed's configuration. Its own class of this needs one more library."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def is_zero3(self) -> bool:
        return True


@contextmanager
def _as_transformers_shards(config: dict[str, Any]) -> Iterator[None]:
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    from rlflow.engines.sharded.layerwise import layer_by_layer

    # It keeps a weak reference.
    asked = _Zero3(config)
    set_hf_deepspeed_config(asked)
    try:
        with layer_by_layer():
            yield
    finally:
        unset_hf_deepspeed_config()


# Of the folder that is made, beside DeepSpeed's own.
UNIVERSAL = "universal"
# A file that the converter writes beside it, which nobody reads.
_LATEST = "latest_universal"
# Stages whose files DeepSpeed's converter makes into each other's.
_STAGES = ({0}, {1, 2}, {3})


def needs_resharding(spec: EngineSpec, saved: Mapping[str, int], own: Mapping[str, int]) -> bool:
    """Of a checkpoint that ``saved`` ranks at a stage have written. Raises RecipeError for a stage that cannot take it
    over."""
    together = next(stages for stages in _STAGES if own["zero_stage"] in stages)
    if saved["zero_stage"] not in together:
        raise RecipeError(
            f"roles.{spec.role}.zero_stage",
            f"the checkpoint was saved by {saved['world_size']} ranks with ZeRO {saved['zero_stage']}, and these are "
            f"{own['world_size']} with ZeRO {own['zero_stage']}, which cannot take it over",
            fix=f"roles.{spec.role}.zero_stage={saved['zero_stage']}",
        )
    # Without ZeRO one file has everything.
    return saved != own and own["zero_stage"] > 0


@contextmanager
def resharded(spec: EngineSpec, folder: Path, tag: str, shards: int) -> Iterator[None]:
    """While it is open ``folder`` has beside ``tag`` what DeepSpeed's converter makes of it, as ``UNIVERSAL``: weights
    and moments whole, from ``shards`` files. Rank 0 writes it, which takes room for about twice the checkpoint while
    it does.

    Called by all ranks together. Raises EngineError on all of them, with the same words, when it cannot be made.
    """
    from torch.distributed import broadcast_object_list

    reason = ""
    try:
        if spec.rank == 0:
            clear(folder)
            reason = _converted(folder / tag, folder / UNIVERSAL, shards)
        told = [reason]
        broadcast_object_list(told, src=0, group=files_group())
        if told[0]:
            raise EngineError(f"role {spec.role}: '{folder}' cannot be restored ({told[0]}).")
        yield
        wait_for_files()
    finally:
        if spec.rank == 0:
            clear(folder)


def clear(folder: Path) -> None:
    """Removes what ``resharded`` has left in a run that was killed."""
    shutil.rmtree(folder / UNIVERSAL, ignore_errors=True)
    with suppress(OSError):  # also of a folder that can only be read
        (folder / _LATEST).unlink()


@contextmanager
def reads_universal(engine: Any) -> Iterator[None]:
    """DeepSpeed's ``engine`` loads what the converter makes. Its configuration says so once for all otherwise."""
    engine._config.load_universal_checkpoint = True
    try:
        yield
    finally:
        engine._config.load_universal_checkpoint = False


def _converted(source: Path, target: Path, shards: int) -> str:
    """Why not, or nothing."""
    # The converter takes as many as there are.
    if (found := len(list(source.glob("*_optim_states.pt")))) != shards:
        return f"it has {found} of {shards} shards"
    from deepspeed.checkpoint import ds_to_universal

    arguments = Namespace(
        input_folder=str(source),
        output_folder=str(target),
        # More are forked, which a process with threads and a GPU does not survive.
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=True,
    )
    try:
        # It prints what it does.
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            ds_to_universal.main(arguments)
    except Exception as error:  # whatever it stumbles over where files are missing
        return first_line(error) or type(error).__name__
    return ""
