"""Profiles of training libraries: how each stores a model, and what it does where a published row says nothing."""

import re
from dataclasses import dataclass, replace

from benchmarks.published import settings
from benchmarks.published.rows import Row
from rlflow.resources.layout import Offload
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import LINEAR_LAYERS, Lora

DEEPSPEED = TrainingMemory(step=4, step_parameters=1e9, live_parameters=1e9, bucket_elements=5e8)
"""ds_config defaults: sub_group_size, stage3_max_live_parameters, reduce_bucket_size. A step widens its gradients."""
MEGATRON = TrainingMemory(gradients=4, fused_layers=True, shards_norms=True, logits=8, offloads_gradients_from=4)
"""Megatron's distributed optimizer, a ``zero_stage`` of 1 with fp32 main gradients: 6 + 12 / ranks bytes."""
PURE_BF16 = TrainingMemory(weights=2, gradients=2, optimizer=4, step=2, bucket_elements=25e6, keeps_gradients=False)
"""A model loaded in bf16 and trained without a master copy: gradients and Adam's moments have the weights' type, and
AdamW's ``foreach`` makes a denominator for all parameters at once. DDP's buckets are a copy of the gradients."""
FP32 = replace(PURE_BF16, weights=4, gradients=4, optimizer=8, step=4)
"""A model loaded in fp32 and computed in bf16 by autocast: TRL's default."""
FSDP2 = TrainingMemory(weights=4, gradients=4, optimizer=8, keeps_gradients=False)
"""Sharded fp32 parameters, gathered as bf16; AdamW parameter by parameter (``foreach=False``)."""
FSDP = replace(FSDP2, step=4)
"""The same with torch's own AdamW, which steps all parameters at once."""
MEGATRON_FSDP = replace(FSDP2, weights=6, fused_layers=True, shards_norms=True, logits=2)
"""Megatron-FSDP shards its fp32 main weights and a copy of them in bf16."""
LONG = 65_536
"""A sample so long is a micro-batch by itself, unless the row says otherwise."""
TE_LOGITS = 2
"""Transformer Engine's cross-entropy, which Megatron-Bridge's recipes set: gradients take the place of bf16 logits."""
FREED_LOGITS = 12
"""torchtitan deletes logits before the backward pass (train.py): their log-softmax in fp32, and two gradients."""
LOGPROB_LOGITS, VERL_LOGITS, OPENRLHF_LOGITS, FAST_LOGITS = 14, 8, 10, 8
"""Bytes of a logit at the peak of a loss. NeMo-RL, and others' sampling on Megatron: log-softmax of each
tensor-parallel rank's share in fp32, its exponential and gradients. verl (workers/actor/dp_actor.py) divides a view of
its bf16 logits by the temperature in place: autograd then holds four copies of their gradient (measured with torch's
CPU allocator, tests/benchmarks/published/test_memory.py). OpenRLHF: the kernel for cross-entropy on fp32 logits besides
those in bf16. Kernels for cross-entropy alone (Unsloth's, Liger's): bf16 logits, their copy in fp32, and gradients in
bf16."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The habits of a library, which count where a row does not say otherwise."""

    training: TrainingMemory
    adapter_inputs: float = 0
    """Bytes of a value of an adapted layer's input in the copy that peft makes for adapters in fp32; autocast converts
    it to bf16."""
    frozen_bytes: float | None = 2
    """Bytes of a frozen parameter beside adapters; None: as many as of a trained one."""
    checkpoints: bool | None = None
    """The default of gradient checkpointing; None: every recipe sets it."""
    fills: bool = False
    """Samples are padded or packed to the maximum length."""
    chunk_tokens: int | None = None
    """Tokens whose logits exist at a time."""
    chunk_vocabulary: int | None = None
    """Outputs whose logits exist at a time, of all tokens."""
    sequences: int | None = None
    """Sequences of a micro-batch by default."""
    pipeline_sequences: int | None = None
    """Sequences of a micro-batch where there are pipeline stages."""
    offloads_between_phases: bool = False
    """``param_offload`` and ``optim_offload`` move state away while an engine generates, not while the role trains."""
    engine_sleeps: bool = True
    """The engine releases its weights and KV cache while the policy on the same GPUs trains."""
    engine_process: bool = False
    """The engine on the policy's GPUs has a process of its own."""
    utilization: float | None = None
    """The engine's share of the GPU by default."""
    engine_tensor_parallel: int | None = None
    """The engine's tensor-parallel size by default."""
    engine_eager: bool | None = None
    """The engine runs without CUDA graphs by default."""
    reference_adapters: bool = False
    """The reference of a run with adapters is a frozen copy of them, and not the model without any."""
    gathers_at_once: bool = False
    """ZeRO 3 gathers all weights at once by default when they go to an engine."""


_NEMO = Profile(training=replace(MEGATRON, gradients=2, logits=LOGPROB_LOGITS), engine_process=True, utilization=0.6)
_TRAINER = Profile(training=PURE_BF16, adapter_inputs=2)
_TRL = Profile(training=FP32, adapter_inputs=2, engine_sleeps=False, utilization=0.3, engine_tensor_parallel=1)
# move_model_batches divides the weights of a sync, and is not set by default (docs/source/Instruction/GRPO.md).
_SWIFT = Profile(
    gathers_at_once=True,
    training=PURE_BF16,
    adapter_inputs=2,
    checkpoints=True,
    offloads_between_phases=True,
    utilization=0.9,
    engine_tensor_parallel=1,
)
# verl/trainer/config/model/hf_model.yaml: enable_gradient_checkpointing. Engines had no CUDA graphs by default until
# August 2025 (pull request 2956).
_VERL = Profile(
    engine_eager=True,
    training=replace(FSDP, logits=VERL_LOGITS),
    frozen_bytes=None,
    checkpoints=True,
    offloads_between_phases=True,
    utilization=0.5,
)
_PROFILES: tuple[tuple[str, str, Profile], ...] = (
    # NeMo-RL reduces bf16 gradients (grad_reduce_in_fp32: false), and sets ``foreach: False``, which DTensor needs.
    ("nemo-rl", "megatron", _NEMO),
    ("nemo-rl", "fsdp", replace(_NEMO, training=replace(FSDP2, logits=LOGPROB_LOGITS))),
    # One pack in a micro-batch, and no checkpointing, unless a recipe says otherwise (step_scheduler.local_batch_size,
    # FSDP2Config.activation_checkpointing).
    ("nemo-automodel", "fsdp", replace(_TRAINER, fills=True, pipeline_sequences=1, checkpoints=False, sequences=1)),
    # The RL loss goes over the vocabulary in chunks of 8192 (trainer/models/layers/lm_head.py); torch.compile.
    ("prime-rl", "fsdp", Profile(training=FSDP, frozen_bytes=None, fills=True, chunk_vocabulary=8192)),
    (
        "torchtitan",
        "fsdp",
        Profile(training=replace(FSDP, shards_norms=True, logits=FREED_LOGITS), fills=True, pipeline_sequences=1),
    ),
    # Logits are in bf16 as a whole, and widened in eighths (modules/loss/ce_chunked_output_loss.py); AdamW is fused.
    (
        "torchtune",
        "",
        replace(_TRAINER, adapter_inputs=0, training=replace(PURE_BF16, step=0, logits=3), checkpoints=True),
    ),
    # Activation checkpointing comes with FSDP alone (litgpt/finetune/full.py, lora.py).
    ("litgpt", "fsdp", replace(_TRAINER, adapter_inputs=0, checkpoints=True)),
    ("litgpt", "trainer", replace(_TRAINER, adapter_inputs=0, checkpoints=False)),
    # GRPO computes log-probabilities of at most 1024 tokens of a sequence at a time, without autocast
    # (algorithms/core/llm_ops/fused_logprobs.py), and has use_separate_reference_adapter (algorithms/grpo.py).
    (
        "agilerl",
        "trainer",
        replace(
            _TRAINER,
            adapter_inputs=4,
            chunk_tokens=1024,
            reference_adapters=True,
            utilization=0.9,
            engine_tensor_parallel=1,
        ),
    ),
    # Its examples with FSDP checkpoint activations (fsdp_config.activation_checkpointing).
    # Weights stay in the type in which they are loaded (monkeypatch/accelerate/fsdp2.py).
    (
        "axolotl",
        "fsdp",
        Profile(training=replace(FSDP, weights=2, gradients=2, optimizer=4, step=2), checkpoints=True),
    ),
    ("qwen finetune", "", replace(_TRAINER, fills=True)),
    ("fms-acceleration", "trainer", _TRAINER),
    ("fms-acceleration", "fsdp", Profile(training=FSDP)),
    ("swift", "megatron", replace(_SWIFT, training=MEGATRON, checkpoints=False)),
    ("swift", "deepspeed", replace(_SWIFT, training=DEEPSPEED)),
    ("swift", "fsdp", replace(_SWIFT, training=FSDP)),
    ("swift", "trainer", _SWIFT),
    ("verl", "fsdp", _VERL),
    ("verl", "megatron", replace(_VERL, training=MEGATRON, frozen_bytes=2, checkpoints=None)),
    (
        "slime|miles",
        "megatron",
        Profile(training=replace(MEGATRON, logits=LOGPROB_LOGITS), offloads_between_phases=True, engine_process=True),
    ),
    ("openrlhf", "deepspeed", Profile(training=replace(DEEPSPEED, logits=OPENRLHF_LOGITS), engine_process=True)),
    ("deepspeed-chat", "deepspeed", Profile(training=DEEPSPEED, checkpoints=True)),
    ("factory", "trainer", Profile(training=FP32, checkpoints=True)),
    ("factory", "deepspeed", Profile(training=DEEPSPEED, checkpoints=True)),
    ("trl", "trainer", _TRL),
    ("trl", "fsdp", replace(_TRL, training=FSDP)),
    ("trl", "deepspeed", replace(_TRL, training=DEEPSPEED)),
    ("megatron-", "megatron", Profile(training=replace(MEGATRON, logits=TE_LOGITS))),
    ("megatron-", "fsdp", Profile(training=MEGATRON_FSDP)),
    ("", "fsdp", Profile(training=FSDP)),
    ("", "deepspeed", Profile(training=DEEPSPEED)),
    ("", "megatron", Profile(training=MEGATRON)),
    ("", "trainer", _TRAINER),
)
"""Profiles by a part of the system's name and the family of the library; the first match counts."""


def profile_of(row: Row) -> Profile:
    """Return the profile of the row's library."""
    system, family = row.system.lower(), settings.family_of(row)
    return next(found for name, kind, found in _PROFILES if re.search(name, system) and kind in ("", family))


@dataclass(frozen=True, kw_only=True)
class Library:
    """The settings of a row, completed by the profile of its library."""

    training: TrainingMemory
    zero_stage: int | None
    offload: Offload
    gradient_checkpointing: bool
    offloads_policy: bool
    """True if the policy's state is offloaded while an engine on the same GPUs generates."""
    engine_sleeps: bool
    engine_process: bool
    serves_with_share: bool
    """True if the engine takes a share of the GPU, as vLLM and SGLang do."""
    utilization: float
    """The engine's share of the GPU when the run does not state one."""
    engine_bytes: float
    """Bytes per weight of the engine."""
    references: float
    """Frozen copies of the model on the training GPUs besides the policy."""
    reference_adapters: bool
    """A frozen copy of the adapters is there as well."""
    critics: float
    """Trained copies, such as critics, on the training GPUs."""
    may_gather_all: bool
    """All weights may be gathered at once when they go to an engine."""


def library_of(row: Row, model: Architecture, tokens: float) -> Library:
    """Return what the row and its library's profile say; ``tokens`` are those of the largest micro-batch of a rank."""
    profile = profile_of(row)
    references, critics = _others(row)
    checkpoints = settings.checkpoints(row)
    return Library(
        training=_training(row, model, profile, tokens),
        zero_stage=_zero_stage(row),
        offload=_offload(row, profile),
        gradient_checkpointing=bool(profile.checkpoints if checkpoints is None else checkpoints),
        # NeMo-RL and slime offload before and after every refit; the others on request.
        offloads_policy=bool(
            re.search(r"nemo|slime", row.system.lower())
            or re.search(r"offloaded to (host|cpu) during (rollout|generation)", row.text)
            or row.param_offload
            or row.optim_offload
        ),
        engine_sleeps=profile.engine_sleeps,
        engine_process=profile.engine_process,
        serves_with_share=bool(re.search(r"vllm|sglang", row.rollout_engine.lower())),
        utilization=profile.utilization or (0.5 if row.placement.startswith("coloc") else 0.9),
        engine_bytes=1 if "fp8" in row.text else 2,
        references=references,
        reference_adapters=bool(profile.reference_adapters and row.rollout_engine and settings.lora_rank(row)),
        critics=critics,
        may_gather_all=bool(
            profile.gathers_at_once and row.rollout_engine and not row.lora_rank and _zero_stage(row) == 3
        ),
    )


def _training(row: Row, model: Architecture, profile: Profile, tokens: float) -> TrainingMemory:
    training = profile.training
    if re.search(r"no mixed precision|pure_bf16|bf16-true", row.notes):
        training = replace(PURE_BF16, logits=training.logits)
    if settings.has_8bit_optimizer(row):
        training = replace(training, optimizer=2, step=0)
    if "optimizer in backward" in row.text or settings.adopts(row, "fuse optimizer step into backward"):
        training = replace(training, gradients=0, step=0)
    if settings.offloads_activations(row):
        training = replace(training, offloads_activations=True)
    if settings.layers_per_checkpoint(row) > 1:
        training = replace(training, layers_per_checkpoint=settings.layers_per_checkpoint(row))
    if settings.is_compiled(row):
        training = replace(training, fused_layers=True)
    training = _loss(row, training, profile, tokens, model)
    if not settings.lora_rank(row):
        return training
    frozen = profile.frozen_bytes or training.weights
    bits = settings.frozen_bits(row)
    if bits is not None:
        quantised = 0.53 if bits == 4 else 1.0
        frozen = _quantised(model, quantised, settings.quantises_experts(row), ends=4 if "qwen" in row.system else 2)
    targets = settings.lora_targets(row)
    experts = bool(model.num_experts) and (settings.adapts_experts(row) if not targets else "gate_proj" in targets)
    if model.num_experts and not targets:
        targets = LINEAR_LAYERS if experts else settings.ATTENTION
    lora = Lora(rank=settings.lora_rank(row), target_modules=targets or "all-linear", experts=experts)
    ends = settings.trains_ends(row)
    return replace(training, lora=lora, weights=frozen, adapter_inputs=profile.adapter_inputs, trains_ends=ends)


def _quantised(model: Architecture, bytes_: float, experts: bool, *, ends: float) -> float:
    """Return the mean bytes of a parameter, of which all but embeddings and head have ``bytes_``.

    Scales of four bits take another 0.03 bytes, in groups of 64 or 128 weights. Embeddings and head have ``ends``
    bytes: ``peft.prepare_model_for_kbit_training`` widens them to four. ``experts``: theirs are quantised too.
    """
    outside = (model.embedding_parameters + model.head_parameters) / model.num_parameters
    whole = 0.0 if experts else model.num_expert_parameters / model.num_parameters
    return bytes_ * (1 - outside - whole) + ends * outside + 2 * whole


def _loss(row: Row, training: TrainingMemory, profile: Profile, tokens: float, model: Architecture) -> TrainingMemory:
    if (
        re.search(r"seq_cls|embedding|\brm\b", f"{row.text} {row.algorithm.lower()}")
        and "embedding and" not in row.text
    ):
        # A head with a few outputs in the place of the vocabulary.
        return replace(training, logits=0)
    if settings.has_fused_loss(row):
        return replace(training, fused_loss=True)
    if "before the fused lm head" in row.text or (row.algorithm.lower() == "sft" and "prime" in row.system):
        return training
    if profile.chunk_vocabulary:
        return replace(training, logits=8, logits_at_once=tokens * profile.chunk_vocabulary)
    if profile.chunk_tokens:
        chunk = min(profile.chunk_tokens, row.max_total_len or profile.chunk_tokens)
        return replace(training, logits=8, logits_at_once=float(chunk * model.num_outputs))
    if re.search(r"foak|fused cross entropy", row.notes.lower()):
        return replace(training, logits=FAST_LOGITS)
    if "cumulative" in row.notes and not settings.adopts(row, "chunked cross entropy") and not settings.lora_rank(row):
        return replace(training, logits=TrainingMemory.logits)
    return training


def _zero_stage(row: Row) -> int | None:
    """Return the equivalent stage of ZeRO: FSDP shards everything, Megatron the optimizer, a plain trainer nothing."""
    named = re.search(r"(?:zero|stage)[-_ ]?([0-3])", f"{row.sharding} {row.train_backend}".lower())
    family = settings.family_of(row)
    if family == "deepspeed":
        return int(named[1]) if named else 3
    return {"fsdp": 3, "megatron": 1}.get(family)


def _offload(row: Row, profile: Profile) -> Offload:
    """Return what stays on the host during training, too."""
    if settings.family_of(row) == "deepspeed" and "offload" in row.sharding.lower():
        return "weights"
    if row.param_offload and not profile.offloads_between_phases:
        return "weights"
    # ms-swift's Megatron and others have optimizer_cpu_offload, which holds during the step too.
    stays = not profile.offloads_between_phases or "swift-megatron" in row.system
    return "optimizer" if row.optim_offload and stays else "none"


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
    return float(compares and not settings.lora_rank(row)), float(algorithm in ("ppo", "gae") and sampled)


def unknown(row: Row) -> list[str]:
    """Return the blank columns that decide about memory and for which the library has no default."""
    profile, backend = profile_of(row), row.train_backend.lower()
    found = []
    if "deepspeed" in backend and not re.search(r"[0-3]", row.sharding + backend):
        found.append("sharding")
    if not row.train_backend:
        found.append("train_backend")
    # The recipes behind tables of performance are tuned.
    is_tuned = "performance-summary" in row.source_path
    if settings.checkpoints(row) is None and (profile.checkpoints is None or is_tuned):
        found.append("grad_ckpt")
    is_one_sequence = profile.sequences or (not row.rollout_engine and (row.max_total_len or 0) >= LONG)
    if not row.micro_batch_per_gpu and not row.max_tokens_per_gpu and not is_one_sequence:
        found.append("micro_batch_per_gpu")
    if not row.max_total_len and not row.max_response_len and "swift" not in row.system:
        found.append("max_total_len")
    if "megatron" in backend and row.train_tp is None and row.train_pp is None and row.train_ep is None:
        found.append("train_tp")
    if settings.frozen_bits(row) and settings.family_of(row) == "fsdp" and "axolotl" in row.system:
        found.append("whether FSDP shards quantised weights")
    if "selec" in row.grad_ckpt and settings.family_of(row) == "fsdp":
        found.append("operations that checkpointing saves")
    if "sequence_parallel" in row.source_path and row.train_sp is None:
        found.append("train_sp")
    if (row.train_pp or 1) > 1 and settings.family_of(row) == "fsdp":
        found.append("weights and gradients that FSDP keeps between pipeline stages")
    shared = row.placement.startswith("coloc") and re.search(r"vllm|sglang", row.rollout_engine.lower())
    if shared and row.rollout_tp is None and profile.engine_tensor_parallel is None and row.n_gpus != 1:
        found.append("rollout_tp")
    if shared and row.gpu_memory_utilization is None and profile.utilization is None:
        found.append("gpu_memory_utilization")
    return found
