"""The rows of a table of published runs."""

import csv
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints


@dataclass(frozen=True, kw_only=True)
class Row:
    """A line of the table under the names of its columns. Blank: None, or the empty text."""

    id: str
    source_path: str
    evidence: str
    system: str
    algorithm: str
    model: str
    params_b: float | None
    n_nodes: int | None
    gpus_per_node: int | None
    n_gpus: int | None
    gpu_type: str
    gpu_mem_gb: float | None
    train_backend: str
    sharding: str
    lora_rank: int | None
    train_tp: int | None
    train_pp: int | None
    train_cp: int | None
    train_ep: int | None
    train_sp: int | None
    placement: str
    train_gpus: int | None
    rollout_gpus: int | None
    rollout_engine: str
    rollout_tp: int | None
    rollout_pp: int | None
    prompts_per_step: int | None
    train_batch: int | None
    mini_batch: int | None
    micro_batch_per_gpu: int | None
    max_tokens_per_gpu: int | None
    n_samples: int | None
    max_prompt_len: int | None
    max_response_len: int | None
    max_total_len: int | None
    mean_prompt_len: float | None
    mean_response_len: float | None
    grad_ckpt: str
    param_offload: bool | None
    optim_offload: bool | None
    gpu_memory_utilization: float | None
    outcome: str
    peak_mem_gb: float | None
    peak_mem_kind: str
    step_time_s: float | None
    step_time_kind: str
    gen_time_s: float | None
    logprob_time_s: float | None
    ref_time_s: float | None
    train_time_s: float | None
    tokens_per_s_per_gpu: float | None
    mfu: float | None
    notes: str

    @property
    def text(self) -> str:
        """Return the texts that name the run's options, in lower case."""
        return f"{self.source_path} {self.notes}".lower()


def read(file: Path) -> list[Row]:
    """Read a table; columns that it lacks are blank."""
    with file.open(newline="") as stream:
        return [row_of(line) for line in csv.DictReader(stream)]


def row_of(line: Mapping[str, str | None]) -> Row:
    kinds = get_type_hints(Row)
    return Row(**{field.name: _value(line.get(field.name) or "", kinds[field.name]) for field in fields(Row)})


def _value(text: str, kind: Any) -> Any:
    text = text.strip()
    if kind is str:
        return "" if text.lower() in ("none", "nan", "n/a") else text
    wanted = next(part for part in get_args(kind) if part is not types.NoneType)
    if wanted is bool:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    try:
        return wanted(float(text))
    except (ValueError, OverflowError):
        return None
