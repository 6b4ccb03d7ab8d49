"""Step times of DeepSpeed-Chat, whose table has the time of an epoch, and of OpenRLHF's comparison with it."""

from dataclasses import replace
from math import ceil

from benchmarks.published.batches import COMPARED_BATCH, COMPARED_LENGTH, is_compared
from benchmarks.published.cases import Case
from benchmarks.published.padded import padded_generation
from benchmarks.published.steps import Step, critic_of
from rlflow.resources.layout import GIB, Layout, Offload
from rlflow.resources.memory.phases import update_terms
from rlflow.resources.memory.state import state_terms
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.decoding import Requests
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.passes import Kernels, PassBatch, gather_seconds, scoring, sync_seconds, training
from rlflow.resources.time.speed import Efficiency, gpu_speed

# step3_rlhf_finetuning/BenckmarkSetting.md: 264,292 samples of 256 + 256 tokens, at most 1024 a step, else as many as
# memory allows. The README's 131.9k queries are half of that; its 135 million tokens are not.
_EPOCH_SAMPLES, _EPOCH_LENGTH, _EPOCH_BATCH = 264_292, 256, 1024
# The largest micro-batch of DeepSpeed-Chat in the comparison (benchmark/README.md).
_COMPARED_MICRO_BATCH = 8
# Kernels of DeepSpeed's inference injection are few, but launched one by one; of a layer's forward pass.
_INJECTED_LAYER_S = 0.15e-3


def is_hybrid(case: Case) -> bool:
    return case.row.rollout_engine.startswith("ds")


def predict(case: Case, efficiency: Efficiency | None = None) -> Step:
    """Predict a step that generates and trains on batches as large as memory allows.

    In the epochs, weights are gathered into injected kernels once for each batch; models that do not fit a GPU beside
    what is trained are cut over those of a host. In the comparison with OpenRLHF, where that is said not to work under
    ZeRO-3, they are gathered for every token (benchmark/README.md).
    """
    assert case.gpu is not None
    speed = gpu_speed(case.gpu, case.gpus_per_host, efficiency or Efficiency())
    model, gpus, epoch = case.model, case.train.num_gpus, not is_compared(case.row)
    length = float(_EPOCH_LENGTH if epoch else COMPARED_LENGTH)
    fixed = Lengths((length,))
    critic = critic_of(case)
    most = max(1, min(_EPOCH_BATCH // gpus, _EPOCH_BATCH if epoch else _COMPARED_MICRO_BATCH))
    train, each, width = _largest(case, critic, 2 * length, most, whole=epoch)
    seconds = padded_generation(
        model,
        Layout(tensor_parallel_size=width, data_parallel_size=gpus // width, micro_batch_tokens=8192),
        speed,
        Requests(sequences=each * width, prompts=fixed, responses=fixed),
        batch=each * width,
        layer_s=_INJECTED_LAYER_S if epoch else None,
        gather_s=0 if epoch else gather_seconds(model, train, speed),
    )
    tokens = each * gpus * 2 * length
    minibatches = 1 if epoch else ceil(each * gpus / COMPARED_BATCH)

    def score(of: Architecture) -> float:
        return scoring(of, train, speed, PassBatch(tokens=tokens, length=2 * length), Kernels(flash=False)).seconds

    def update(of: Architecture, layout: Layout) -> float:
        return training(
            of,
            layout,
            speed,
            PassBatch(tokens=tokens, length=2 * length, minibatches=minibatches),
            Kernels(flash=False),
        ).seconds

    small = replace(train, offload="none" if epoch else train.offload)
    parts = {
        "generation": sum(seconds),
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
    """Return the layout, the sequences per GPU and the GPUs per generating group with the largest batch that fits.

    Attention of that time keeps its whole matrix, in fp32 and fp16, and its mask.
    """
    assert case.memory_gib is not None
    gpus, model = case.train.num_gpus, case.model
    offloads: tuple[Offload, ...] = ("none", "optimizer")
    widths = [width for width in (1, 2, 4, 8) if width <= min(gpus, case.gpus_per_host)] if whole else [1]
    for offload, width in [(offload, width) for offload in offloads for width in widths]:
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
