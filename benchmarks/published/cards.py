"""The model and GPU cards of conf that match a published row."""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.published.rows import Row
from rlflow.resources.cluster import Gpu
from rlflow.resources.models.architecture import Architecture
from rlflow.schema import parse

CONF = Path(__file__).parents[2] / "conf"

# Words of models with a part besides the decoder, whose inputs and size the table does not give.
_MORE_THAN_TEXT = re.compile(
    r"vl|vlm|omni|audio|vision|multimodal|internvl\S*|ovis\S*|keye|llava\S*|minicpm-?v\S*|diffusiongemma|gme|llama-?4|scout"
)
_QUANTISED = re.compile(r"hqq|int8|eetq|nvfp4|mxfp4")


def unfit(row: Row) -> str | None:
    """Return why rlflow cannot plan for the row's model; None if it can."""
    name = row.model.lower()
    if any(_MORE_THAN_TEXT.fullmatch(word) for word in re.split(r"[-_/() ]+", name)):
        found = model_of(row)
        if found is None or not found.num_encoder_parameters:
            return "a model with more than a text decoder"
        if re.search(r"video", row.text):
            return "videos of unknown length"
    elif "multimodal" in row.notes.lower() and "encoder frozen" not in row.notes.lower():
        return "images of which the row gives no number"
    if _QUANTISED.search(name) or _QUANTISED.search(row.source_path.lower()):
        return "quantised weights of other than four bits"
    if re.search(r"class|not named", name) or "identity approximate" in row.notes:
        return "a model that is only roughly named"
    return None if model_of(row) is not None else "a model without figures"


def may_train_encoder(row: Row) -> bool:
    """Return whether the part of the model that reads images may have been trained too.

    ms-swift freezes it by default (freeze_vit, freeze_aligner), others do not.
    """
    found = model_of(row)
    if found is None or not found.num_encoder_parameters:
        return False
    return "swift" not in row.system or bool(re.search(r"full_vit|lora_llm|vit_gradient_checkpointing", row.text))


@cache
def _cards() -> Mapping[frozenset[str], Architecture]:
    """Return the architectures of conf/model by the distinguishing words of their names."""
    cards = {}
    for file in sorted((CONF / "model").glob("*.yaml")):
        card: Any = OmegaConf.to_container(OmegaConf.load(file))
        if card.get("architecture"):
            architecture = parse(Architecture, card["architecture"], str(file))
            for name in (card.get("architecture_of") or card.get("path") or "", *_ALIASES.get(file.stem, ())):
                cards[frozenset(_words(name))] = architecture
    for name, card in further_models().items():
        cards[frozenset(_words(name))] = parse(Architecture, card["architecture"], name)
    return cards


def further_models() -> Mapping[str, Any]:
    """Return the figures of models that rlflow has no card for, by their names on the hub."""
    content: Any = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_name("models.yaml")))
    return {str(name): entry for name, entry in content.items()}


_ALIASES = {
    "codellama_34b": ("llama-2-34b",),
    "opt_13b": ("opt-13.2b",),
    "deepseek_r1_distill_qwen_1_5b": ("deepscaler-1.5b",),
    "deepseek_v3": ("deepseek-r1",),
    "llama3_1_8b": ("llama-3-8b",),
    "nemotron_3_nano_30b_a3b": ("nemotron-v3-nano-30b", "nemotron-3.5-lightning-30b-a3b"),
    "nemotron_3_super_120b_a12b": ("nemotron-v3-super-120b",),
    "deepseek_llm_7b": ("deepseek-coder-7b", "deepseek-prover-v2-7b"),
    "llama2_7b": ("vicuna-7b",),
    "qwen3_30b_a3b": ("qwen3-moe-30b",),
    "qwen3_4b": ("plano-orchestrator-4b",),
    "llama3_1_70b": ("llama-3-70b",),
    "qwen2_5_0_5b": ("qwen2-0.5b",),
    "qwen2_5_1_5b": ("qwen2-1.5b",),
    "qwen2_5_7b": ("qwen2-7b",),
    "qwen2_5_72b": ("qwen2-72b",),
}
"""Other names of the same architecture."""


def _words(name: str) -> set[str]:
    """Return the distinguishing words of a name, such as qwen2.5 and 7b of ``Qwen/Qwen2.5-7B-Instruct``."""
    tail = name.lower().rsplit("/", 1)[-1].removesuffix(".md")
    tail = re.sub(r"^(nvidia|meta)-", "", tail).replace("1_8b", "1.8b")
    tail = tail.replace("llama2", "llama-2").replace("llama3", "llama-3")
    words = {word for word in re.split(r"[-_() ]+", tail) if word}
    return {word for word in words if not re.fullmatch(r"instruct|base|chat|it|hf|bf16|v0\.\d|\d{4}|type", word)}


def model_of(row: Row) -> Architecture | None:
    """Return the card of conf/model that shares the most words with the row's model and has about its size.

    Additional words of the row, such as those of a fine-tuned model, do not matter.
    """
    words = _words(row.model) | ({"v3"} if row.model.endswith("deepseek.md") else set())
    for name, architecture in sorted(_cards().items(), key=lambda item: -len(item[0])):
        decoder, encoders = architecture.num_parameters, architecture.num_encoder_parameters
        sizes = [size / 1e9 / row.params_b for size in (decoder, decoder + encoders)] if row.params_b else [1.0]
        if name <= words and any(0.85 < size < 1.18 for size in sizes):
            return architecture
    return None


def gpu_of(row: Row) -> Gpu | None:
    """Return the card of conf/gpu for the row's type and memory, or a GPU with the row's own memory."""
    name = re.sub(r"[^a-z0-9]", "", row.gpu_type.lower())
    kinds = {stem: re.sub(r"_\d+gb$", "", stem).removeprefix("rtx_").replace("_", "") for stem in _gpus()}
    kind = max((kind for kind in kinds.values() if kind in name), key=len, default=None)
    found = [gpu for stem, gpu in _gpus().items() if kinds[stem] == kind and gpu.memory_gib]
    named = re.search(r"[^a-z0-9](\d{2,3}) ?gb?\b", row.gpu_type.lower())
    size = row.gpu_mem_gb or (float(named[1]) if named else None)
    if size is None and "equals card" in row.peak_mem_kind:
        size = row.peak_mem_gb
    near = [gpu for gpu in found if not size or abs((gpu.memory_gib or 0) / size - 1) < 0.1]
    if len(near) == 1:
        return near[0]
    # GB as sold are GiB, as far as the driver leaves them. Cards of a kind compute alike, whatever their memory.
    memory = size * 0.99 if size else None
    if found:
        slowest = min(found, key=lambda gpu: gpu.memory_gb_s or 0.0)
        return replace(slowest, memory_gib=memory, source="the row")
    return Gpu(memory_gib=memory, source="the row") if memory else None


@cache
def _gpus() -> Mapping[str, Gpu]:
    cards = {}
    for file in sorted((CONF / "gpu").glob("*.yaml")):
        card: Any = OmegaConf.to_container(OmegaConf.load(file))
        cards[file.stem.lower()] = parse(Gpu, card, str(file))
    return cards
