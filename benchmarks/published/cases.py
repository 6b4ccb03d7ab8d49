"""A row of a table of published runs in rlflow's own terms, or the reason why it cannot be."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.published import cards, libraries, settings
from benchmarks.published.cards import gpu_of, model_of
from benchmarks.published.rows import Row
from benchmarks.published.texts import largest_micro_batch, lengths_of, micro_batch_sequences, possible_micro_batches
from rlflow.resources.cluster import Gpu
from rlflow.resources.layout import Layout
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.lengths import Lengths


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row as rlflow would plan it."""

    row: Row
    model: Architecture
    gpu: Gpu | None
    """None if the row names none."""
    gpus_per_host: int
    train: Layout
    """``micro_batch_tokens`` is the largest micro-batch of the run."""
    token_range: tuple[float, float]
    """The smallest and the largest that it may have been, where the row gives no lengths."""
    training: TrainingMemory
    habits: libraries.Library
    rollout: Layout | None
    """The layout of all generating engines together; None if the run does not generate, or the row names no engine."""
    colocated: bool
    prompts: Lengths
    responses: Lengths
    samples: float | None
    """Samples per step: prompts times responses to each."""
    group_size: int
    packed: bool
    """True if micro-batches are filled with whole samples, or have no padding."""
    accumulates: bool
    """Gradients of earlier micro-batches exist when a micro-batch begins."""
    unknown: frozenset[str]
    """Blank columns that decide about memory and for which the library has no default: what it needs is not judged."""
    assumed: frozenset[str]
    """Blank columns that were filled from a prior, unknown ones among them."""

    @property
    def memory_gib(self) -> float | None:
        return self.gpu.memory_gib if self.gpu else None


@dataclass(frozen=True)
class Skipped:
    row: Row
    reason: str


def case_of(row: Row) -> Case | Skipped:
    """Return the row in rlflow's terms, or why that is impossible, for memory and time equally."""
    reason = _unfit(row)
    if reason:
        return Skipped(row, reason)
    model = model_of(row)
    assert model is not None
    unknown, gpus = set(libraries.unknown(row)), _train_gpus(row)
    if row.placement == "disaggregate" and not (row.train_gpus or row.rollout_gpus):
        unknown.add("train_gpus")
    if cards.may_train_encoder(row):
        unknown.add("whether the encoder of images is trained")
    tensor = settings.tensor_parallel_size(row)
    sequence_parallel = (row.train_cp or 1) * (row.train_sp or 1)
    group = tensor * (row.train_pp or 1) * sequence_parallel
    experts = (row.train_ep or 1) if model.num_experts else 1
    # Experts are spread over the GPUs of a pipeline stage.
    if gpus < group or gpus % group or gpus // (row.train_pp or 1) % experts:
        return Skipped(row, "degrees that do not divide the GPUs")
    profile, samples = libraries.profile_of(row), _samples(row)
    prompts, responses, guessed = lengths_of(row)
    each, pair = samples * group / gpus if samples else None, settings.sequences_per_sample(row)
    sequences = micro_batch_sequences(row, profile.pipeline_sequences, each)
    available = each and each * (row.mini_batch or 1) / (row.prompts_per_step or row.mini_batch or 1)
    tokens = largest_micro_batch(row, prompts, responses, sequences, available, fills=profile.fills)
    library = libraries.library_of(row, model, tokens / sequence_parallel)
    train = Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=row.train_pp or 1,
        data_parallel_size=gpus // group,
        sequence_parallel_size=sequence_parallel,
        expert_parallel_size=experts,
        zero_stage=library.zero_stage,
        offload=library.offload,
        micro_batch_tokens=round(tokens),
        gradient_checkpointing=library.gradient_checkpointing,
        gpu_memory_utilization=None,
    )
    colocated = row.placement.startswith("coloc") and bool(row.rollout_engine)
    return Case(
        row=row,
        model=model,
        gpu=gpu_of(row),
        gpus_per_host=row.gpus_per_node or min(8, row.n_gpus or 8),
        train=train,
        token_range=possible_micro_batches(row, prompts, responses, sequences, round(tokens), fills=profile.fills),
        training=library.training,
        habits=library,
        rollout=_rollout(row, gpus, colocated),
        colocated=colocated,
        prompts=prompts,
        responses=responses,
        samples=samples,
        group_size=row.n_samples or 1,
        packed=settings.is_packed(row),
        accumulates=library.training.keeps_gradients or (each is not None and each * pair > sequences),
        unknown=frozenset(unknown),
        assumed=frozenset(unknown | guessed),
    )


def _unfit(row: Row) -> str | None:
    if row.outcome in ("not_shown", ""):
        return "a blank cell: no evidence"
    if re.search(r"contradict|incomplete", row.text):
        return "a contradictory report"
    reason = cards.unfit(row)
    if reason:
        return reason
    if row.n_gpus is None:
        return "no number of GPUs"
    return settings.unfit(row)


def _train_gpus(row: Row) -> int:
    assert row.n_gpus is not None
    if row.placement != "disaggregate":
        return row.n_gpus
    # Halves, where the split is not given: most published splits are.
    if row.train_gpus:
        return row.train_gpus
    if row.rollout_gpus:
        return row.n_gpus - row.rollout_gpus
    return row.n_gpus // 2


def _rollout(row: Row, train_gpus: int, colocated: bool) -> Layout | None:
    if not row.rollout_engine or row.n_gpus is None:
        return None
    gpus = row.n_gpus if colocated else row.rollout_gpus or row.n_gpus - train_gpus
    tensor, stages = row.rollout_tp or 1, row.rollout_pp or 1
    if gpus < tensor * stages:
        return None
    return Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        data_parallel_size=gpus // (tensor * stages),
        sequence_parallel_size=1,
        zero_stage=None,
        offload=None,
        micro_batch_tokens=8192,
        gradient_checkpointing=False,
        gpu_memory_utilization=row.gpu_memory_utilization,
        eager=libraries.profile_of(row).engine_eager,
    )


def _samples(row: Row) -> float | None:
    if row.prompts_per_step:
        return float(row.prompts_per_step * (row.n_samples or 1))
    generated = re.search(r"generation GBS (\d+)", row.notes)
    if generated:
        return float(generated[1])
    if row.train_batch is None:
        return None
    # verl and its forks count prompts.
    return float(row.train_batch * (row.n_samples or 1 if "verl" in row.system else 1))


def cases(rows: Iterable[Row]) -> tuple[list[Case], list[Skipped]]:
    made = [case_of(row) for row in rows]
    return [case for case in made if isinstance(case, Case)], [case for case in made if isinstance(case, Skipped)]
