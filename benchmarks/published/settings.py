"""The settings of a published run, as far as its row states them in columns or in words."""

import re
from dataclasses import dataclass

from benchmarks.published.rows import Row

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_TECHNIQUES = (
    "packed dataset",
    "+ compile",
    "chunked cross entropy",
    "activation checkpointing",
    "fuse optimizer step into backward",
    "activation offloading",
    "8-bit adamw",
)
"""The optimizations of torchtune's table (README.md), each added to those before it."""
_OF_OPTIMIZERS = ("fuse optimizer step into backward", "8-bit adamw")
_FUSED_SCRIPTS = r"script dapo_moe\w+/\d+\.(megatron|\d+node)"
"""Scripts that set ``use_fused_kernels``, which their table does not say: ten of the fifteen that train with Megatron
were read, and all of these do (ISEEKYAN/verl_megatron_practice, DAPO_MOE30B and DAPO_MOE235B)."""


def family_of(row: Row) -> str:
    """Return the family of the library; the sharding's name is more precise than the backend's."""
    backend, sharding = row.train_backend.lower(), row.sharding.lower()
    if re.search(r"fsdp|dtensor", f"{backend} {sharding}"):
        return "fsdp"
    if "deepspeed" in backend or re.search(r"zero[-_ ]?[23]", f"{sharding} {backend}"):
        return "deepspeed"
    return "megatron" if re.search(r"megatron|mcore|dist-opt", f"{backend} {sharding}") else "trainer"


def checkpoints(row: Row) -> bool | None:
    """Return whether layers are recomputed, or None if the row does not say.

    Megatron's ``selective`` recomputes the attention's core alone, which flash attention never saves.
    """
    value = row.grad_ckpt.lower()
    if not value:
        return None
    return value.startswith("full") or value in ("true", "1", "unsloth")


def layers_per_checkpoint(row: Row) -> int:
    """Return how many layers are recomputed from one saved input."""
    named = re.search(r"every (\d+) layers", row.grad_ckpt.lower())
    return int(named[1]) if named else 1


def lora_rank(row: Row) -> int:
    """Return the rank of adapters, 8 where the row names LoRA without a rank, and 0 without adapters."""
    if row.lora_rank:
        # Several adapters of as many runs exist beside each other (prime-rl's max_concurrent_runs).
        beside = re.search(r"max-concurrent-runs (\d+)", row.notes)
        return row.lora_rank * (int(beside[1]) if beside else 1)
    return 8 if re.search(r"(^|; )q?lora\b", row.notes, re.I) else 0


def trains_ends(row: Row) -> bool:
    """Return whether embeddings and head are trained beside adapters."""
    return bool(re.search(r"lora \(emb\)|embedding and output layer trained", row.text))


def lora_targets(row: Row) -> tuple[str, ...]:
    """Return the projections that have adapters, as far as the row names some instead of all."""
    if re.search(r"attention alone adapted|on attention alone", row.notes.lower()):
        return ATTENTION
    named = re.search(r"targets ((?:\w+_proj,?)+)|lora (q,v),", row.notes.lower())
    if named is None:
        return ()
    return ("q_proj", "v_proj") if named[2] else tuple(named[1].rstrip(",").split(","))


def frozen_bits(row: Row) -> int | None:
    """Return the bits of a frozen weight that is stored in eight or four; None: it is not quantised."""
    if re.search(r"weights of 8 bits|int8|load_in_8bit", row.notes.lower()):
        return 8
    return 4 if is_4bit(row) else None


def adapts_experts(row: Row) -> bool:
    """Return whether experts have adapters: not as tensors of a whole layer (axolotl), unless the row says so."""
    return "axolotl" not in row.system or "experts adapted" in row.notes.lower()


def quantises_experts(row: Row) -> bool:
    """Return whether the weights of experts are quantised too, where the rest is.

    axolotl does that on request (``quantize_moe_experts``), because bitsandbytes replaces linear layers alone and
    transformers keeps the experts of a layer in one tensor.
    """
    return "axolotl" not in row.system or bool(re.search(r"expert weights in 4 bits|experts too", row.notes.lower()))


def forwards_tokens(row: Row) -> bool:
    """Return whether DeepEP sends tokens to experts.

    It does for all models with experts of NeMo AutoModel's table (docs/performance-summary.md) and, on H100, in the
    tuned recipes of Megatron-Bridge.
    """
    return bool(re.search(r"deepep|pretrain_performance", row.notes.lower())) or "automodel" in row.system


def is_4bit(row: Row) -> bool:
    """Return whether the frozen weights are stored in four bits."""
    text = f"{row.model} {row.notes} {row.source_path}".lower().replace("except lora/qlora", "")
    return bool(re.search(r"q-?lora|\b4-?bit\b|nf4|int4|awq|gptq", text))


def has_8bit_optimizer(row: Row) -> bool:
    return bool(re.search(r"8-?bit (adam|optim)|adamw?_?8bit", row.notes.lower())) or adopts(row, "8-bit adamw")


def has_fused_loss(row: Row) -> bool:
    """Return whether the head and the loss are one kernel that never has all logits."""
    # The address of the evidence may name what other rows of the same table have.
    named = row.notes.lower().split("evidence:")[0] if row.source_path.endswith(".csv") else row.text
    if re.search(r"(not using|no) (use_)?liger", named):
        return False
    return bool(re.search(rf"liger|fused_linear|fused_kernels|chunked_loss|{_FUSED_SCRIPTS}", named))


def is_compiled(row: Row) -> bool:
    """Return whether torch.compile fuses the elementwise operations of layers."""
    return bool(re.search(r"torch\.compile|\bcompile,", row.notes)) or adopts(row, "+ compile")


def offloads_activations(row: Row) -> bool:
    """Return whether what layers save for the backward pass goes to the host."""
    return "activations offloaded to cpu" in row.notes.lower() or adopts(row, "activation offloading")


def adopts(row: Row, technique: str) -> bool:
    """Return whether a row of a cumulative table has a technique that an earlier row added.

    The rows of adapters have all but those of the optimizer, as in the command for the last row (torchtune, README.md).
    """
    text = row.notes.lower()
    if "cumulative optimisation table" not in text:
        return False
    if lora_rank(row):
        return technique not in _OF_OPTIMIZERS
    newest = next((index for index, name in enumerate(_TECHNIQUES) if f"+ {name.removeprefix('+ ')};" in text), -1)
    return _TECHNIQUES.index(technique) <= newest


def unfit(row: Row) -> str | None:
    """Return why the row does not determine the library's work; None if it does."""
    text = row.text
    tuner = re.search(r"tuner=(\w+)", text)
    if (tuner and tuner[1] not in ("lora", "full")) or re.search(r"\bosf\b", text):
        return "a tuner that is neither full nor LoRA"
    if re.search(r"galore|\blisa\b|muon|adafactor|\bsgd\b", text) and "adam(w)" not in text:
        return "an optimizer other than Adam"
    if row.algorithm.lower() == "gkd" or (row.algorithm.lower() == "ppo" and not row.rollout_engine):
        return "further models that are not named"
    if "device_map" in text:
        return "layers spread over GPUs by device_map"
    if "paged" in text and row.n_gpus == 1:
        return "an optimizer whose state moves between GPU and host"
    if "torchtune single" in row.train_backend and not lora_rank(row) and "cumulative" not in text:
        return "an optimizer that is not named"
    share = re.search(r"offload_fraction=(0?\.\d+)", text)
    return "an optimizer of which a part is offloaded" if share else None


def tensor_parallel_size(row: Row) -> int:
    """Return the degree; NeMo-RL's example of supervised 8B training has 4 (sft_openmathinstruct2.yaml)."""
    if row.train_tp is None and "nemo-rl" in row.system and row.algorithm == "sft":
        return 4
    return row.train_tp or 1


def is_packed(row: Row) -> bool:
    """Return whether there is no padding: by name, by micro-batches in tokens, or by verl's use_remove_padding."""
    text = row.text
    if re.search(
        r"(without|not using)[^:;]*(padding_free|packing)|remove_padding (off|=? ?false)|packing false|padding kept",
        text,
    ):
        return False
    if "dynamic batch false" in text:
        return False
    named = re.search(r"packing|padding_free|padding-free-|packed to|remove_padding|seqpack", text)
    return bool(row.max_tokens_per_gpu or named) or "verl" in row.system or adopts(row, "packed dataset")


def fills_limit(row: Row) -> bool:
    """Return whether every sample, or every pack of samples, is as long as the limit."""
    if re.search(r"not packed|well below|not filled|packing false", row.text) or row.rollout_engine:
        return False
    if "open-instruct" in row.system and row.algorithm.lower() == "dpo":
        # Its packing of pairs only removes their padding (dataset_processor's TensorDataCollatorWithFlatteningDPO).
        return False
    mean = row.mean_response_len or row.mean_prompt_len
    if mean and row.max_total_len:
        return mean >= 0.98 * row.max_total_len
    return bool(re.search(r"packing|packed|padded to|\d+k context", row.text)) or adopts(row, "packed dataset")


def tokens_per_group(row: Row) -> int:
    """Return the tokens of a micro-batch that is given in tokens.

    verl, slime and AReaL count the tokens of one GPU, NeMo-RL those of all GPUs that share sequences.
    """
    each = 1 if "nemo" in row.system else (row.train_cp or 1) * (row.train_sp or 1)
    return (row.max_tokens_per_gpu or 0) * each


def sequences_per_sample(row: Row) -> int:
    """Return the sequences per sample: two for preference pairs."""
    return 2 if re.search(r"dpo|\brm\b|simpo|orpo|cpo|kto", row.algorithm.lower()) else 1


@dataclass(frozen=True)
class DataLengths:
    """Tokens of a data set's prompts with the chat template and of their answers: means, and how far lengths spread."""

    prompt: float
    answer: float
    prompt_spread: float = 0.8
    """The standard deviation of the logarithm."""
    answer_spread: float = 0.8


# The mean of the answers of 7B (269 tokens) and 14B (240) after 116 steps of GRPO (eric-haibin-lin/verl-data, gsm8k).
# verl's logs of steps with about a thousand samples have prompts of 68 to 175 tokens (docs/start/quickstart.rst) and
# answers of 87 to 963 (verl-project/verl, issue 2060).
_GSM8K = DataLengths(105, 254, prompt_spread=0.2, answer_spread=0.4)
_DATA = {"gsm8k": _GSM8K, "examples/tuning/": _GSM8K, "openmathinstruct": DataLengths(100, 350)}
"""All scripts in verl's examples/tuning train on GSM8K."""


def data_lengths(row: Row) -> DataLengths | None:
    """Return the lengths of a data set that the row names."""
    return next((lengths for name, lengths in _DATA.items() if name in row.text), None)
