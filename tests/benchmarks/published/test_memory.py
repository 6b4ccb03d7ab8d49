"""The cases from rows of published runs, and their verdicts about memory."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.published import boundaries, memory, steps
from benchmarks.published.cards import further_models
from benchmarks.published.cases import Case, Skipped, case_of
from benchmarks.published.libraries import VERL_LOGITS
from benchmarks.published.rows import Row, row_of
from benchmarks.published.settings import sequences_per_sample
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.planner.confidence import Band, Verdict
from rlflow.schema import parse

SUPERVISED = {
    "id": "a1",
    "source_path": "examples/sft.sh",
    "evidence": "vendor_measured_table",
    "system": "ms-swift",
    "algorithm": "sft",
    "model": "Qwen/Qwen2.5-7B-Instruct",
    "params_b": "7.62",
    "n_nodes": "1",
    "gpus_per_node": "8",
    "n_gpus": "8",
    "gpu_type": "H100",
    "gpu_mem_gb": "80",
    "train_backend": "deepspeed",
    "sharding": "zero3",
    "micro_batch_per_gpu": "1",
    "max_total_len": "2048",
    "placement": "train-only",
    "outcome": "ok",
}
SAMPLED = SUPERVISED | {
    "system": "verl",
    "algorithm": "grpo",
    "train_backend": "fsdp",
    "sharding": "fsdp(zero3)",
    "placement": "colocate",
    "rollout_engine": "vllm",
    "rollout_tp": "2",
    "gpu_memory_utilization": "0.5",
    "n_samples": "8",
    "prompts_per_step": "128",
    "max_prompt_len": "512",
    "max_response_len": "1024",
    "max_total_len": "",
    "param_offload": "True",
}


def row(base: Mapping[str, str] = SUPERVISED, /, **cells: str) -> Row:
    return row_of({**base, **cells})


def case(base: Mapping[str, str] = SUPERVISED, /, **cells: str) -> Case:
    made = case_of(row(base, **cells))
    assert isinstance(made, Case), made
    return made


def test_cells_have_types_and_blanks_are_none() -> None:
    read = row(lora_rank="", optim_offload="false", sharding="None", step_time_s="n/a", train_tp="4.0")
    assert (read.lora_rank, read.optim_offload, read.sharding, read.step_time_s) == (None, False, "", None)
    assert (read.train_tp, read.gpu_mem_gb, read.notes) == (4, 80.0, "")


@pytest.mark.parametrize(
    ("name", "size", "layers"),
    [
        ("Qwen/Qwen2.5-7B", "7.62", 28),
        ("Qwen2.5-7B-Instruct", "", 28),
        ("allenai/Llama-3.1-Tulu-3-8B-SFT", "8.0", 32),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "30.53", 48),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", "1.78", 28),
        ("facebook/opt-13.2b", "13.2", 40),
    ],
)
def test_models_are_found_by_the_words_of_their_names(name: str, size: str, layers: int) -> None:
    assert case(model=name, params_b=size).model.num_hidden_layers == layers


def test_figures_of_further_models_add_up_to_the_parameters_that_their_pages_state() -> None:
    for name, entry in further_models().items():
        of = parse(Architecture, entry["architecture"], name)
        total = of.num_parameters + of.encoder_parameters
        assert total == pytest.approx(1e9 * entry["billions"], rel=0.01), name


@pytest.mark.parametrize(
    ("name", "size", "gib"),
    [
        ("H100", "80", 79.6),
        ("NVIDIA A100 80GB", "", 80),
        ("A100-SXM4-40GB", "40", 40),
        ("GeForce RTX 4090", "24", 24),
        ("H200", "", 140.4),
        ("GH200", "96", 95.04),
        ("A100", "", None),
        ("", "64", 63.36),
        ("", "", None),
    ],
)
def test_gpus_are_found_by_kind_and_memory(name: str, size: str, gib: float | None) -> None:
    assert case(gpu_type=name, gpu_mem_gb=size).memory_gib == pytest.approx(gib)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"outcome": "not_shown"}, "a blank cell: no evidence"),
        ({"model": "Kwai-Keye/Keye-VL-1_5-8B"}, "a model with more than a text decoder"),
        ({"source_path": "examples/train/qlora/hqq.sh"}, "quantised weights of other than four bits"),
        ({"notes": "multimodal Geo3K"}, "images of which the row gives no number"),
        ({"notes": "tuner=osf; OSF"}, "a tuner that is neither full nor LoRA"),
        ({"notes": "optimizer_cpu_offload_fraction=0.5"}, "an optimizer of which a part is offloaded"),
        ({"model": "nobody/nothing-7B"}, "a model without figures"),
        ({"params_b": "14"}, "a model without figures"),
        ({"model": "Qwen-7B class"}, "a model that is only roughly named"),
        ({"n_gpus": ""}, "no number of GPUs"),
        ({"train_tp": "3"}, "degrees that do not divide the GPUs"),
        ({"notes": "tuner=adalora"}, "a tuner that is neither full nor LoRA"),
        ({"notes": "# muon: 2 x 65GiB"}, "an optimizer other than Adam"),
        ({"notes": "flags contradictory in the report"}, "a contradictory report"),
        ({"algorithm": "gkd"}, "further models that are not named"),
    ],
)
def test_rows_are_left_out_for_a_reason(cells: dict[str, str], reason: str) -> None:
    made = case_of(row(**cells))
    assert isinstance(made, Skipped)
    assert made.reason == reason


@pytest.mark.parametrize(
    ("cells", "is_unknown"),
    [
        ({"system": "verl"}, True),
        ({"system": "ms-swift", "source_path": "examples/full_vit.sh"}, True),
        ({"system": "ms-swift"}, False),
    ],
)
def test_memory_is_not_judged_where_an_encoder_of_images_may_be_trained(
    cells: dict[str, str], is_unknown: bool
) -> None:
    made = case(model="Qwen/Qwen2.5-VL-7B-Instruct", params_b="8.29", **cells)
    reason = memory.unfit(made)
    assert ("encoder of images" in (reason or "")) == is_unknown


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"n_samples": ""}, "the number of responses to a prompt is not given"),
        ({"gpu_type": "", "gpu_mem_gb": ""}, "no GPU named"),
        ({}, "images of which the row gives no number"),
    ],
)
def test_times_of_models_that_see_are_not_judged_without_their_work(cells: dict[str, str], reason: str) -> None:
    given = {"prompts_per_step": "128", "n_samples": "5", "mean_response_len": "400", "mean_prompt_len": "300"}
    settings = {"system": "verl", "algorithm": "grpo", "rollout_engine": "vllm", "placement": "colocate"}
    settings |= {"model": "Qwen/Qwen2.5-VL-7B-Instruct", "params_b": "8.29", "step_time_s": "60"}
    assert steps.unfit(case(**settings | given | cells)) == reason


@pytest.mark.parametrize(
    ("cells", "stage", "bytes_"),
    [
        ({}, 3, (2, 2, 12)),
        ({"train_backend": "deepspeed zero2", "sharding": ""}, 2, (2, 2, 12)),
        ({"train_backend": "megatron", "sharding": "dist-optimizer", "train_tp": "2"}, 1, (2, 4, 12)),
        ({"train_backend": "megatron", "sharding": "", "system": "nemo-rl", "train_tp": "2"}, 1, (2, 2, 12)),
        ({"train_backend": "dtensor-fsdp2", "system": "nemo-rl"}, 3, (4, 4, 8)),
        ({"train_backend": "ddp", "sharding": ""}, None, (2, 2, 4)),
        ({"train_backend": "ddp", "sharding": "", "system": "TRL"}, None, (4, 4, 8)),
    ],
)
def test_libraries_keep_their_state_in_their_ways(
    cells: dict[str, str], stage: int | None, bytes_: tuple[int, ...]
) -> None:
    made = case(**cells)
    training = made.training
    assert made.train.zero_stage == stage
    assert (training.weights, training.gradients, training.optimizer) == bytes_


def test_degrees() -> None:
    made = case(n_gpus="32", n_nodes="4", train_tp="2", train_pp="2", train_cp="2", train_backend="megatron")
    assert (made.train.data_parallel_size, made.train.sequence_parallel_size) == (4, 2)
    # A dense model has no experts to spread.
    assert case(train_ep="8").train.expert_parallel_size == 1


def test_gpus_of_generation_are_not_those_of_training() -> None:
    apart = case(SAMPLED, placement="disaggregate", train_gpus="6", rollout_gpus="2")
    assert apart.train.num_gpus == 6
    assert apart.rollout is not None
    assert apart.rollout.num_gpus == 2
    halves = case(SAMPLED, placement="disaggregate")
    assert (halves.train.num_gpus, "train_gpus" in halves.assumed) == (4, True)
    together = case(SAMPLED)
    assert together.colocated
    assert together.rollout is not None
    assert (together.train.num_gpus, together.rollout.data_parallel_size) == (8, 4)


@pytest.mark.parametrize(
    ("cells", "tokens"),
    [
        ({"notes": "padded to 2048 tokens"}, 2048),
        ({"notes": "packing"}, 2048),
        ({"notes": "packing", "micro_batch_per_gpu": "2"}, 4096),
        ({"max_tokens_per_gpu": "16384", "system": "nemo-rl", "train_backend": "dtensor", "train_cp": "2"}, 16384),
        ({"max_tokens_per_gpu": "16384", "system": "verl", "train_backend": "fsdp", "train_sp": "2"}, 32768),
    ],
)
def test_largest_micro_batch(cells: dict[str, str], tokens: int) -> None:
    assert case(**cells).train.micro_batch_tokens == tokens


def test_unknown_texts_are_far_shorter_than_their_limit() -> None:
    one = case().train.micro_batch_tokens
    assert 1024 < one < 2048
    assert case(micro_batch_per_gpu="4").train.micro_batch_tokens > 2.5 * one
    free = case(micro_batch_per_gpu="4", notes="padding_free").train.micro_batch_tokens
    assert free < case(micro_batch_per_gpu="4").train.micro_batch_tokens


def test_the_texts_of_gsm8k_are_about_equally_long() -> None:
    """A hundred samples have 359 tokens each on average, and at most a tenth more together."""
    cells = {"notes": "GSM8K", "micro_batch_per_gpu": "100", "prompts_per_step": "1024"}
    assert 35_900 < case(SAMPLED, **cells).train.micro_batch_tokens < 1.1 * 35_900


def test_preference_pairs_and_their_reference() -> None:
    assert sequences_per_sample(row(algorithm="dpo")) == 2
    assert case(algorithm="dpo").habits.references == 1
    assert case(algorithm="dpo", lora_rank="8").habits.references == 0
    assert "reference" in memory.predict(case(algorithm="dpo")).update


# --- memory


def judge(**cells: str) -> memory.Judged:
    judged, skipped = memory.judge([case(**cells)])
    assert not skipped
    return judged[0]


def test_measured_memory() -> None:
    """GB as tools print them are GiB."""
    assert judge(peak_mem_gb="40", peak_mem_kind="header note, per-GPU GiB", gpu_type="", gpu_mem_gb="").measured == 40
    assert judge(peak_mem_gb="40", peak_mem_kind="vendor table GPU memory usage").measured == 40
    assert judge(peak_mem_gb="80", peak_mem_kind="vendor table GPU memory usage").measured is None


def test_torch_does_not_count_the_process() -> None:
    inside = judge(peak_mem_gb="40", peak_mem_kind="GB allocated by torch")
    seen = memory.comparable(inside.case, inside.prediction)
    unseen = sum(inside.prediction.update[term] for term in ("context", "nccl", "fragmentation"))
    assert seen == pytest.approx(inside.prediction.update_gib - unseen)


def test_a_bound_is_kept_or_not() -> None:
    bound = judge(peak_mem_gb="50", peak_mem_kind="ci_upper_bound_max_device_used_gb")
    assert (bound.bound, bound.measured) == (50, None)
    assert memory.figures([bound])["bounds_violated"] == 0
    low = judge(peak_mem_gb="5", peak_mem_kind="ci_upper_bound_max_device_used_gb")
    assert memory.figures([low])["bounds_violated"] == 1


def test_outcomes() -> None:
    fits, died = judge(), judge(outcome="oom", n_gpus="1")
    missed = judge(outcome="oom")
    figures = memory.figures([fits, died, missed])
    assert (figures["oom_recall"], figures["oom_rows"]) == (0.5, 2)
    assert (figures["false_oom_rate"], figures["working_rows"]) == (0, 1)
    contested = memory.judge([case(outcome="oom", notes="node count not stated")])[1]
    assert contested == {"a1": "neither outcome nor memory"}


def test_an_engine_awake_takes_its_share() -> None:
    asleep = memory.predict(case(SAMPLED))
    awake = memory.predict(case(SAMPLED, system="TRL", train_backend="deepspeed", sharding="zero3"))
    assert asleep.generate is not None
    assert sum(asleep.generate.values()) == pytest.approx(0.5 * 79.6)
    share = sum(gib for term, gib in awake.update.items() if term.startswith("engine "))
    # The engine is in the policy's process, which has one context and loads NCCL once.
    assert share == pytest.approx(0.5 * 79.6 - 0.55 - 1.2)
    apart = memory.predict(case(SAMPLED, system="nemo-rl"))
    assert apart.generate is not None
    assert sum(apart.generate.values()) == pytest.approx(0.5 * 79.6 + 0.55)
    assert not memory.predict(case(SAMPLED, gpu_memory_utilization="0.05")).has_room


@pytest.mark.parametrize(
    ("resting", "verdict"), [(30.0, Verdict.FITS), (35.0, Verdict.TIGHT), (51.0, Verdict.DOES_NOT_FIT)]
)
def test_an_engine_takes_its_share_exactly_and_a_resting_policy_within_its_band(
    resting: float, verdict: Verdict
) -> None:
    """The engine leaves 40 of 80 GiB, of which 35 GiB may need 28 to 43.75."""
    generate = {"weights": 14.0, "kv": 26.0, "resting weights": resting}
    bare = replace(memory.predict(case(SAMPLED)), generate=generate, sync=None, limit=80.0, update_range=(1.0, 1.0))
    assert bare.verdict(Band(0.8, 1.25)) is verdict


def test_a_policy_that_is_said_to_be_offloaded_does_not_rest_on_its_gpu() -> None:
    said = memory.predict(
        case(SAMPLED, param_offload="", system="agilerl", notes="trainer base offloaded to host during rollout")
    )
    stays = memory.predict(case(SAMPLED, param_offload="", system="agilerl"))
    assert said.generate is not None
    assert stays.generate is not None
    assert "resting weights" in stays.generate.keys() - said.generate.keys()


def test_a_reference_of_adapters_is_a_frozen_copy_of_them() -> None:
    """Adapters of 8 ranks for all linear layers of Qwen2.5-7B have 20,185,088 parameters."""
    cells = {"system": "agilerl", "train_backend": "hf+peft", "sharding": "", "lora_rank": "8"}
    assert memory.predict(case(SAMPLED, **cells)).update["reference"] == pytest.approx(4 * 20_185_088 / 2**30)
    assert memory.predict(case(SAMPLED, lora_rank="8")).update["reference"] == 0


def test_the_whole_device_includes_the_context_and_what_is_reserved_does_not() -> None:
    prediction = memory.predict(case(SAMPLED))
    whole = memory.comparable(case(SAMPLED), prediction, "whole device: baseline + torch reserved growth")
    reserved = memory.comparable(case(SAMPLED), prediction, "torch.cuda.max_memory_reserved")
    assert whole - reserved == pytest.approx(prediction.update["context"] + prediction.update["nccl"])


def test_boundaries_are_searched_in_what_differs() -> None:
    series = [
        row(
            SAMPLED,
            id=f"b{size}",
            evidence="author_oom_bisect",
            micro_batch_per_gpu=str(size),
            grad_ckpt="True",
            outcome="ok" if size < 96 else "oom",
        )
        for size in (32, 64, 96)
    ]
    (found,) = boundaries.boundaries(series)
    assert (found.searched, found.true, found.smallest_that_died) == ("micro_batch_per_gpu", 64, 96)
    largest, one_more = (
        case(SAMPLED, micro_batch_per_gpu=str(found.predicted + more), grad_ckpt="True") for more in (0, 1)
    )
    assert memory.predict(largest).fits
    assert not memory.predict(one_more).fits


def test_rows_without_lengths_have_a_range() -> None:
    """Sixteen samples may all be of the mean length or of the maximum, 2048; packed ones are of the maximum."""
    least, most = case(micro_batch_per_gpu="16").token_range
    assert least < case(micro_batch_per_gpu="16").train.micro_batch_tokens
    assert most == 16 * 2048
    assert case(micro_batch_per_gpu="16", notes="packing").token_range == (16 * 2048, 16 * 2048)
    # Short samples would fit on one GPU with adapters, and 64 long ones would not.
    unsure = memory.predict(case(micro_batch_per_gpu="64", n_gpus="1", n_nodes="1", sharding="zero2", lora_rank="8"))
    assert unsure.verdict(Band(1, 1)) is Verdict.TIGHT


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"notes": "no flash attention on V100"}, "attention that keeps its scores"),
        ({"notes": "128 GB unified CPU+GPU memory"}, "memory that the CPU shares"),
        ({"source_path": "fixtures/pending/a.json"}, "held back by its authors"),
    ],
)
def test_rows_that_say_nothing_about_the_model_of_memory(cells: dict[str, str], reason: str) -> None:
    assert memory.unfit(case(**cells)) == reason


def test_what_nvidia_smi_showed_beside_torch() -> None:
    both = judge(peak_mem_gb="40", peak_mem_kind="torch max_memory_allocated GiB (nvidia-smi 52.5 GiB)")
    assert (both.measured, both.whole_device) == (40, 52.5)
    device = memory.comparable(both.case, both.prediction, "nvidia-smi")
    assert device == pytest.approx(both.prediction.update_gib + both.prediction.cached)
    full = replace(both.prediction, cached=1000.0)
    assert memory.comparable(both.case, full, "nvidia-smi") == both.prediction.limit


class Loss(torch.autograd.Function):
    """A loss whose kernel keeps the logits and writes their gradient in the same type."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return logits[:, 0].float().mean()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return torch.zeros_like(logits)


@pytest.mark.slow
def test_logits_that_are_divided_in_place_need_four_copies_of_their_gradient() -> None:
    """verl's loss: cross-entropy and entropy of ``output.logits.squeeze(0).div_(temperature)`` in bf16."""
    tokens, width, vocabulary = 256, 16, 4096
    hidden = torch.zeros(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
    head = torch.zeros(vocabulary, width, dtype=torch.bfloat16)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        logits = torch.nn.functional.linear(hidden, head).squeeze(0)
        logits.div_(1.0)
        losses = [Loss.apply(logits) for _ in ("cross-entropy", "entropy")]  # type: ignore[no-untyped-call]
        del logits
        torch.autograd.backward(losses)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert max(accumulate(sizes)) == pytest.approx(VERL_LOGITS * tokens * vocabulary, rel=0.05)
