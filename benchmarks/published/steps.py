"""The parts of a step in each library, and the predicted time of each. No row gets special treatment."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from benchmarks.published import settings
from benchmarks.published.batches import Batch, batch_of, is_compared, is_full, lengths_are_given, stated_tokens
from benchmarks.published.cards import model_of
from benchmarks.published.cases import Case
from benchmarks.published.padded import padded_generation
from benchmarks.published.rows import Row
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.phases import generate_memory
from rlflow.resources.memory.state import state_terms
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.decoding import Requests, generation
from rlflow.resources.time.passes import (
    Kernels,
    PassBatch,
    scoring,
    sync_seconds,
    training,
)
from rlflow.resources.time.speed import Efficiency, Speed, gpu_speed

# The share of a GPU's memory for weights, gradients and optimizer; activations and logits get the rest.
_STATE_SHARE = 0.85
# Bytes per second by which module.to("cpu") moves a whole state from all GPUs of a host at once: its buffers are not
# pinned, as rlflow's are.
_PAGEABLE = 6e9
# Python time on the controller, of a step and of a sample: published logs of NeMo-RL have 4 s of it in a step of 66 s.
_HOST_STEP_S, _HOST_SAMPLE_S = 0.1, 2e-3
# vLLM's log reports 1.5 s to fall asleep and 1.5 s to wake up; its weights are copied besides.
_WAKE_S = 3.0
# Seconds per module under ZeRO-3: Python, and a gather of few bytes.
_HOOK_S = 0.7e-3
# Bytes that a kernel moves to widen a weight of four bits: 10 ms for a billion of them on an A100 (QwenLM/Qwen,
# README.md, Q-LoRA beside LoRA, which differ by as much for every length).
_WIDENED = 15.0


@dataclass(frozen=True)
class Step:
    parts: Mapping[str, float]
    """Seconds of each part, on the GPUs of that part."""
    overlaps: bool = False
    """True if generation for the next step overlaps everything else."""
    repeated: float = 1
    """The number of steps that the measurement covers."""
    assumed: frozenset[str] = field(default_factory=frozenset)

    @property
    def seconds(self) -> float:
        both = sum(self.parts.get(part, 0.0) for part in ("sync", "host"))
        generated = self.parts.get("generation", 0.0)
        rest = sum(self.parts.values()) - both - generated
        return self.repeated * (both + (max(rest, generated) if self.overlaps else rest + generated))


def unfit(case: Case) -> str | None:
    """Return why the row does not say enough to predict its time; None if it does."""
    row = case.row
    if re.search(r"whole run|sync_time_only|per ppo sample", row.step_time_kind.lower()):
        return "not the time of a step"
    if "bounded verification run" in row.notes and "pretrain_performance" not in row.notes:
        # Megatron-Bridge's cards call their times sanity checks, without the tuned performance recipes.
        return "a run that verifies a recipe, not its speed"
    if "prime" in row.system and row.gpu_type.startswith("B200"):
        return "kernels that were not ready for the GPU"
    if "sharding" in case.unknown and case.train.num_gpus > 1 and not row.rollout_engine:
        return "how the state is sharded is not given"
    if (
        row.train_ep is None
        and case.model.num_experts
        and re.search("automodel|megatron", row.system + row.train_backend)
    ):
        return "expert parallelism not given"
    if case.gpu is None:
        return "no GPU named"
    if case.gpu.peak_tflops is None or case.gpu.memory_gb_s is None:
        return "a GPU without figures"
    if not row.rollout_engine and re.search(r"grpo|ppo|dapo|rloo|distill|swe", row.algorithm.lower()):
        return "generation that the row does not describe"
    if row.rollout_engine and case.memory_gib is None:
        return "the memory of the GPU is not given"
    if row.rollout_engine and case.rollout is None:
        return "no GPUs for generating"
    if batch_of(case) is None and not row.rollout_engine.startswith("ds"):
        return "no size of a step"
    is_guessed = "mean_response_len" in case.assumed and stated_tokens(case) is None
    if not row.rollout_engine and not is_full(row) and is_guessed:
        return "lengths of supervised data unknown"
    if row.rollout_engine and not row.rollout_engine.startswith("ds") and not lengths_are_given(case):
        return "lengths of responses are not given"
    if row.prompts_per_step and row.n_samples is None and re.search(r"grpo|dapo|gspo|rloo", row.algorithm.lower()):
        return "the number of responses to a prompt is not given"
    if case.model.num_encoder_parameters:
        return "images of which the row gives no number"
    return None


def has_unknown_rounds(row: Row) -> bool:
    """Return whether DAPO resamples prompts until a batch is full, so that the generated samples are unknown.

    NeMo-RL's tables state them.
    """
    return row.algorithm.lower() == "dapo" and "generation GBS" not in row.notes


def predict(case: Case, efficiency: Efficiency | None = None) -> Step:
    assert case.gpu is not None
    batch = batch_of(case)
    assert batch is not None
    efficiency = efficiency or Efficiency()
    if is_full(case.row):
        # All samples are equally long.
        efficiency = replace(efficiency, balance=1.0)
    if "scattermoe" in case.row.text:
        # Its kernel needs no numbers of tokens on the host.
        efficiency = replace(efficiency, expert_layer_s=0.0)
    if "balanced fake expert gate" in case.row.notes:
        efficiency = replace(efficiency, expert_balance=1.0)
    # A card of unknown size computes like others of its kind; without any memory it would be a CPU.
    gpu = case.gpu if case.gpu.memory_gib else replace(case.gpu, memory_gib=80.0)
    speed = gpu_speed(gpu, case.gpus_per_host, efficiency)
    train = _layout(case, batch)
    fused = case.training.fused_layers

    def score(model: Architecture) -> float:
        return scoring(
            model,
            train,
            speed,
            PassBatch(tokens=batch.tokens, length=batch.typical_length),
            Kernels(fused_layers=fused, forwards_tokens=settings.forwards_tokens(case.row)),
        ).seconds

    def update(model: Architecture) -> float:
        return training(
            model,
            train,
            speed,
            PassBatch(tokens=batch.tokens, length=batch.typical_length, minibatches=batch.minibatches),
            Kernels(
                gradient_bytes=case.training.gradients,
                fused_layers=fused,
                logit_bytes=(8 if case.training.fused_loss else 24, 12),
                adapters=case.training.lora is not None,
                forwards_tokens=settings.forwards_tokens(case.row),
            ),
        ).seconds

    parts = {"training": update(case.model), "scoring": _scored(case.row) * score(case.model)}
    if case.model.num_experts and "deepspeed" in case.row.train_backend and train.zero_stage == 3:
        # transformers' experts are modules of their own until its version 5, each gathered and released by hooks:
        # forward, recomputed and backward.
        micro_batches = max(1, round(batch.tokens / train.data_parallel_size / train.micro_batch_tokens))
        parts["hooks"] = 3 * micro_batches * _tensors(case.model) * _HOOK_S
    if settings.is_4bit(case.row) and case.training.lora is not None:
        micro_batches = max(1, round(batch.tokens / train.data_parallel_size / train.micro_batch_tokens))
        passes = 3 if train.gradient_checkpointing else 2
        parts["dequantisation"] = passes * micro_batches * case.model.num_parameters * _WIDENED / speed.memory
    if case.row.algorithm.lower() == "ppo" and case.row.rollout_engine:
        critic = critic_of(case)
        parts |= {"critic": update(critic), "values and rewards": 2 * score(critic)}
    if case.rollout is None:
        return Step(parts, assumed=case.assumed)
    parts |= _generates(case, batch, speed)
    if case.colocated and case.habits.engine_sleeps:
        parts["wake"] = _WAKE_S
    if case.colocated and case.habits.offloads_policy:
        state = sum(state_terms(case.model, train, case.training).values()) * GIB
        parts["offload"] = 2 * state / _PAGEABLE
    parts["host"] = _HOST_STEP_S + _HOST_SAMPLE_S * batch.samples
    return Step(parts, overlaps=not case.colocated and _steps_ahead(case.row) > 0, assumed=case.assumed)


def _generates(case: Case, batch: Batch, speed: Speed) -> dict[str, float]:
    assert case.rollout is not None
    assert case.memory_gib is not None
    row = case.row
    share = row.gpu_memory_utilization or (0.6 if case.colocated else 0.8)
    layout = _wide_enough(case, replace(case.rollout, gpu_memory_utilization=share))
    engines = layout.data_parallel_size
    each = batch.samples / engines
    if re.fullmatch(r"hf|huggingface|transformers|deepspeed|ds.*", row.rollout_engine.lower()):
        seconds = padded_generation(
            case.model,
            layout,
            speed,
            Requests(sequences=each, prompts=batch.prompts, responses=batch.responses),
            batch=row.micro_batch_per_gpu or 8,
        )
        return {"generation": sum(seconds)}
    ahead = 1 if case.colocated else max(1, _steps_ahead(row))
    weight_bytes = case.habits.engine_bytes
    engine = generate_memory(case.model, layout, case.memory_gib, weight_bytes=weight_bytes)
    made = generation(
        case.model,
        layout,
        speed,
        Requests(
            sequences=each * ahead,
            group_size=batch.group_size,
            prompts=batch.prompts,
            responses=batch.responses,
            engines=engines,
        ),
        kv_tokens=max(engine.kv_tokens, batch.prompts.mean + batch.responses.longest),
        max_num_seqs=_at_once(case, layout),
        weight_bytes=weight_bytes,
    )
    synced = sync_seconds(
        2.0 * case.model.num_parameters,
        case.train.num_gpus,
        layout.num_gpus,
        speed,
        same_gpus=case.colocated,
        tensors=_tensors(case.model),
    )
    if ahead > 1:
        # New samples replace finished ones, so there is no tail.
        rate = engines * made.concurrency / made.token_seconds
        prefill = made.prefill_seconds / ahead
        return {"generation": batch.samples * batch.responses.mean / rate + prefill, "sync": synced}
    return {"generation": made.seconds, "sync": synced}


def _layout(case: Case, batch: Batch) -> Layout:
    """Return the row's layout, completed so that its state fits.

    Experts, then tensors, are spread over a host's GPUs until the state fits; Adam's state is offloaded as the last
    resort.
    """
    given = replace(case.train, micro_batch_tokens=round(batch.micro_batch_tokens))
    if case.memory_gib is None:
        return given
    tries = [given]
    if "train_tp" in case.assumed:
        sizes = [2**n for n in range(4) if 2**n <= min(case.gpus_per_host, given.num_gpus)]
        experts = sizes if case.model.num_experts else [1]
        tries = [_spread(given, tensor, expert) for tensor in sizes for expert in experts]
    tries += [replace(tries[-1], offload="optimizer")] if given.zero_stage else []
    fitting = (
        layout
        for layout in tries
        if sum(state_terms(case.model, layout, case.training).values()) <= _STATE_SHARE * case.memory_gib
    )
    return next(fitting, tries[-1])


def _spread(layout: Layout, tensor: int, experts: int) -> Layout:
    copies = layout.num_gpus // tensor
    return replace(layout, tensor_parallel_size=tensor, data_parallel_size=copies, expert_parallel_size=experts)


def _wide_enough(case: Case, layout: Layout) -> Layout:
    """Return the row's layout, or one with enough GPUs per copy that the weights leave a third of their share free."""
    if case.row.rollout_tp or not case.memory_gib:
        return layout
    gpus, size = layout.num_gpus, 1
    room = (layout.gpu_memory_utilization or 0.9) * case.memory_gib * GIB * 0.67
    while size < min(gpus, case.gpus_per_host) and 2 * case.model.num_parameters / size > room:
        size *= 2
    return replace(layout, tensor_parallel_size=size, data_parallel_size=max(1, gpus // size))


def _at_once(case: Case, layout: Layout) -> int:
    """Return the number of sequences that an engine receives at once.

    At the time of its comparison with DeepSpeed-Chat, every rank of OpenRLHF's actor, on half of the training GPUs,
    waited for its own micro-batch (trainer/ppo_utils/experience_maker.py).
    """
    row = case.row
    if "openrlhf" in row.system.lower() and (is_compared(row) or row.source_path.startswith("benchmark/")):
        ranks = max(1, case.train.num_gpus // 2)
        return max(1, ranks * (row.micro_batch_per_gpu or 16) // layout.data_parallel_size)
    return 1024


def _tensors(model: Architecture) -> int:
    """Return the number of tensors in a checkpoint: about nine per layer, and three per expert."""
    return 9 * model.num_hidden_layers + 3 * model.num_sparse_layers * (model.num_experts or 0)


def _scored(row: Row) -> float:
    """Count the forward passes before the update by models of the actor's size, without critic and reward model."""
    algorithm, system = row.algorithm.lower(), row.system.lower()
    if not row.rollout_engine:
        # Preference losses of Hugging Face's kind and Megatron's score the pairs by the reference too.
        is_cached = "reference log-probs cached" in row.notes.lower()
        return 1 if algorithm in ("dpo", "kto") and not row.lora_rank and not is_cached else 0
    if "nemo" in system:
        return 2  # policy and reference (nemo_rl/algorithms/grpo.py)
    if "verl" in system and row.placement == "disaggregate" and re.search(r"fully.async", row.text):
        return 0  # the engine's own logprobs are the old ones
    reference = 0 if algorithm in ("dapo", "rloo", "reinforce++") or "areal" in system or "trl" in system else 1
    # TRL's GRPO takes the first update's own logprobs for the old ones.
    return reference + (0 if "trl" in system else 1)


def _steps_ahead(row: Row) -> int:
    """Return the number of steps by which generation may run ahead of the update; 0 if each waits for the other."""
    text = f"{row.text} {row.algorithm} {row.system}".lower()
    named = re.search(r"(\d+)-step off", text)
    if named:
        return int(named[1])
    if "on policy" in text:
        return 0
    return 4 if re.search(r"fully.async|areal", text) else int(bool(re.search(r"one.step.off|async|off-policy", text)))


def critic_of(case: Case) -> Architecture:
    """Return the critic's architecture: the actor's, unless the row says otherwise, as in ``350M critic``."""
    named = re.search(r"([\d.]+)([mb]) critic", case.row.notes.lower())
    if named:
        small = model_of(replace(case.row, model=f"{re.split('[0-9]', case.row.model)[0]}{named[1]}{named[2]}"))
        if small is not None:
            return small
        size = float(named[1]) * (1e6 if named[2] == "m" else 1e9)
        return _shrunk(case.model, size / case.model.num_parameters)
    return case.model


def _shrunk(model: Architecture, share: float) -> Architecture:
    """Return an architecture with about that share of the parameters, by fewer and narrower layers."""
    factor = share ** (1 / 3)
    heads = max(1, round(model.num_attention_heads * factor))
    return replace(
        model,
        num_hidden_layers=max(1, round(model.num_hidden_layers * factor)),
        hidden_size=heads * model.head_dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=max(1, round(model.intermediate_size * factor)),
    )
