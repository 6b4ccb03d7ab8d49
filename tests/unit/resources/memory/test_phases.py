import json
from dataclasses import replace
from typing import Any

import pytest
from omegaconf import OmegaConf

from benchmarks.published.libraries import DEEPSPEED, FSDP2, MEGATRON
from rlflow.engines.sharded.settings import TRAINING_MEMORY
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.activations import layer_activations
from rlflow.resources.memory.allocator import ALONE, SHARDED, Allocator, allocator_of
from rlflow.resources.memory.overheads import (
    CONTEXT_GIB,
    NCCL_COMMUNICATOR_GIB,
    NCCL_GIB,
    NCCL_PEER_GIB,
    asleep_terms,
    process_terms,
    sync_terms,
)
from rlflow.resources.memory.phases import (
    DRIVER_GIB,
    cached_gib,
    generate_memory,
    host_terms,
    score_terms,
    update_terms,
    usable_gib,
)
from rlflow.resources.memory.state import TrainingMemory, pipeline_stages, state_terms, total_gib
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.lora import Lora, adapter_parameters, reserved_rank
from rlflow.resources.planner.confidence import MEMORY_BANDS, Kind
from rlflow.schema import parse
from tests.conftest import ROOT

REFEREE = json.loads((ROOT / "benchmarks" / "fsdp_memory.json").read_text())
PROCESS = ("nccl", "context", "fragmentation")


def card(name: str) -> Architecture:
    figures: Any = OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / "model" / f"{name}.yaml"))
    return parse(Architecture, figures["architecture"], name)


def layout(**degrees: Any) -> Layout:
    return replace(
        Layout(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            sequence_parallel_size=1,
            zero_stage=0,
            offload="none",
            micro_batch_tokens=4096,
            gradient_checkpointing=True,
            gpu_memory_utilization=None,
        ),
        **degrees,
    )


LLAMA = card("llama2_7b")  # hidden 4096, 32 heads of 128 with as many keys, MLP 11008, vocabulary 32000, 32 layers
QWEN = card("qwen2_5_7b")
MOE = card("qwen3_30b_a3b")


def state_bytes(model: Architecture, training: TrainingMemory, **degrees: Any) -> float:
    """Return the bytes of state for each parameter of the model."""
    return sum(state_terms(model, layout(**degrees), training).values()) * GIB / model.num_parameters


# --- weights, gradients, optimizer


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_state_is_that_of_the_zero_papers_table(stage: int, gigabytes: float) -> None:
    """7.5 B parameters on 64 GPUs: Rajbhandari et al. 2020, figure 1."""
    plain = replace(DEEPSPEED, step=0)
    assert 7.5 * state_bytes(LLAMA, plain, zero_stage=stage, data_parallel_size=64) == pytest.approx(
        gigabytes, rel=0.02
    )


@pytest.mark.parametrize("ranks", [1, 2, 8, 64])
def test_megatrons_distributed_optimizer(ranks: int) -> None:
    """Megatron's documentation has 6 + 12 / d bytes a parameter for bf16 parameters and fp32 gradients."""
    found = state_bytes(LLAMA, MEGATRON, zero_stage=1, data_parallel_size=ranks)
    assert found == pytest.approx(6 + 12 / ranks)


def test_fsdp_with_fp32_parameters_shards_sixteen_bytes() -> None:
    assert state_bytes(QWEN, FSDP2, zero_stage=3, data_parallel_size=8) == pytest.approx(16 / 8)


def test_sequence_parallel_ranks_share_out_the_state_too() -> None:
    both = state_terms(QWEN, layout(zero_stage=3, data_parallel_size=4, sequence_parallel_size=2), DEEPSPEED)
    assert both == pytest.approx(state_terms(QWEN, layout(zero_stage=3, data_parallel_size=8), DEEPSPEED))


def test_offloading() -> None:
    sharded = layout(zero_stage=3, data_parallel_size=8)
    optimizer = state_terms(QWEN, replace(sharded, offload="optimizer"), DEEPSPEED)
    assert (optimizer["optimizer"], optimizer["gradients"]) == (0, 0)
    assert optimizer["weights"] == pytest.approx(2 * QWEN.num_parameters / 8 / GIB)
    assert sum(state_terms(QWEN, replace(sharded, offload="weights"), DEEPSPEED).values()) == 0
    # Megatron's gradients stay where they are made.
    megatron = state_terms(QWEN, layout(zero_stage=1, offload="optimizer"), MEGATRON)
    assert megatron["gradients"] == pytest.approx(4 * QWEN.num_parameters / GIB)


def test_what_is_offloaded_is_on_the_host() -> None:
    sharded = layout(zero_stage=3, data_parallel_size=8, offload="optimizer")
    host = host_terms(QWEN, sharded, DEEPSPEED, data_gib=1.5)
    eighth = QWEN.num_parameters / 8 / GIB
    # Gradients are there as they are added up, and in fp32 for the optimizer.
    assert host == pytest.approx({"weights": 0, "gradients": (2 + 4) * eighth, "optimizer": 12 * eighth, "data": 1.5})
    parked = host_terms(QWEN, sharded, DEEPSPEED, offloads=True)
    bucket = 2 * 500_000_000 / GIB  # DeepSpeed's reduce_bucket_size, of bfloat16 gradients
    assert sum(parked.values()) == pytest.approx((16 + 4) * eighth + bucket)


def test_adapters() -> None:
    """Rank 8 on Qwen2.5-7B: q, o 3584 x 3584, k, v 3584 x 512, three MLP products of 3584 and 18944; 28 layers."""
    inputs_and_outputs = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    assert adapter_parameters(QWEN, Lora(rank=8)) == 8 * 28 * inputs_and_outputs == 20_185_088
    terms = state_terms(QWEN, layout(), replace(DEEPSPEED, lora=Lora(rank=8)))
    assert terms["weights"] == pytest.approx((2 * QWEN.num_parameters + 4 * 20_185_088) / GIB)
    assert terms["gradients"] + terms["optimizer"] == pytest.approx(12 * 20_185_088 / GIB)


@pytest.mark.parametrize(("rank", "reserved"), [(1, 8), (8, 8), (9, 16), (257, 320), (512, 512)])
def test_vllm_reserves_room_for_the_next_rank_that_it_supports(rank: int, reserved: int) -> None:
    assert reserved_rank(Lora(rank=rank)) == reserved


def test_tensor_parallelism_divides_everything() -> None:
    whole, half = state_terms(QWEN, layout(), MEGATRON), state_terms(QWEN, layout(tensor_parallel_size=2), MEGATRON)
    assert half == pytest.approx({name: gib / 2 for name, gib in whole.items()})


def test_experts_are_spread_over_their_own_ranks_and_sharded_over_the_rest() -> None:
    experts = 48 * 128 * 3 * 2048 * 768
    assert MOE.num_expert_parameters == experts
    spread = layout(zero_stage=1, data_parallel_size=16, expert_parallel_size=8)
    rest = MOE.num_parameters - experts
    terms = state_terms(MOE, spread, MEGATRON)
    assert terms["weights"] == pytest.approx(2 * (rest + experts / 8) / GIB)
    # 16 ranks hold two copies of the experts: each shards its optimizer over two.
    assert terms["optimizer"] == pytest.approx(12 * (rest / 16 + experts / 8 / 2) / GIB)


def test_an_engine_with_whole_experts_has_the_same_weights_and_wider_activations() -> None:
    """Its ranks have all tokens, so they need no buffers to exchange them."""
    cut = layout(tensor_parallel_size=8, gpu_memory_utilization=0.9, eager=False)
    whole = replace(cut, expert_parallel_size=8)
    before, after = (generate_memory(MOE, of, 79.6).terms for of in (cut, whole))
    changed = {name for name in before if before[name] != pytest.approx(after[name])}
    assert changed == {"engine", "kv"}
    # Eight experts of 768 values for each of 8192 tokens, in bf16 before and after their product.
    assert after["engine"] - before["engine"] == pytest.approx(8192 * 4 * 8 * 768 * 7 / 8 / GIB)


def test_each_tensor_parallel_rank_has_a_copy_of_a_latent_cache() -> None:
    """DeepSeek-V3 caches 512 + 64 values of two bytes in 61 layers, whatever the number of ranks."""
    for size in (8, 16):
        memory = generate_memory(
            card("deepseek_v3"), layout(tensor_parallel_size=size, gpu_memory_utilization=0.9), 400.0
        )
        assert memory.kv_tokens == pytest.approx(memory.terms["kv"] * GIB / (61 * 576 * 2))


def test_the_fullest_stage_of_a_pipeline() -> None:
    """61 layers over 8 stages are 8 at most, and 5 in the last."""
    model = card("deepseek_v3")
    first, last = pipeline_stages(model, layout(pipeline_parallel_size=8))
    assert (first.num_layers, last.num_layers) == (8, 5)
    assert (first.in_flight, last.in_flight) == (8, 1)
    assert (first.head, last.head) == (0, 129280 * 7168)


def test_a_tied_embedding_is_on_the_first_and_on_the_last_stage() -> None:
    model = card("qwen2_5_1_5b")
    first, last = pipeline_stages(model, layout(pipeline_parallel_size=2))
    assert first.ends == last.ends == last.head == 151936 * 1536


# --- activations, logits


def test_bytes_that_a_layer_saves() -> None:
    """Counted by hand, after Korthikanti et al. 2022, section 4.1, for Llama-2-7B (h = 4096, MLP 11008)."""
    attention = 2 * 4 * 4096 + 4 * 32  # query, key, value, output, log-sum-exp
    fused = layer_activations(LLAMA, LLAMA.layer_kinds[0], fused=True)
    assert fused.whole == 2 * (2 + 2) * 4096  # two norms, their input and their output
    assert fused.split == attention + 3 * 2 * 11008  # gate, up, product
    eager = layer_activations(LLAMA, LLAMA.layer_kinds[0], fused=False)
    assert eager.whole == 2 * (4 + 2 + 2) * 4096  # the input in fp32, normalised, and the output
    assert eager.split == attention + 4 * 2 * 11008


def test_sequence_parallel_norms_divide_all_activations() -> None:
    """Korthikanti et al. 2022, table 2: with sequence parallelism everything is divided by t, without it not."""
    degrees = {"tensor_parallel_size": 4, "gradient_checkpointing": False}
    alone = update_terms(LLAMA, layout(gradient_checkpointing=False), MEGATRON, 4096)["activations"]
    sharded = update_terms(LLAMA, layout(**degrees), MEGATRON, 4096)["activations"]
    last_norm = 8 * 4096 * 4096 / GIB
    assert sharded - last_norm == pytest.approx((alone - last_norm) / 4)
    partly = update_terms(LLAMA, layout(**degrees), replace(MEGATRON, shards_norms=False), 4096)["activations"]
    assert partly > sharded


def test_recomputation_keeps_each_layers_input() -> None:
    kept = update_terms(LLAMA, layout(), DEEPSPEED, 16384)["activations"]
    assert kept == pytest.approx(16384 * (32 * 2 * 4096 + 8 * 4096) / GIB)


def test_what_kept_layers_hold_is_free_when_others_are_recomputed() -> None:
    """Without logits the peak is in the layers: a recomputed layer is as large as one that is kept."""
    small = replace(DEEPSPEED, logits=0)
    bytes_ = layer_activations(LLAMA, LLAMA.layer_kinds[0], fused=False)
    one, layer_input, last_norm, product = bytes_.whole + bytes_.split, 2 * 4096, 8 * 4096, 2 * 11008
    for kept_layers, expected in (
        (0, 32 * layer_input + one + product),
        (1, 31 * layer_input + one + last_norm),
        (16, 16 * layer_input + 16 * one + last_norm),
    ):
        terms = update_terms(LLAMA, layout(kept_layers=kept_layers), small, 16384)
        assert terms["activations"] == pytest.approx(16384 * expected / GIB)


def test_stages_hold_as_many_micro_batches_as_there_are() -> None:
    """The first of four: 8 of 32 layers, four micro-batches; as many activations as without a pipeline."""
    staged = layout(pipeline_parallel_size=4, gradient_checkpointing=False, zero_stage=1)
    terms = update_terms(LLAMA, staged, MEGATRON, 8192)
    saved = layer_activations(LLAMA, LLAMA.layer_kinds[0], fused=True)
    layers = 8192 * 32 * (saved.whole + saved.split)
    assert terms["activations"] == pytest.approx((layers + 8192 * 2 * 11008) / GIB)
    assert terms["logits"] == 0


def test_logits_and_losses() -> None:
    tokens = 8192
    eager = update_terms(QWEN, layout(), DEEPSPEED, tokens)
    assert eager["logits"] == pytest.approx(14 * tokens * 152064 / GIB)
    split = update_terms(QWEN, layout(sequence_parallel_size=2, zero_stage=3), DEEPSPEED, tokens)
    assert split["logits"] == pytest.approx(eager["logits"] / 2)
    fused = update_terms(QWEN, layout(), replace(DEEPSPEED, fused_loss=True), tokens)
    assert fused["logits"] < 0.05 * eager["logits"]


def test_chunked_logits_do_not_grow_with_the_tokens() -> None:
    """16 Mi of them at a time, by hand, and the gradients of the hidden states and of the head."""
    chunked = replace(DEEPSPEED, logits_at_once=2**24)
    for tokens in (8192, 32768):
        terms = update_terms(QWEN, layout(gradient_checkpointing=False), chunked, tokens)
        assert terms["logits"] == pytest.approx((14 * 2**24 + 4 * tokens * 3584 + 2 * 3584 * 152064) / GIB)
        assert terms["logits"] < 0.2 * update_terms(QWEN, layout(), DEEPSPEED, tokens)["logits"]
    scored = [score_terms(QWEN, layout(), tokens, training=chunked)["logits"] for tokens in (2048, 65536)]
    assert scored == [pytest.approx(10 * 2**24 / GIB)] * 2
    # A chunk is not more than there is.
    small = replace(QWEN, vocab_size=64)
    assert update_terms(small, layout(), chunked, 512) == update_terms(small, layout(), DEEPSPEED, 512)


@pytest.mark.parametrize("case", REFEREE, ids=lambda case: f"{case['model']}-{case['ranks']}x{case['tokens']}")
def test_update_agrees_with_torchs_tracker(case: dict[str, Any]) -> None:
    """The cases are measurements of benchmarks/fsdp_memory.py, which sees tensors, but no allocator and no process."""
    sharded = layout(zero_stage=3, data_parallel_size=case["ranks"], gradient_checkpointing=case["checkpointing"])
    terms = update_terms(card(case["model"]), sharded, FSDP2, case["tokens"], accumulates=False)
    seen = sum(gib for name, gib in terms.items() if name not in PROCESS)
    assert seen == pytest.approx(case["peak_gib"], rel=0.03)


def test_a_step_widens_gradients() -> None:
    """One GPU, few tokens: the fullest moment is DeepSpeed's step, with 1e9 parameters' gradients in fp32."""
    terms = update_terms(QWEN, layout(zero_stage=3), DEEPSPEED, 128)
    assert terms["step"] == pytest.approx(4e9 / GIB)
    assert terms["activations"] == 0


def test_gradients_of_earlier_micro_batches_are_there_at_the_loss() -> None:
    sharded = layout(zero_stage=3, data_parallel_size=8)
    first = update_terms(QWEN, sharded, FSDP2, 16384, accumulates=False)
    later = update_terms(QWEN, sharded, FSDP2, 16384)
    assert first["gradients"] == 0
    assert later["gradients"] == pytest.approx(4 * QWEN.num_parameters / 8 / GIB)


def test_a_7b_model_trains_16k_tokens_on_a_host_of_80_gib_and_32b_barely_fits() -> None:
    host = layout(zero_stage=3, data_parallel_size=8)
    limit = usable_gib(79.6)
    assert sum(update_terms(QWEN, host, DEEPSPEED, 16384).values()) < limit
    large = card("qwen2_5_32b")
    assert sum(state_terms(large, host, DEEPSPEED).values()) == pytest.approx(61, abs=0.1)
    assert sum(update_terms(large, host, DEEPSPEED, 8192).values()) > limit
    assert sum(update_terms(large, replace(host, offload="optimizer"), DEEPSPEED, 8192).values()) < limit


# --- other phases


def test_scoring_holds_weights_and_no_gradients_of_logits() -> None:
    terms = score_terms(QWEN, layout(zero_stage=3, data_parallel_size=8), 8192)
    assert terms["weights"] == pytest.approx(2 * QWEN.num_parameters / 8 / GIB)
    assert terms["logits"] == pytest.approx(10 * 8192 * 152064 / GIB)
    whole = score_terms(QWEN, layout(), 8192, weight_bytes=4)
    assert whole["weights"] == pytest.approx(4 * QWEN.num_parameters / GIB)
    assert whole["gathered"] == 0


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [("llama3_1_8b", 131072), ("llama2_7b", 524288), ("qwen2_5_7b", 57344), ("deepseek_v3", 70272)],
)
def test_bytes_of_a_cached_token(name: str, kv_bytes: int) -> None:
    """2 bytes x layers x key-value heads x head x 2; DeepSeek-V3: 61 layers of 512 + 64."""
    memory = generate_memory(card(name), layout(gpu_memory_utilization=0.9), 4000.0)
    assert memory.terms["kv"] * GIB / memory.kv_tokens == pytest.approx(kv_bytes)


def test_an_engine_uses_its_share_and_no_more() -> None:
    memory = generate_memory(QWEN, layout(gpu_memory_utilization=0.6), 79.6)
    assert sum(memory.terms.values()) == pytest.approx(0.6 * 79.6)
    small = generate_memory(QWEN, layout(gpu_memory_utilization=0.15), 79.6)
    assert small.kv_tokens < 0
    assert small.terms["kv"] == 0


def test_key_value_heads_are_copied_when_gpus_are_more() -> None:
    """Qwen2.5-7B has 4: with 8 GPUs each holds one, as with 4."""
    of = [generate_memory(QWEN, layout(tensor_parallel_size=size, gpu_memory_utilization=0.9), 79.6) for size in (4, 8)]
    each = [memory.terms["kv"] * GIB / memory.kv_tokens for memory in of]
    assert each == pytest.approx([57344 / 4, 57344 / 4])


def test_sleepers_keep_their_process() -> None:
    """AgileRL measured 0.86 GiB on an L4, of which its context takes 0.23 (AgileRL/AgileRL, pull request 635)."""
    engine = asleep_terms(QWEN)
    assert engine["context"] == CONTEXT_GIB
    assert sum(engine.values()) - CONTEXT_GIB == pytest.approx(0.86 - 0.23, rel=0.1)
    # NVIDIA-NeMo/RL, issue 223: 2440 MiB on each of two GPUs, 774 on one.
    assert asleep_terms(QWEN, 2)["nccl"] == pytest.approx((2440 - 774) / 1024, rel=0.05)


def test_both_copies_of_the_weights_are_there_while_they_are_moved() -> None:
    sharded = layout(zero_stage=3, data_parallel_size=8)
    terms = sync_terms(QWEN, sharded, FSDP2, layout(tensor_parallel_size=2, data_parallel_size=4))
    assert terms["weights"] == pytest.approx(4 * QWEN.num_parameters / 8 / GIB)
    assert terms["engine"] == pytest.approx(2 * QWEN.num_parameters / 2 / GIB)
    assert terms["gathered"] == pytest.approx(2 * 2 * 152064 * 3584 / GIB)
    assert "engine" not in sync_terms(QWEN, sharded, FSDP2)


def test_a_process_has_a_communicator_for_every_way_it_is_spread() -> None:
    assert process_terms(layout(zero_stage=None)) == {"nccl": 0, "context": CONTEXT_GIB}
    spread = layout(tensor_parallel_size=2, data_parallel_size=4, expert_parallel_size=4)
    assert process_terms(spread)["nccl"] == pytest.approx(NCCL_GIB + 2 * NCCL_COMMUNICATOR_GIB + 4 * NCCL_PEER_GIB)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_loads_nccl_on_one_gpu_too(stage: int) -> None:
    """On an H200 the process has 1.66 GiB besides torch's memory: 12.80 GiB in use, 11.14 of them reserved (ZeRO 2)."""
    assert sum(process_terms(layout(zero_stage=stage)).values()) == pytest.approx(1.66, rel=0.06)


@pytest.mark.parametrize(("stage", "measured"), [(1, 11.79), (2, 12.80), (3, 14.38)])
def test_deepspeed_updates_half_a_billion_parameters_on_an_h200(stage: int, measured: float) -> None:
    """``rlflow doctor --gpu`` saw this much in use after two updates. Only NCCL's share was learned from it."""
    model, alone = card("qwen2_5_0_5b"), layout(zero_stage=stage)
    terms = update_terms(model, alone, TRAINING_MEMORY, 4096, accumulates=False)
    predicted = total_gib(terms) + cached_gib(model, alone, TRAINING_MEMORY, 4096, accumulates=False)
    band = MEMORY_BANDS[Kind.ALONE]
    assert band.low <= measured / predicted <= band.high


def test_the_driver_keeps_a_part() -> None:
    assert usable_gib(80.0) == 80.0 - DRIVER_GIB


# --- the allocator


def test_the_allocator_keeps_what_other_moments_of_a_step_used() -> None:
    """Llama-3 8B, all weights in fp32 under FSDP on 4 GPUs, 4 x 4096 tokens with Liger's loss.

    Foundation-model-stack measured 37.4 GiB allocated and 53.4 GiB in nvidia-smi (fms-acceleration, A100 80GB). The sum
    of all moments: state 30.0, saved activations 4.3 and one layer 3.3, gathered parameters and reduced gradients 5.9,
    the optimizer's temporaries 7.5.
    """
    eight, four = card("llama3_1_8b"), layout(zero_stage=3, data_parallel_size=4)
    training = replace(FSDP2, step=4, fused_loss=True)
    everything = Allocator(fragmentation=0.0, between_logits=0.0, cached=1.0)
    peak = sum(update_terms(eight, four, training, 16384, allocator=everything).values())
    kept = cached_gib(eight, four, training, 16384, allocator=everything)
    assert peak + kept == pytest.approx(53.4, rel=0.03)
    half = cached_gib(eight, four, training, 16384, allocator=replace(everything, cached=0.5))
    assert half == pytest.approx(kept / 2)


def test_fragmentation_is_a_share_of_what_moves() -> None:
    habits = Allocator(fragmentation=0.25, between_logits=0.5, cached=0.0)
    terms = update_terms(QWEN, layout(), DEEPSPEED, 16384, allocator=habits)
    assert terms["logits"] > 0
    assert terms["fragmentation"] == pytest.approx((terms["activations"] + terms["gathered"]) / 4 + terms["logits"] / 2)
    assert allocator_of(layout()) == ALONE
    assert allocator_of(layout(data_parallel_size=2)) == SHARDED
    assert ALONE.cached < SHARDED.cached
    assert (ALONE.fragmentation, ALONE.between_logits) < (SHARDED.fragmentation, SHARDED.between_logits)


@pytest.mark.parametrize(("gpus", "activations", "logits", "more"), [(1, 9.0, 31.3, 1.39), (2, 9.0, 31.3, 8.0)])
def test_gaps_between_logits(gpus: int, activations: float, logits: float, more: float) -> None:
    """Llama-3 8B with LoRA and 8 x 4096 tokens: the reading of nvidia-smi over torch's (fms-acceleration, A100)."""
    moving = {"activations": activations, "logits": logits, "gathered": 2.4 * (gpus > 1)}
    assert allocator_of(layout(data_parallel_size=gpus)).gaps(moving) == pytest.approx(more, rel=0.4)
