"""The default behaviour of training libraries, for what a published row does not say."""

import re
from dataclasses import dataclass, replace

from benchmarks.published.rows import Row
from rlflow.resources.layout import Offload
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.lora import Lora

DEEPSPEED = TrainingMemory(step=4, step_parameters=1e9, live_parameters=1e9, bucket_elements=5e8)
"""ds_config defaults: sub_group_size, stage3_max_live_parameters, reduce_bucket_size. A step widens its gradients."""
FSDP2 = TrainingMemory(weights=4, gradients=4, optimizer=8, keeps_gradients=False)
"""Sharded fp32 parameters, gathered as bf16; AdamW parameter by parameter (``foreach=False``)."""
MEGATRON = TrainingMemory(gradients=4, fused_layers=True, shards_norms=True, logits=8, offloads_gradients_from=4)
"""Megatron's distributed optimizer, a ``zero_stage`` of 1 with fp32 main gradients: 6 + 12 / ranks bytes."""
HUGGING_FACE = TrainingMemory(weights=2, gradients=2, optimizer=4, step=2, bucket_elements=25e6, keeps_gradients=False)
"""Trainer under DDP with a model loaded in bf16: gradients and Adam's moments have the weights' type, and AdamW's
``foreach`` makes a denominator for all parameters at once. DDP's buckets are a copy of the gradients."""
HUGGING_FACE_FP32 = replace(HUGGING_FACE, weights=4, gradients=4, optimizer=8, step=4)
"""TRL's default, and what LLaMA-Factory casts trained parameters to: fp32, computed in bf16 by autocast."""
FSDP_FOREACH = replace(FSDP2, step=4)
"""AdamW as torch has it by default. NeMo-RL sets ``foreach: False``, which DTensor needs."""
VERL_LOGITS, OPENRLHF_LOGITS, LOGPROB_LOGITS = 6, 10, 14
"""verl (workers/actor/dp_actor.py): bf16 logits, and their gradients by the kernel for cross-entropy and by the
entropy. OpenRLHF: the same kernel on fp32 logits besides those in bf16. NeMo-RL, and others' sampling on Megatron:
log-softmax of each tensor-parallel rank's share in fp32, its exponential and gradients."""


@dataclass(frozen=True, kw_only=True)
class Library:
    training: TrainingMemory
    zero_stage: int
    offload: Offload
    gradient_checkpointing: bool
    offloads_policy: bool
    """True if the policy's state is offloaded while an engine on the same GPUs generates."""
    engine_sleeps: bool
    """True if the engine releases its weights and KV cache while the policy on the same GPUs trains."""
    serves_with_share: bool
    """True if the engine takes a share of the GPU, as vLLM and SGLang do."""
    utilization: float
    """The engine's share of the GPU when the run does not state one."""
    engine_bytes: float
    """Bytes per weight of the engine."""
    references: float
    """Frozen copies of the model on the training GPUs besides the policy."""
    critics: float
    """Trained copies, such as critics, on the training GPUs."""


def of(row: Row) -> Library:
    system = row.system.lower()
    training, zero, offload = _training(row)
    if row.lora_rank:
        training = replace(training, lora=Lora(rank=row.lora_rank))
    if re.search(r"liger|fused_linear|fused_kernels|chunked_loss", row.text) and "not using use_liger" not in row.text:
        training = replace(training, fused_loss=True)
    if re.search(r"seq_cls|embedding|\brm\b", f"{row.text} {row.algorithm.lower()}"):
        # A head with a few outputs in the place of the vocabulary.
        training = replace(training, logits=0)
    references, critics = _others(row)
    colocated = row.placement.startswith("coloc")
    return Library(
        training=training,
        zero_stage=zero,
        offload=offload,
        gradient_checkpointing=_checkpoints(row),
        # NeMo-RL and slime offload before and after every refit; the others on request.
        offloads_policy=bool(re.search(r"nemo|slime", system)) or bool(row.param_offload or row.optim_offload),
        # TRL's vllm_enable_sleep_mode is off by default.
        engine_sleeps="trl" not in system,
        serves_with_share=bool(re.search(r"vllm|sglang", row.rollout_engine.lower())),
        utilization=0.5 if colocated else 0.9,
        engine_bytes=1 if "fp8" in row.text else 2,
        references=references,
        critics=critics,
    )


def _family(row: Row) -> str:
    """Return the family of the library; the sharding's name is more precise than the backend's."""
    backend, sharding = row.train_backend.lower(), row.sharding.lower()
    if re.search(r"fsdp|dtensor", f"{backend} {sharding}"):
        return "fsdp"
    if "deepspeed" in backend or re.search(r"zero[-_ ]?[23]", f"{sharding} {backend}"):
        return "deepspeed"
    return "megatron" if re.search(r"megatron|mcore|dist-opt", f"{backend} {sharding}") else "trainer"


def _training(row: Row) -> tuple[TrainingMemory, int, Offload]:
    """Return how the state is stored, the equivalent ZeRO stage, and what stays offloaded throughout."""
    family, sharding, system = _family(row), row.sharding.lower(), row.system.lower()
    stage = re.search(r"(?:zero|stage)[-_ ]?([0-3])", f"{sharding} {row.train_backend.lower()}")
    nemo, verl = "nemo" in system, "verl" in system
    # ms-swift and verl name so what they move away while generating; DeepSpeed's own offloading is in the sharding.
    offloads = "swift" in system or verl or "slime" in system
    if family == "fsdp":
        training = replace(FSDP2, logits=LOGPROB_LOGITS) if nemo else FSDP_FOREACH
        training = replace(training, logits=VERL_LOGITS) if verl else training
        return training, 3, "weights" if row.param_offload and not offloads else "none"
    if family == "deepspeed":
        training = replace(DEEPSPEED, logits=OPENRLHF_LOGITS) if "openrlhf" in system else DEEPSPEED
        kind: Offload = "weights" if "offload" in sharding or (row.param_offload and not offloads) else "none"
        kind = "optimizer" if kind == "none" and row.optim_offload and not offloads else kind
        return training, int(stage[1]) if stage else 3, kind
    if family == "megatron":
        # NeMo-RL reduces bf16 gradients (grad_reduce_in_fp32: false); the others keep Megatron's fp32 main gradients.
        training = replace(MEGATRON, gradients=2) if nemo else MEGATRON
        if nemo or row.rollout_engine:
            training = replace(training, logits=LOGPROB_LOGITS)
        # optimizer_cpu_offload holds during the step too.
        return training, 1, "optimizer" if row.optim_offload and not (verl or "slime" in system) else "none"
    fp32 = bool(re.search(r"trl|llama-?factory", system)) and not (row.lora_rank and "factory" in system)
    return (HUGGING_FACE_FP32 if fp32 else HUGGING_FACE), 0, "none"


def _checkpoints(row: Row) -> bool:
    value = row.grad_ckpt.lower()
    if value:
        return value in ("true", "full", "1", "unsloth")
    if "nemo-rl" in row.system and row.algorithm == "sft":
        return False
    # Megatron's own default recomputes nothing but the attention's core, which flash attention never saves.
    return _family(row) != "megatron" or "nemo" in row.system


def _others(row: Row) -> tuple[float, float]:
    """Return the number of frozen references and of critics on the training GPUs.

    Preference losses and KL penalties need a reference, except with adapters, which are switched off for it. PPO has a
    critic. NeMo-RL, and runs that offload, keep them on the host.
    """
    algorithm = row.algorithm.lower()
    sampled = bool(row.rollout_engine)
    offloaded = sampled and bool(row.param_offload)
    if "nemo" in row.system or row.placement.startswith("disagg") or offloaded:
        return 0, 0
    compares = algorithm in ("dpo", "kto", "ppo", "gae") or (algorithm == "grpo" and not re.search(r"trl", row.system))
    return float(compares and not row.lora_rank), float(algorithm in ("ppo", "gae") and sampled)


def unfit(row: Row) -> str | None:
    """Return why the row does not determine the library's work; None if it does."""
    text = row.text
    tuner = re.search(r"tuner=(\w+)", text)
    if tuner and tuner[1] not in ("lora", "full"):
        return "a tuner that is neither full nor LoRA"
    if re.search(r"galore|\blisa\b|muon|adafactor|adam_?w?_?8bit|paged_adam|\bsgd\b", text) and "adam(w)" not in text:
        return "an optimizer other than Adam"
    if row.algorithm.lower() == "gkd" or (row.algorithm.lower() == "ppo" and not row.rollout_engine):
        return "further models that are not named"
    if "device_map" in text:
        return "layers spread over GPUs by device_map"
    return None


def assumed(row: Row) -> list[str]:
    """Return the blank columns for which the library has no default."""
    backend = row.train_backend.lower()
    found = []
    if "deepspeed" in backend and not re.search(r"[0-3]", row.sharding + backend):
        found.append("sharding")
    if not row.train_backend:
        found.append("train_backend")
    if not row.grad_ckpt and "swift" not in row.system:
        found.append("grad_ckpt")
    if not row.micro_batch_per_gpu and not row.max_tokens_per_gpu:
        found.append("micro_batch_per_gpu")
    if not row.max_total_len and not row.max_response_len:
        found.append("max_total_len")
    if "megatron" in backend and row.train_tp is None and row.train_pp is None and row.train_ep is None:
        found.append("train_tp")
    return found


def tensor_parallel_size(row: Row) -> int:
    """Return the degree; NeMo-RL's example of supervised 8B training has 4 (sft_openmathinstruct2.yaml)."""
    if row.train_tp is None and "nemo-rl" in row.system and row.algorithm == "sft":
        return 4
    return row.train_tp or 1


def is_packed(row: Row) -> bool:
    """Return whether there is no padding: by name, by micro-batches in tokens, or by verl's use_remove_padding."""
    text = row.text
    if re.search(r"(without|not using)[^:;]*(padding_free|packing)|remove_padding (off|=? ?false)", text):
        return False
    named = re.search(r"packing|padding_free|packed|remove_padding|seqpack", text)
    return bool(row.max_tokens_per_gpu or named) or "verl" in row.system


def tokens_per_group(row: Row) -> int:
    """Return the tokens of a micro-batch that is given in tokens.

    verl, slime and AReaL count the tokens of one GPU, NeMo-RL those of all GPUs that share sequences.
    """
    each = 1 if "nemo" in row.system else (row.train_cp or 1) * (row.train_sp or 1)
    return (row.max_tokens_per_gpu or 0) * each


def sequences_per_sample(row: Row) -> int:
    """Return the sequences per sample: two for preference pairs."""
    return 2 if re.search(r"dpo|\brm\b|simpo|orpo|cpo|kto", row.algorithm.lower()) else 1


_DATA = {"gsm8k": (105.0, 230.0), "openmathinstruct": (100.0, 350.0)}
"""Mean tokens of prompts with the chat template, and of their answers: what models of 7B write, or the data's own."""


def data_lengths(row: Row) -> tuple[float, float] | None:
    return next((lengths for name, lengths in _DATA.items() if name in row.text), None)
