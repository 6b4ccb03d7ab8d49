"""Rows of a table of published runs, and each as a case in rlflow's own terms, or the reason why it is none."""

import csv
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

from omegaconf import OmegaConf

from benchmarks.published import libraries
from rlflow.resources.cluster import Gpu
from rlflow.resources.layout import Layout
from rlflow.resources.lengths import Lengths
from rlflow.resources.memory import Training
from rlflow.resources.model import Architecture
from rlflow.schema import parse

CONF = Path(__file__).parents[2] / "conf"

# Words of models with a part besides the decoder, whose inputs and size the table does not give.
_MORE_THAN_TEXT = re.compile(
    r"vl|vlm|omni|audio|vision|multimodal|internvl\S*|ovis\S*|keye|llava\S*|minicpm-?v\S*|diffusiongemma|gme|llama-?4|scout"
)
_QUANTISED = re.compile(r"awq|gptq|qlora|bnb|hqq|int4|int8|nvfp4|mxfp4")
_TEXT_LENGTH, _LIMIT_TO_MEAN = 200.0, 10.0
"""Mean tokens of a supervised sample where nothing is known of the data: those of Alpaca, or a tenth of the limit of
tokens in a micro-batch, if that is more: limits are set so that nearly all samples are whole and the worst still fits."""
_ANSWER_SHARE = 0.3
"""Of the limit, the mean length of sampled responses where it is not given."""


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
        """Where the run's options are named, in small letters."""
        return f"{self.source_path} {self.notes}".lower()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row as rlflow would plan it."""

    row: Row
    model: Architecture
    gpu: Gpu | None
    """None: the row names none."""
    gpus_per_host: int
    train: Layout
    """``micro_batch_tokens`` is the largest micro-batch of the run."""
    training: Training
    library: libraries.Library
    rollout: Layout | None
    """Of all generating engines together. None: the run does not generate, or the row does not say with what."""
    colocated: bool
    prompts: Lengths
    responses: Lengths
    samples: float | None
    """Per step: prompts times the responses to each."""
    group_size: int
    packed: bool
    """Micro-batches are filled with whole samples, or hold them without padding."""
    assumed: frozenset[str]
    """Columns that are blank and were filled by what the library does, or by a prior."""

    @property
    def memory_gib(self) -> float | None:
        return self.gpu.memory_gib if self.gpu else None


@dataclass(frozen=True)
class Skipped:
    row: Row
    reason: str


def read(file: Path) -> list[Row]:
    """Columns that the table lacks are blank."""
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


def case_of(row: Row) -> Case | Skipped:
    """The row in rlflow's terms, or why it cannot be: the reasons hold for memory and time alike."""
    reason = _unfit(row)
    if reason:
        return Skipped(row, reason)
    model = model_of(row)
    assert model is not None
    library = libraries.of(row)
    assumed = set(libraries.assumed(row))
    gpus = _train_gpus(row)
    if row.placement == "disaggregate" and not (row.train_gpus or row.rollout_gpus):
        assumed.add("train_gpus")
    tensor = libraries.tensor_parallel_size(row)
    group = tensor * (row.train_pp or 1) * (row.train_cp or 1) * (row.train_sp or 1)
    if gpus % group:
        return Skipped(row, "degrees that do not divide the GPUs")
    packed = libraries.is_packed(row)
    prompts, responses, guessed = _lengths(row)
    assumed |= guessed
    train = Layout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=row.train_pp or 1,
        data_parallel_size=gpus // group,
        sequence_parallel_size=(row.train_cp or 1) * (row.train_sp or 1),
        expert_parallel_size=(row.train_ep or 1) if model.num_experts else 1,
        zero_stage=library.zero_stage,
        offload=library.offload,
        micro_batch_tokens=round(_largest_micro_batch(row, prompts, responses, packed)),
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
        training=library.training,
        library=library,
        rollout=_rollout(row, gpus, colocated),
        colocated=colocated,
        prompts=prompts,
        responses=responses,
        samples=_samples(row),
        group_size=row.n_samples or 1,
        packed=packed,
        assumed=frozenset(assumed),
    )


def _unfit(row: Row) -> str | None:
    text, name = row.text, row.model.lower()
    if row.outcome in ("not_shown", ""):
        return "a blank cell: no evidence"
    if re.search(r"contradict|incomplete", text):
        return "a contradictory report"
    words = re.split(r"[-_/() ]+", name)
    if any(_MORE_THAN_TEXT.fullmatch(word) for word in words):
        return "a model with more than a text decoder"
    if _QUANTISED.search(name) or _QUANTISED.search(row.source_path.lower()):
        return "quantised weights"
    if model_of(row) is None:
        return "a model without figures"
    if row.n_gpus is None:
        return "no number of GPUs"
    return libraries.unfit(row)


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
    )


def _samples(row: Row) -> float | None:
    if row.prompts_per_step:
        return float(row.prompts_per_step * (row.n_samples or 1))
    generated = re.search(r"generation GBS (\d+)", row.notes)
    if generated:
        return float(generated[1])
    return float(row.train_batch) if row.train_batch else None


def _lengths(row: Row) -> tuple[Lengths, Lengths, set[str]]:
    """Of prompts and responses; supervised samples are one text, the response, after a prompt of one token."""
    guessed = set()
    total = row.max_total_len or (row.max_prompt_len or 0) + (row.max_response_len or 0) or None
    if not row.rollout_engine and not row.max_response_len:
        limit = float(total or 32768)
        mean = row.mean_response_len or row.mean_prompt_len
        if mean is None:
            guessed.add("mean_response_len")
            known = libraries.data_lengths(row)
            sequences = (row.micro_batch_per_gpu or 1) * libraries.sequences_per_sample(row)
            mean = max(_TEXT_LENGTH, (total or 0) / _LIMIT_TO_MEAN / sequences)
            mean = min(sum(known) if known else mean, limit / 2)
        return Lengths((1.0,)), Lengths.about(mean, limit), guessed
    response_limit = float(row.max_response_len or total or 2048)
    prompt_limit = float(row.max_prompt_len or (total or 4096) / 2)
    average = re.search(r"average seq len \(prompt\+response\) ([\d,]+)", row.notes, re.I)
    known = libraries.data_lengths(row)
    prompt, response = row.mean_prompt_len, row.mean_response_len
    if known and response is None:
        prompt, response = known
        guessed.add("mean_response_len")
    if prompt is None:
        prompt = min(150.0, prompt_limit / 2)
    if response is None and average:
        response = max(1.0, float(average[1].replace(",", "")) - prompt)
    if response is None:
        guessed.add("mean_response_len")
        response = _ANSWER_SHARE * response_limit
    return Lengths.about(prompt, prompt_limit), Lengths.about(response, response_limit), guessed


def _largest_micro_batch(row: Row, prompts: Lengths, responses: Lengths, packed: bool) -> float:
    """Tokens of the largest micro-batch that a GPU (its group) meets in a run."""
    per_sample = libraries.sequences_per_sample(row)
    sequences = (row.micro_batch_per_gpu or 1) * per_sample
    limit = float(row.max_total_len or (row.max_prompt_len or 0) + (row.max_response_len or 0) or 32768)
    if row.max_tokens_per_gpu and packed:
        return float(libraries.tokens_per_group(row))
    if packed and "packing" in row.text and not row.rollout_engine:
        return limit * (row.micro_batch_per_gpu or 1)
    if re.search(r"padded to|\d+k context", row.text):
        return limit * sequences
    mean = prompts.mean + responses.mean
    if packed:
        # Without padding: the sum of what is drawn, three standard deviations above its mean at most.
        variance = responses.mean_square - responses.mean**2
        return float(min(limit * sequences, max(mean * sequences + 3 * (variance * sequences) ** 0.5, mean)))
    return float(min(limit, prompts.longest + responses.longest) * sequences)


@cache
def _cards() -> Mapping[frozenset[str], Architecture]:
    """Architectures of conf/model by the words of their names that tell them apart."""
    cards = {}
    for file in sorted((CONF / "model").glob("*.yaml")):
        card: Any = OmegaConf.to_container(OmegaConf.load(file))
        if card.get("architecture"):
            architecture = parse(Architecture, card["architecture"], str(file))
            for name in (card.get("path") or "", *_ALIASES.get(file.stem, ())):
                cards[frozenset(_words(name))] = architecture
    return cards


_ALIASES = {
    "codellama_34b": ("llama-2-34b",),
    "opt_13b": ("opt-13.2b",),
    "deepseek_r1_distill_qwen_1_5b": ("deepscaler-1.5b",),
}
"""Other names of the same architecture."""


def _words(name: str) -> set[str]:
    """Of ``Qwen/Qwen2.5-7B-Instruct``: qwen2.5 and 7b."""
    tail = name.lower().rsplit("/", 1)[-1].removesuffix(".md")
    tail = re.sub(r"^(nvidia|meta)-", "", tail).replace("llama2", "llama-2").replace("llama3", "llama-3")
    words = {word for word in re.split(r"[-_() ]+", tail) if word}
    return {word for word in words if not re.fullmatch(r"instruct|base|chat|it|hf|v0\.\d|\d{4}|type", word)}


def model_of(row: Row) -> Architecture | None:
    """The card of conf/model with the most words of its name in the row's model, and about its size.

    Words that the card lacks, as of a fine-tuned model, do not matter: its size has to agree.
    """
    words = _words(row.model) | ({"v3"} if row.model.endswith("deepseek.md") else set())
    for name, architecture in sorted(_cards().items(), key=lambda item: -len(item[0])):
        size = row.params_b and architecture.num_parameters / 1e9 / row.params_b
        if name <= words and (not size or 0.85 < size < 1.18):
            return architecture
    return None


def gpu_of(row: Row) -> Gpu | None:
    """The card of conf/gpu of the row's type, with the row's own memory where no card has it."""
    name = _bare_gpu(row.gpu_type)
    matches = [gpu for stem, gpu in _gpus().items() if name and stem.startswith(name)]
    size = row.gpu_mem_gb
    near = [g for g in matches if not size or (g.memory_gib and abs(g.memory_gib / size - 1) < 0.1)]
    if near:
        return near[0]
    # GB as sold are GiB, as far as the driver leaves them.
    return Gpu(memory_gib=size * 0.99, source="the row") if size else None


def _bare_gpu(name: str) -> str:
    return re.split(r"[-_ ]", name.lower())[0]


@cache
def _gpus() -> Mapping[str, Gpu]:
    cards = {}
    for file in sorted((CONF / "gpu").glob("*.yaml")):
        card: Any = OmegaConf.to_container(OmegaConf.load(file))
        cards[file.stem.lower()] = parse(Gpu, card, str(file))
    return cards


def cases(rows: Iterable[Row]) -> tuple[list[Case], list[Skipped]]:
    made = [case_of(row) for row in rows]
    return [case for case in made if isinstance(case, Case)], [case for case in made if isinstance(case, Skipped)]
