from collections.abc import Callable
from dataclasses import replace
from random import Random
from statistics import mean
from typing import Any

import pytest

from rlflow.resources.cluster import Gpu
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.vision import VisionTower
from rlflow.resources.time.decoder import decoder_of
from rlflow.resources.time.decoding import Generation, Requests, generation
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.passes import (
    Kernels,
    PassBatch,
    gather_seconds,
    host_seconds,
    offload_seconds,
    scoring,
    sync_seconds,
    training,
    transfer_seconds,
)
from rlflow.resources.time.speed import Efficiency, Speed, gpu_speed
from rlflow.resources.time.work import forward_work

LLAMA = Architecture(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
)
EXPERTS = replace(
    LLAMA,
    model_type="qwen3_moe",
    num_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=1024,
    num_hidden_layers=8,
)
LATENT = replace(
    EXPERTS,
    model_type="deepseek_v3",
    num_key_value_heads=32,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
)
H100 = Gpu(
    memory_gib=79.6, peak_tflops={"bfloat16": 989.4}, memory_gb_s=3350, link_gb_s=450, network_gb_s=50, source="here"
)
SPEED = gpu_speed(H100, 8, Efficiency())
LAYOUT = Layout(micro_batch_tokens=8192)
PROMPTS = Lengths((128.0,))


def generate(sequences: float, responses: Lengths, slots: int = 64, layout: Layout = LAYOUT) -> Generation:
    return generation(
        LLAMA,
        layout,
        SPEED,
        Requests(sequences=sequences, prompts=PROMPTS, responses=responses),
        kv_tokens=1e9,
        max_num_seqs=slots,
    )


def drain(lengths: list[int], slots: int, seconds: Callable[[float, float], float]) -> float:
    """Generate token by token, in jumps of at most 16."""
    waiting, active, clock = list(lengths), list[list[int]](), 0.0
    while waiting or active:
        while waiting and len(active) < slots:
            active.append([waiting.pop(), 0])
        jump = max(1, min(16, *(length - done for length, done in active), 16))
        context = PROMPTS.mean + mean(done for _, done in active) + jump / 2
        clock += jump * seconds(len(active), context)
        for one in active:
            one[1] += jump
        active = [one for one in active if one[1] < one[0]]
    return clock


# --- generating


def test_one_sequence_takes_its_tokens_times_a_step() -> None:
    decoder = decoder_of(LLAMA, 1, 1, SPEED, 2)
    made = generate(1, Lengths((512.0,)))
    assert made.seconds - made.prefill_seconds == pytest.approx(512 * decoder.seconds(1, 128 + 256), rel=1e-3)
    # The weights are read once, and the host and the launches of the layers add their times.
    read = 2 * (LLAMA.num_parameters - LLAMA.embedding_parameters) / (0.75 * 3350e9)
    assert decoder.seconds(1, 0) == pytest.approx(read + 32 * 24e-6 + 6e-3 + 10e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("active", "context", "seconds"),
    [(1, 2048, 6.24e-3), (32, 2048, 9.63e-3), (128, 2048, 18.1e-3), (256, 512, 14.9e-3), (256, 2048, 30.7e-3)],
)
def test_the_kernels_of_a_step_take_about_as_long_as_in_vllm(active: int, context: int, seconds: float) -> None:
    """The measured times are sums of vLLM's kernels for Llama 3.1 8B on an H100 (aiconfigurator-core 0.12)."""
    kernels = gpu_speed(H100, 8, Efficiency(decode_step_s=0.0, decode_sequence_s=0.0))
    assert decoder_of(LLAMA, 1, 1, kernels, 2).seconds(active, context) == pytest.approx(seconds, rel=0.12)


def test_prompts_are_read_before_power_limits_products() -> None:
    throttled = gpu_speed(replace(H100, sustained=0.5), 8, Efficiency())
    decoder = decoder_of(LLAMA, 1, 1, SPEED, 2)
    assert decoder.prefill(throttled, 8192, 8192) == pytest.approx(decoder.prefill(SPEED, 8192, 8192))


def test_experts_wait_for_each_other_only_where_they_are_spread() -> None:
    """At half the balance the products of spread experts take twice as long, and those of others as long."""
    work, even, uneven = forward_work(EXPERTS), ideal(expert_balance=1.0), ideal(expert_balance=0.5)
    dense = replace(work, expert_flops=0.0).product_seconds(even, 1e6)
    alone, spread = (work.product_seconds(uneven, 1e6, spreads_experts=spread) for spread in (False, True))
    assert alone == work.product_seconds(even, 1e6)
    assert spread - dense == pytest.approx(2 * (alone - dense))


@pytest.mark.slow
@pytest.mark.parametrize(
    "responses", [Lengths((300.0,)), Lengths.log_normal(600, 4096), Lengths.log_normal(3000, 4096)]
)
@pytest.mark.parametrize(("sequences", "slots"), [(8, 64), (64, 64), (150, 64), (512, 64)])
def test_the_drain_is_that_of_an_exact_simulation(responses: Lengths, sequences: int, slots: int) -> None:
    random, decoder = Random(sequences), decoder_of(LLAMA, 1, 1, SPEED, 2)
    exact = mean(
        drain([max(1, round(x)) for x in random.choices(responses.values, k=sequences)], slots, decoder.seconds)
        for _ in range(30 if sequences < 64 else 4)
    )
    made = generate(sequences, responses, slots)
    assert made.seconds - made.prefill_seconds == pytest.approx(exact, rel=0.09)


def test_an_engine_writes_as_fast_as_published() -> None:
    """12,500 tokens a second with vLLM, Llama-3.1-8B on one H100 with 256 sequences of a few hundred tokens."""
    made = generate(10_000, Lengths.log_normal(250, 1024), slots=256)
    assert 10_000 < made.concurrency / made.token_seconds < 17_000


def test_room_for_keys_and_values_bounds_the_batch() -> None:
    made = generation(
        LLAMA,
        LAYOUT,
        SPEED,
        Requests(sequences=100, group_size=10, prompts=PROMPTS, responses=Lengths((256.0,))),
        kv_tokens=10 * (128 + 128),
    )
    assert made.concurrency == pytest.approx(10)
    assert made.seconds > generate(100, Lengths((256.0,))).seconds


def test_the_longest_of_many_engines_is_longer() -> None:
    responses = Lengths.log_normal(200, 8192)
    alone = generate(8, responses).seconds
    among = generation(
        LLAMA,
        LAYOUT,
        SPEED,
        Requests(sequences=8, prompts=PROMPTS, responses=responses, engines=64),
        kv_tokens=1e9,
    ).seconds
    assert among > 1.5 * alone


def test_key_value_heads_are_cut_and_latents_are_copied() -> None:
    whole, cut = (decoder_of(LLAMA, width, 1, SPEED, 2).key_seconds(1000) for width in (1, 8))
    assert cut == pytest.approx(whole / 8)
    whole, copied = (decoder_of(LATENT, width, 1, SPEED, 2).key_seconds(1000) for width in (1, 8))
    assert copied == pytest.approx(whole)


def test_windowed_layers_read_no_more_than_their_window() -> None:
    windowed = replace(LLAMA, model_type="gpt_oss", num_experts=4, num_experts_per_tok=2, sliding_window=128)
    half = replace(windowed, num_full_attention_layers=16)
    far, near = (decoder_of(half, 1, 1, SPEED, 2).key_seconds(tokens) for tokens in (2000, 128))
    assert far / near == pytest.approx((2000 + 128) / 256)


def test_small_models_without_graphs_wait_for_launches() -> None:
    small = replace(LLAMA, hidden_size=1024, intermediate_size=2816, num_attention_heads=8, num_key_value_heads=8)
    graphs, eager = (decoder_of(small, 1, 1, SPEED, 2, eager=eager).seconds(1, 0) for eager in (False, True))
    assert graphs < eager == pytest.approx(32 * 0.2e-3 + 6e-3)


def test_few_tokens_touch_few_experts() -> None:
    decoder = decoder_of(EXPERTS, 1, 1, SPEED, 2)
    one, many = decoder.seconds(1, 0), decoder.seconds(64, 0)
    read = 2 * EXPERTS.num_expert_parameters / SPEED.memory
    # 4 of 64 experts for one token; of 64 tokens all but (60/64)^64 = 1.6 %.
    assert many - one == pytest.approx(read * (0.984 - 4 / 64) + 63 * 10e-6, rel=1e-2)


@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_the_gpu_with_the_most_wanted_experts_reads_most(tokens: int) -> None:
    """Each of 8 GPUs has 8 of 64 experts, and each token is sent to 4 of them at random."""
    draw, shares = Random(tokens), []
    for _ in range(2000):
        wanted = {expert for _ in range(tokens) for expert in draw.sample(range(64), 4)}
        shares.append(max(sum(expert // 8 == gpu for expert in wanted) for gpu in range(8)) / 8)
    cut, whole = (decoder_of(EXPERTS, 8, 1, SPEED, 2, whole_experts=own) for own in (False, True))
    # The formula is a bound, and not far above.
    assert 1 <= whole.read_share(tokens) / (sum(shares) / len(shares)) < 1.2
    assert whole.read_share(tokens) > cut.read_share(tokens)


def test_whole_experts_never_decode_faster() -> None:
    cut, whole = (decoder_of(EXPERTS, 8, 1, SPEED, 2, whole_experts=own) for own in (False, True))
    assert all(cut.seconds(active, 1000) < whole.seconds(active, 1000) for active in (1, 10, 100, 1000))
    assert cut.prefill(SPEED, 1e5, 1000) < whole.prefill(SPEED, 1e5, 1000)
    alone = (decoder_of(EXPERTS, 1, 1, SPEED, 2, whole_experts=own) for own in (False, True))
    assert len(set(alone)) == 1


# --- scoring and training


def ideal(**changed: float) -> Speed:
    """Return a speed at which only matrix products take time."""
    shares = {"matmul": 1.0, "attention": 1.0, "balance": 1.0, "memory": 1.0, "link": 1.0, "train_layer_s": 0.0}
    shares["small_batch_tokens"] = 0.0
    return replace(
        gpu_speed(H100, 8, Efficiency(**(shares | {"message_s": 0.0} | changed))),
        bytes=1e18,
        link=1e18,
        network=1e18,
    )


def test_a_forward_pass_is_two_operations_a_parameter_and_token() -> None:
    parameters = LLAMA.num_parameters - LLAMA.embedding_parameters
    # A query of a sequence of 1000 tokens attends to 500 keys in the mean: 4 x 500 x 4096 in each layer.
    expected = 1e6 * (2 * parameters + 32 * 4 * 500 * 4096)
    assert forward_work(LLAMA).flops(1e6, 1000) == pytest.approx(expected)
    assert scoring(LLAMA, LAYOUT, ideal(), PassBatch(tokens=1e6, length=1000)).seconds == pytest.approx(
        expected / 989.4e12, rel=1e-3
    )


def test_of_experts_only_those_that_are_taken_count() -> None:
    idle = EXPERTS.num_expert_parameters * 60 / 64
    parameters = EXPERTS.num_parameters - EXPERTS.embedding_parameters - idle
    assert forward_work(EXPERTS).flops(1, 0) == pytest.approx(2 * parameters)


@pytest.mark.parametrize(("checkpointing", "adapters", "passes"), [(0, 0, 3), (1, 0, 4), (0, 1, 2), (1, 1, 3)])
def test_an_update_takes_six_operations_a_parameter_and_token(checkpointing: int, adapters: int, passes: int) -> None:
    layout = replace(LAYOUT, gradient_checkpointing=bool(checkpointing))
    update = training(LLAMA, layout, ideal(), PassBatch(tokens=1e6, length=1), Kernels(adapters=bool(adapters))).seconds
    forward = scoring(LLAMA, layout, ideal(), PassBatch(tokens=1e6, length=1)).seconds
    assert update == pytest.approx(passes * forward, rel=1e-3)


def test_muon_multiplies_whole_matrices_on_every_rank() -> None:
    """Five steps of 4 m^2 n + 2 m^3 for each m x n matrix of a layer, with m = 4096 and n from 4096 to 14336."""
    operations = sum(
        32 * count * 5 * (4 * min(rows, 4096) ** 2 * max(rows, 4096) + 2 * min(rows, 4096) ** 3)
        for count, rows in ((2, 1024), (2, 4096), (3, 14336))
    )
    for ranks in (1, 8):
        layout, batch = replace(LAYOUT, data_parallel_size=ranks), PassBatch(tokens=1e6, length=1, minibatches=2)
        plain, more = (training(LLAMA, layout, ideal(), batch, Kernels(muon=muon)).seconds for muon in (False, True))
        assert more - plain == pytest.approx(2 * operations / 989.4e12, rel=0.15)


def test_only_matrix_products_are_cheaper_for_adapters() -> None:
    """Attention over 4096 keys on average: 4 operations for each, 4096 wide, in 32 layers, in three passes."""
    full, adapters = (
        training(LLAMA, LAYOUT, ideal(), PassBatch(tokens=1e6, length=8192), Kernels(adapters=adapters)).seconds
        for adapters in (False, True)
    )
    parameters = LLAMA.num_parameters - LLAMA.embedding_parameters
    assert full - adapters == pytest.approx(1e6 * 2 * parameters / 989.4e12, rel=1e-3)
    assert adapters == pytest.approx(1e6 * (4 * parameters + 3 * 32 * 4 * 4096 * 4096) / 989.4e12, rel=1e-3)


def test_small_micro_batches_reach_less_of_the_arithmetic() -> None:
    small, large = (
        scoring(
            LLAMA, Layout(micro_batch_tokens=tokens), ideal(small_batch_tokens=128), PassBatch(tokens=2**20, length=1)
        ).seconds
        for tokens in (256, 2**20)
    )
    assert small / large == pytest.approx(1.5, rel=1e-3)


def test_adapters_launch_more_kernels() -> None:
    # 2.3 times the 0.5 ms of a layer, forward and twice backward.
    found = training(LLAMA, LAYOUT, SPEED, PassBatch(tokens=1, length=1), Kernels(adapters=True))
    assert found.compute == pytest.approx(32 * 3 * 2.3 * 0.5e-3)


def test_a_whole_step_reaches_the_published_share_of_an_a100() -> None:
    """torchtitan, Llama 3 8B on 64 A100 with FSDP2: 56.8 to 58.2 % of the peak, without counting what is recomputed."""
    a100 = Gpu(peak_tflops={"bfloat16": 312.0}, memory_gb_s=2039, link_gb_s=300, network_gb_s=25, source="here")
    layout = replace(LAYOUT, data_parallel_size=64, zero_stage=3)
    speed = gpu_speed(a100, 8, Efficiency(balance=1))
    update = training(
        LLAMA, layout, speed, PassBatch(tokens=64 * 8192, length=8192), Kernels(fused_layers=True)
    ).seconds
    share = 3 * forward_work(LLAMA).flops(64 * 8192, 8192) / 64 / 312e12 / update
    assert 0.5 < share < 0.65


def test_a_tower_takes_its_own_operations_once_a_prompt() -> None:
    """Frozen, it computes forward alone, in an update too. Tensor-parallel engines share it."""
    figures: dict[str, Any] = {"hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14}
    tower = VisionTower(model_type="qwen2_5_vl", num_hidden_layers=32, num_attention_heads=16, **figures)
    seeing = replace(LLAMA, vision=tower)
    batch = PassBatch(tokens=1e6, length=2000)
    shown = replace(batch, image_tokens=1e5, tokens_per_image=400)
    seconds = 1e5 * tower.token_flops(4096, 400) / SPEED.matmul_of(1280)
    for predict in (scoring, training):
        added = predict(seeing, LAYOUT, SPEED, shown).seconds - predict(LLAMA, LAYOUT, SPEED, batch).seconds
        assert added == pytest.approx(seconds / SPEED.efficiency.balance, rel=1e-6)
    trained, frozen = (
        training(seeing, LAYOUT, SPEED, shown, Kernels(trains_vision=trains)).seconds for trains in (True, False)
    )
    assert trained - frozen == pytest.approx(2 * seconds / SPEED.efficiency.balance, rel=1e-6)
    requests = Requests(sequences=64, group_size=8, prompts=Lengths((500.0,)), responses=Lengths((100.0,)))
    two = replace(LAYOUT, tensor_parallel_size=2, data_parallel_size=1)
    plain, images = (
        generation(seeing, two, SPEED, replace(requests, image_tokens=tokens), kv_tokens=1e6) for tokens in (0, 400)
    )
    expected = 8 * 400 * tower.token_flops(4096, 400) / SPEED.matmul_of(1280) / 2
    assert images.seconds - plain.seconds == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_pipeline_fills_and_drains_once_a_minibatch(minibatches: int) -> None:
    layout = Layout(pipeline_parallel_size=4, micro_batch_tokens=1000)
    found = training(LLAMA, layout, ideal(), PassBatch(tokens=16_000, length=1000, minibatches=minibatches))
    assert found.seconds / found.compute == pytest.approx((16 + 3 * minibatches) / 16, rel=1e-3)


def test_a_layer_takes_its_launches_at_least() -> None:
    found = scoring(LLAMA, LAYOUT, SPEED, PassBatch(tokens=1, length=1))
    assert found.compute == pytest.approx(32 * 0.5e-3)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_more_gpus_are_never_slower(stage: int) -> None:
    seconds = [
        training(
            LLAMA,
            Layout(data_parallel_size=ranks, zero_stage=stage, micro_batch_tokens=8192),
            SPEED,
            PassBatch(tokens=4e6, length=1000),
        ).seconds
        for ranks in (1, 2, 4, 8, 16, 32, 64)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_gathers_hide_in_part_behind_large_micro_batches_only() -> None:
    sharded = Layout(data_parallel_size=16, zero_stage=3, micro_batch_tokens=32768)
    large = training(LLAMA, sharded, SPEED, PassBatch(tokens=16 * 32768 * 0.9, length=1000))
    small = training(
        LLAMA, replace(sharded, micro_batch_tokens=64), SPEED, PassBatch(tokens=16 * 64 * 0.9, length=1000)
    )
    # Weights forward and backward, and gradients, 2 bytes each, over 8 x 50 GB/s: a quarter hides, or what is computed.
    spread = 6 * LLAMA.num_parameters * 15 / 16 / (400e9 * 0.7)
    assert large.communication == pytest.approx(0.75 * spread, rel=1e-6)
    assert small.communication == pytest.approx(0.75 * spread, rel=1e-6)
    hidden = replace(SPEED, efficiency=replace(SPEED.efficiency, overlap=1.0))
    assert training(LLAMA, sharded, hidden, PassBatch(tokens=16 * 32768 * 0.9, length=1000)).communication == 0
    assert (
        training(
            LLAMA, replace(sharded, micro_batch_tokens=64), hidden, PassBatch(tokens=16 * 64, length=1)
        ).communication
        > 0
    )


def test_recomputing_gathers_again_and_a_pipeline_gathers_once() -> None:
    layout = Layout(data_parallel_size=16, zero_stage=3, micro_batch_tokens=4096, gradient_checkpointing=True)
    again = training(LLAMA, layout, SPEED, PassBatch(tokens=16 * 4096 * 0.9, length=1000))
    assert again.communication == pytest.approx(0.75 * 8 * LLAMA.num_parameters * 15 / 16 / (400e9 * 0.7))
    staged = replace(layout, pipeline_parallel_size=2)
    one, many = (
        training(LLAMA, staged, SPEED, PassBatch(tokens=16 * 4096 * count * 0.9, length=1000)) for count in (1, 9)
    )
    idle = one.compute  # a stage waits for the other once
    assert many.communication - one.communication < 8 * (one.communication - idle) / 4


def test_weights_are_gathered_through_the_hosts_links() -> None:
    inside, between = (
        gather_seconds(LLAMA, Layout(data_parallel_size=ranks, zero_stage=3, micro_batch_tokens=1), SPEED)
        for ranks in (8, 64)
    )
    assert inside == pytest.approx(2 * LLAMA.num_parameters * 7 / 8 / (450e9 * 0.7))
    assert between == pytest.approx(2 * LLAMA.num_parameters * 63 / 64 / (8 * 50e9 * 0.7))


def test_adam_on_the_host_is_slower() -> None:
    on_gpu, on_host = (
        training(
            LLAMA,
            Layout(data_parallel_size=8, zero_stage=2, offload=offload, micro_batch_tokens=8192),
            SPEED,
            PassBatch(tokens=8, length=1),
        ).compute
        for offload in (None, "optimizer")
    )
    # A host updates 8e9 parameters a second; each of its GPUs sends 2 bytes and takes 2 for its eighth.
    assert on_host - on_gpu == pytest.approx(LLAMA.num_parameters / 8 * (1e-9 + 4 / 20e9 - 30 / (0.75 * 3350e9)))


def test_sharing_tensors_and_experts_costs_messages() -> None:
    alone = scoring(EXPERTS, replace(LAYOUT, data_parallel_size=8), SPEED, PassBatch(tokens=1e6, length=1000))
    spread = replace(LAYOUT, data_parallel_size=8, expert_parallel_size=8)
    assert scoring(EXPERTS, spread, SPEED, PassBatch(tokens=1e6, length=1000)).seconds > alone.seconds
    far = replace(spread, data_parallel_size=16, expert_parallel_size=16)
    assert scoring(EXPERTS, far, SPEED, PassBatch(tokens=2e6, length=1000)).seconds > alone.seconds
    wide = replace(LAYOUT, micro_batch_tokens=65536)
    for layout in (replace(wide, tensor_parallel_size=8), replace(wide, sequence_parallel_size=8)):
        found = scoring(LLAMA, layout, SPEED, PassBatch(tokens=1e6, length=1000))
        assert 0 < found.communication < found.compute


def test_attention_that_keeps_its_matrix_moves_it() -> None:
    flash, whole = (
        scoring(LLAMA, LAYOUT, SPEED, PassBatch(tokens=1e6, length=2048), Kernels(flash=flash)).seconds
        for flash in (True, False)
    )
    # 16 bytes for each of 32 layers, 32 heads and 2048 keys; and twice the operations.
    moved = 16 * 32 * 32 * 2048 / SPEED.memory
    more = 32 * 4 * 1024 * 4096 / 0.7 / SPEED.matmul
    assert whole - flash == pytest.approx(1e6 / 0.9 * (moved + more), rel=1e-3)


# --- what lies between


def test_every_target_sees_all_weights_by_its_own_share_of_the_network() -> None:
    assert sync_seconds(16e9, 8, 8, SPEED, same_gpus=True) == pytest.approx(1 + 16e9 / (450e9 * 0.7))
    assert sync_seconds(16e9, 8, 8, SPEED, same_gpus=False) == pytest.approx(1 + 16e9 / (50e9 * 0.7))
    assert sync_seconds(1, 8, 8, SPEED, same_gpus=True, tensors=10_000) == pytest.approx(1 + 7)


def test_moving_samples_and_states() -> None:
    # 176 MB in packed arrays took 0.10 to 0.13 s.
    inside = transfer_seconds(176e6, 1, 1, SPEED, crosses=False, same_hosts=True)
    assert inside == pytest.approx(0.12, abs=0.02)
    # Each of two hosts sends 0.75 of 3 GB to the other, and copies 1.5 in and out.
    assert transfer_seconds(3e9, 2, 2, SPEED, crosses=True, same_hosts=True) == pytest.approx(0.005 + 1 + 0.5)
    # To one other host all of it goes through one link.
    assert transfer_seconds(3e9, 2, 1, SPEED, crosses=True, same_hosts=False) == pytest.approx(0.005 + 2 + 2)
    slow = replace(SPEED, network=0.1e9)
    assert transfer_seconds(3e9, 1, 1, slow, crosses=True, same_hosts=False) > 3e9 / 0.8e9
    assert offload_seconds(20e9) == pytest.approx(1)
    # Measured: 0.08 s for 1,024 responses of 4 tokens, and in NeMo-RL 4 s for 2,048 of 3,200.
    assert host_seconds(1024, 4) - host_seconds(0, 4) == pytest.approx(0.08, rel=0.1)
    assert host_seconds(2048, 3200) == pytest.approx(4.1, rel=0.1)
