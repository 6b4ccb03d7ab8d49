"""What a step of each library consists of, and how long it should take. Facts of libraries, never of a row."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil

from benchmarks.published import libraries
from benchmarks.published.rows import Case, Row, model_of
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.lengths import Lengths
from rlflow.resources.memory import generate_memory, state_terms, update_terms
from rlflow.resources.model import Architecture
from rlflow.resources.speed import Efficiency, Speed, speed_of
from rlflow.resources.time import (
    gather_seconds,
    generation,
    host_seconds,
    offload_seconds,
    padded_generation,
    scoring,
    sync_seconds,
    training,
)

# Samples of supervised steps where the row is silent: ms-swift and Megatron-SWIFT both come to 16 by default.
_SWIFT_BATCH = 16
# DeepSpeed-Chat (step3_rlhf_finetuning/BenckmarkSetting.md): 264,292 samples of 256 + 256 tokens, at most 1024 a step.
# The README's 131.9k queries are half of that; its 135 million tokens are not.
_EPOCH_SAMPLES, _EPOCH_LENGTH, _EPOCH_BATCH = 264_292, 256, 1024
# The comparison with DeepSpeed-Chat in OpenRLHF's README (benchmark/README.md): all of 1024 + 1024 tokens, reward and
# critic as large as the actor, updates of 128.
_COMPARED_LENGTH, _COMPARED_BATCH = 1024, 128
# Kernels of DeepSpeed's inference injection are few, but launched one by one; of a layer's forward pass.
_INJECTED_LAYER_S = 0.15e-3


@dataclass(frozen=True)
class Step:
    parts: Mapping[str, float]
    """Seconds by what is done, on its own GPUs."""
    overlaps: bool = False
    """Generation for the next step runs beside everything else."""
    repeated: float = 1
    """Steps in what was measured."""
    assumed: frozenset[str] = field(default_factory=frozenset)

    @property
    def seconds(self) -> float:
        both = sum(self.parts.get(part, 0.0) for part in ("sync", "host"))
        generated = self.parts.get("generation", 0.0)
        rest = sum(self.parts.values()) - both - generated
        return self.repeated * (both + (max(rest, generated) if self.overlaps else rest + generated))


@dataclass(frozen=True)
class Batch:
    """What a step works on."""

    samples: float
    group_size: int
    prompts: Lengths
    responses: Lengths
    minibatches: int
    micro_batch_tokens: float

    @property
    def tokens(self) -> float:
        return self.samples * (self.prompts.mean + self.responses.mean)

    @property
    def typical_length(self) -> float:
        """Of the sequence that a token is in."""
        whole = [self.prompts.mean + length for length in self.responses.values]
        return sum(length * length for length in whole) / sum(whole)


def unfit(case: Case) -> str | None:
    """Why the row's time cannot be predicted from what it says."""
    row = case.row
    if case.gpu is None:
        return "no GPU named"
    if case.gpu.peak_tflops is None or case.gpu.memory_gb_s is None:
        return "a GPU without figures"
    if not row.rollout_engine and re.search(r"grpo|ppo|dapo|rloo|distill|swe", row.algorithm.lower()):
        return "with generation of which the row says nothing"
    if row.rollout_engine and case.rollout is None:
        return "no GPUs for generating"
    if _batch(case) is None:
        return "no size of a step"
    if not row.rollout_engine and not _is_full(row) and "mean_response_len" in case.assumed:
        return "lengths of supervised data unknown"
    return None


def predict(case: Case, efficiency: Efficiency | None = None) -> Step:
    assert case.gpu is not None
    speed = speed_of(case.gpu, case.gpus_per_host, efficiency or Efficiency())
    if case.row.rollout_engine.startswith("ds"):
        return _hybrid_engine(case, speed)
    batch = _batch(case)
    assert batch is not None
    train = replace(case.train, micro_batch_tokens=round(batch.micro_batch_tokens))
    fused = case.training.fused_layers

    def score(model: Architecture) -> float:
        return scoring(
            model, train, speed, tokens=batch.tokens, length=batch.typical_length, fused_layers=fused
        ).seconds

    def update(model: Architecture) -> float:
        return training(
            model,
            train,
            speed,
            tokens=batch.tokens,
            length=batch.typical_length,
            minibatches=batch.minibatches,
            gradient_bytes=case.training.gradients,
            fused_layers=fused,
            fused_loss=case.training.fused_loss,
            adapters=bool(case.row.lora_rank),
        ).seconds

    parts = {"training": update(case.model), "scoring": _scored(case.row) * score(case.model)}
    if case.row.algorithm.lower() == "ppo" and case.row.rollout_engine:
        critic = _critic(case)
        parts |= {"critic": update(critic), "values and rewards": 2 * score(critic)}
    if case.rollout is None:
        return Step(parts, assumed=case.assumed)
    parts |= _generates(case, batch, speed)
    if case.colocated and case.library.parks_policy:
        state = sum(state_terms(case.model, train, case.training).values()) * GIB
        parts["offload"] = 2 * offload_seconds(state)
    parts["host"] = host_seconds(batch.samples)
    return Step(parts, overlaps=not case.colocated and _steps_ahead(case.row) > 0, assumed=case.assumed)


def _generates(case: Case, batch: Batch, speed: Speed) -> dict[str, float]:
    assert case.rollout is not None and case.memory_gib is not None
    row, engines = case.row, case.rollout.data_parallel_size
    each = batch.samples / engines
    if not case.library.serves_with_share:
        made = padded_generation(
            case.model,
            case.rollout,
            speed,
            sequences=each,
            batch=row.micro_batch_per_gpu or 8,
            prompts=batch.prompts,
            responses=batch.responses,
        )
        return {"generation": made.seconds}
    share = row.gpu_memory_utilization or (0.6 if case.colocated else 0.8)
    layout = replace(case.rollout, gpu_memory_utilization=share)
    weight_bytes = case.library.engine_bytes
    engine = generate_memory(case.model, layout, case.memory_gib, weight_bytes=weight_bytes)
    made = generation(
        case.model,
        layout,
        speed,
        sequences=each,
        group_size=batch.group_size,
        prompts=batch.prompts,
        responses=batch.responses,
        kv_tokens=max(engine.kv_tokens, batch.prompts.mean + batch.responses.longest),
        engines=engines,
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
    if _steps_ahead(row) > 1 and not case.colocated:
        # Others take the places of what has ended: there is no tail.
        rate = engines * made.engine_tokens_per_second
        return {"generation": batch.samples * batch.responses.mean / rate + made.prefill_seconds, "sync": synced}
    return {"generation": made.seconds, "sync": synced}


def _tensors(model: Architecture) -> int:
    """Of the file: about nine of a layer, and three of each expert."""
    return 9 * model.num_hidden_layers + 3 * model.num_sparse_layers * (model.num_experts or 0)


def _scored(row: Row) -> float:
    """Forward passes of models of the actor's size before the update, besides a critic's and a reward model's."""
    algorithm, system = row.algorithm.lower(), row.system.lower()
    if not row.rollout_engine:
        # Preference losses of Hugging Face's kind and Megatron's score the pairs by the reference too.
        return 1 if algorithm in ("dpo", "kto") and not row.lora_rank else 0
    if "nemo" in system:
        return 2  # policy and reference (nemo_rl/algorithms/grpo.py)
    reference = 0 if algorithm in ("dapo", "rloo", "reinforce++") or "areal" in system or "trl" in system else 1
    # TRL's GRPO takes the first update's own logprobs for the old ones.
    return reference + (0 if "trl" in system else 1)


def _steps_ahead(row: Row) -> int:
    """By which generation may run ahead of the update. 0: each waits for the other."""
    text = f"{row.text} {row.algorithm} {row.system}".lower()
    named = re.search(r"(\d+)-step off", text)
    if named:
        return int(named[1])
    if "on policy" in text:
        return 0
    return 4 if re.search(r"fully.async|areal", text) else int(bool(re.search(r"one.step.off|async|off-policy", text)))


def _critic(case: Case) -> Architecture:
    """Of the actor's size, unless the row says otherwise: ``350M critic``."""
    named = re.search(r"([\d.]+)([mb]) critic", case.row.notes.lower())
    if named:
        small = model_of(replace(case.row, model=f"{re.split('[0-9]', case.row.model)[0]}{named[1]}{named[2]}"))
        if small is not None:
            return small
        size = float(named[1]) * (1e6 if named[2] == "m" else 1e9)
        return _shrunk(case.model, size / case.model.num_parameters)
    return case.model


def _shrunk(model: Architecture, share: float) -> Architecture:
    """About that share of its parameters: fewer and narrower layers."""
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


# --- what a step works on


def _is_full(row: Row) -> bool:
    """Supervised samples fill the limit: they are packed to it, or the text calls it their context."""
    return bool(re.search(r"pack|\d+k context|megatron/benchmark|long_text", row.text)) and not row.rollout_engine


def _batch(case: Case) -> Batch | None:
    row = case.row
    samples, prompts, responses = case.samples, case.prompts, case.responses
    if samples is None and "swift" in row.system and not row.rollout_engine:
        samples = float(_SWIFT_BATCH)
    if row.rollout_engine.startswith("ds"):
        samples = samples or _EPOCH_BATCH
    if samples is None:
        return None
    limit = float(row.max_total_len or 0) or prompts.longest + responses.longest
    if _is_full(row):
        responses = Lengths((limit,))
    elif "mean_response_len" in case.assumed and row.tokens_per_s_per_gpu and row.step_time_s and row.n_gpus:
        # How many tokens a step has is a fact of the run: throughput is published as tokens over GPUs and time.
        mean = row.tokens_per_s_per_gpu * row.step_time_s * row.n_gpus / samples
        responses = Lengths.about(max(1.0, mean - prompts.mean), responses.longest)
    samples *= libraries.sequences_per_sample(row)
    return Batch(
        samples,
        max(1, case.group_size),
        prompts,
        responses,
        _minibatches(row, samples),
        _micro_batch(case, prompts, responses, limit),
    )


def _minibatches(row: Row, samples: float) -> int:
    """Updates of a step: verl counts prompts in a mini-batch, the others samples in a batch."""
    if row.mini_batch and row.prompts_per_step and "verl" in row.system:
        return max(1, round(row.prompts_per_step / row.mini_batch))
    if row.mini_batch:
        return max(1, round(samples / row.mini_batch))
    if row.train_batch and row.rollout_engine and "verl" not in row.system:
        return max(1, round(samples / row.train_batch))
    return 1


def _micro_batch(case: Case, prompts: Lengths, responses: Lengths, limit: float) -> float:
    """Tokens that really go through at once: NeMo-RL's performance recipes, like packed rows, fill the limit."""
    row = case.row
    if row.max_tokens_per_gpu:
        return float(row.max_tokens_per_gpu)
    sequences = (row.micro_batch_per_gpu or 1) * libraries.sequences_per_sample(row)
    if "performance-summary" in row.source_path or _is_full(row):
        return limit * sequences
    return sequences * (prompts.mean + responses.mean)


# --- DeepSpeed-Chat


def _hybrid_engine(case: Case, speed: Speed) -> Step:
    """Batches that are generated and trained on at once, as large as memory allows.

    In the epochs, weights are gathered into injected kernels once for each batch; models that do not fit a GPU beside
    what is trained are cut over those of a host. In the comparison with OpenRLHF, where that is said not to work under
    ZeRO-3, they are gathered for every token (benchmark/README.md).
    """
    row, model, gpus = case.row, case.model, case.train.num_gpus
    epoch = "queries" in row.step_time_kind
    length = float(_EPOCH_LENGTH if epoch else _COMPARED_LENGTH)
    fixed = Lengths((length,))
    critic = _critic(case)
    most = max(1, _EPOCH_BATCH // gpus)
    train, each, width = _largest(case, critic, 2 * length, most, whole=epoch)
    made = padded_generation(
        model,
        Layout(tensor_parallel_size=width, data_parallel_size=gpus // width, micro_batch_tokens=8192),
        speed,
        sequences=each * width,
        batch=each * width,
        prompts=fixed,
        responses=fixed,
        layer_s=_INJECTED_LAYER_S if epoch else None,
        gather_s=0 if epoch else gather_seconds(model, train, speed),
    )
    tokens = each * gpus * 2 * length
    minibatches = 1 if epoch else ceil(each * gpus / _COMPARED_BATCH)

    def score(of: Architecture) -> float:
        return scoring(of, train, speed, tokens=tokens, length=2 * length).seconds

    def update(of: Architecture, layout: Layout) -> float:
        return training(of, layout, speed, tokens=tokens, length=2 * length, minibatches=minibatches).seconds

    small = replace(train, offload="none" if epoch else train.offload)
    parts = {
        "generation": made.seconds,
        "scoring": 2 * score(model) + 2 * score(critic),
        "training": update(model, train),
        "critic": update(critic, small),
    }
    if epoch:
        gathered = 2.0 * model.num_parameters / width
        parts["sync"] = sync_seconds(gathered, gpus, gpus, speed, same_gpus=True)
    total = _EPOCH_SAMPLES if epoch else case.samples or _EPOCH_BATCH
    return Step(parts, repeated=total / (each * gpus), assumed=case.assumed)


def _largest(case: Case, critic: Architecture, tokens: float, most: int, *, whole: bool) -> tuple[Layout, int, int]:
    """The layout, sequences of each GPU, and GPUs that generate together, with the largest batch that fits.

    Attention of that time keeps its whole matrix, in fp32 and fp16, and its mask.
    """
    assert case.memory_gib is not None
    gpus, model = case.train.num_gpus, case.model
    widths = [width for width in (1, 2, 4, 8) if width <= min(gpus, case.gpus_per_host)] if whole else [1]
    for offload, width in [(offload, width) for offload in ("none", "optimizer") for width in widths]:
        layout = replace(case.train, offload=offload)
        frozen = replace(case.training, gradients=0, optimizer=0)
        reference = state_terms(model, replace(layout, offload="none"), frozen)["weights"]
        small = sum(state_terms(critic, replace(layout, offload="none" if whole else offload), case.training).values())
        gathered = 2 * model.num_parameters / width / GIB if whole and gpus > 1 else 0.0
        matrix = 10 * model.num_attention_heads * tokens * tokens / GIB
        each = most
        while each >= 1:
            cache = 2 * model.kv_values(tokens) * each / GIB
            update = sum(update_terms(model, layout, case.training, tokens * each).values()) + matrix * each
            generate = sum(state_terms(model, layout, case.training).values()) + gathered + cache + 2
            if max(update, generate) + (reference if offload == "none" else 0.0) + small <= 0.95 * case.memory_gib:
                return replace(layout, micro_batch_tokens=round(tokens * each)), each, width
            each = int(each * 0.8)
    return replace(case.train, offload="optimizer", micro_batch_tokens=ceil(tokens)), 1, widths[-1]
