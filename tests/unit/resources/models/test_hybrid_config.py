"""Models of which some layers have a state of constant size in place of a KV cache."""

from dataclasses import replace
from typing import Any

import pytest

from rlflow.errors import RecipeError
from rlflow.resources.layout import GIB, Layout
from rlflow.resources.memory.activations import layer_activations
from rlflow.resources.memory.phases import generate_memory, update_terms
from rlflow.resources.memory.state import TrainingMemory, state_terms
from rlflow.resources.models.architecture import Architecture, check
from rlflow.resources.models.config import architecture_from_config
from rlflow.resources.models.lora import Lora, adapter_parameters
from rlflow.resources.time.decoding import Requests, generation
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Efficiency, gpu_speed
from rlflow.resources.time.work import forward_work
from tests.unit.resources.models.test_architecture import named
from tests.unit.resources.planner.planning import H100

NANO = named("nemotron_3_nano_30b_a3b")
QWEN = named("qwen3_5_35b_a3b")
GEMMA = named("gemma4_e4b")

# Files of the hub, without keys that the figures do not depend on.
NANO_FILE = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 131072,
    "max_position_embeddings": 262144,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "use_conv_bias": True,
}
QWEN_TEXT = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "full_attention_interval": 4,
    "num_hidden_layers": 40,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 248320,
    "max_position_embeddings": 262144,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "rope_parameters": {"rope_theta": 10000000},
}
GEMMA_TEXT = {
    "model_type": "gemma4_text",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": None,
    "head_dim": 256,
    "global_head_dim": 512,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "num_kv_shared_layers": 18,
    "sliding_window": 512,
    "layer_types": 7 * [*(5 * ["sliding_attention"]), "full_attention"],
    "attention_k_eq_v": False,
    "enable_moe_block": False,
}


@pytest.mark.parametrize(
    ("file", "model"),
    [
        (NANO_FILE, NANO),
        ({"model_type": "qwen3_5_moe", "text_config": QWEN_TEXT, "vision_config": {"depth": 27}}, QWEN),
        ({"model_type": "gemma4", "text_config": GEMMA_TEXT}, GEMMA),
    ],
)
def test_figures_of_a_file_on_the_hub(file: dict[str, Any], model: Architecture) -> None:
    assert replace(architecture_from_config(file, "m"), rope_theta=1.0) == replace(model, rope_theta=1.0)


def test_unknown_kinds_of_layers_are_named() -> None:
    with pytest.raises(RecipeError, match="layers of rwkv are not known to the planner"):
        architecture_from_config(QWEN_TEXT | {"layer_types": 40 * ["rwkv"]}, "m")
    alone = replace(NANO, num_mlp_layers=29)
    with pytest.raises(RecipeError, match="expected at least one layer with attention"):
        check(alone, "m")


def test_kinds_of_layers() -> None:
    counts = {(bool(kind.queries), bool(kind.recurrent), kind.sparse): kind.count for kind in NANO.layer_kinds}
    assert counts == {(True, False, False): 6, (False, True, False): 23, (False, False, True): 23}
    counts = {(bool(kind.queries), bool(kind.recurrent), kind.sparse): kind.count for kind in QWEN.layer_kinds}
    assert counts == {(True, False, True): 10, (False, True, True): 30}


def test_only_attention_caches_tokens_and_states_do_not_grow() -> None:
    assert NANO.kv_values_per_token == 6 * 2 * 2 * 128
    assert NANO.recurrent is not None
    # The convolution's inputs in bf16, and a matrix of 64 x 128 in fp32 for each of 64 heads, in 23 layers.
    assert NANO.recurrent.state_bytes == 23 * 6144 * 3 * 2 + 23 * 64 * 64 * 128 * 4
    assert NANO.state_tokens(1) == pytest.approx(NANO.recurrent.state_bytes / (2 * 3072))
    # On four GPUs two key-value heads are copied twice, so that a token takes half of what it takes on one.
    assert NANO.state_tokens(4) == pytest.approx(NANO.state_tokens(1) / 2)
    assert named("qwen3_8b").state_tokens(2) == 0


def test_gemma_4_caches_layers_of_their_own() -> None:
    """The last 18 of 42 layers share: 20 of 35 with a window have a cache, and 4 of 7 without one."""
    assert GEMMA.kv_values(100.0) == 100 * (20 * 2 * 2 * 256 + 4 * 2 * 2 * 512)
    assert GEMMA.kv_values(1000.0) == 20 * 512 * 2 * 2 * 256 + 4 * 1000 * 2 * 2 * 512


def test_activations_of_a_recurrent_layer() -> None:
    """Counted by hand for Qwen3.5's gated delta rule, fused: 16 key heads of 128, 32 heads of values of 128."""
    kind = next(kind for kind in QWEN.layer_kinds if kind.recurrent)
    projected = 2 * 2048 + 2 * 4096
    convolved = 2 * 4096 + 4096  # keys and queries repeated for 32 heads, and values
    mlp = 6 * (8 * 512 + 512)
    assert layer_activations(QWEN, kind, fused=True).split == 2 * (projected + convolved + 2 * 4096) + mlp


def test_layers_without_recomputation_keep_what_their_kinds_need() -> None:
    training = TrainingMemory(fused_layers=True)
    layout = Layout(zero_stage=0, offload="none", micro_batch_tokens=4096, gradient_checkpointing=False)
    saved = sum(
        kind.count * (bytes_.whole + bytes_.split)
        for kind in NANO.layer_kinds
        for bytes_ in [layer_activations(NANO, kind, fused=True)]
    )
    terms = update_terms(NANO, layout, training, 4096)
    # At the loss, the input of the last norm is there besides.
    assert terms["activations"] == pytest.approx(4096 * (saved + 8 * 2688) / GIB, rel=1e-6)


def test_adapters_of_recurrent_layers() -> None:
    model = named("nemotron_nano_9b_v2")
    mamba = (4480 + 2 * 10240 + 2 * 1024) + (10240 + 4480)
    attention = 2 * (4480 + 40 * 128) + 2 * (4480 + 8 * 128)
    mlp = 2 * (4480 + 15680)
    assert adapter_parameters(model, Lora(rank=1)) == 27 * mamba + 4 * attention + 25 * mlp


def test_recurrences_cost_the_same_for_every_length() -> None:
    work = forward_work(QWEN)
    grown = work.flops(1.0, 32768.0) - work.flops(1.0, 16384.0)
    # Ten layers with attention, 16 heads of 256 for queries and as many for the output.
    assert grown == pytest.approx(2 * 10 * 2 * 16 * 256 * (32768 - 16384) / 2)
    without = replace(QWEN, recurrent=None, model_type="qwen3_moe")
    assert forward_work(without).key_flops == 4 * work.key_flops


def test_states_limit_the_sequences_of_an_engine() -> None:
    """Room for 100,000 tokens holds the states and 1,024 tokens of a few sequences."""
    lengths = Lengths((1024.0,))
    made = generation(
        NANO,
        Layout(micro_batch_tokens=1),
        gpu_speed(H100, 8, Efficiency()),
        Requests(sequences=64, prompts=Lengths((1.0,)), responses=lengths),
        kv_tokens=100_000,
    )
    assert made.concurrency == pytest.approx(100_000 / (1 + lengths.residual + NANO.state_tokens(1)))


def test_embeddings_of_each_layer_stay_for_the_backward_pass() -> None:
    """Gemma 4 E4B has 42 times 256 values for a token: 12 bytes of each, whether layers are recomputed or not."""
    layout = Layout(zero_stage=0, offload="none", micro_batch_tokens=4096, gradient_checkpointing=True)
    without = replace(GEMMA, hidden_size_per_layer_input=0)
    with_them, alone = (
        update_terms(model, layout, TrainingMemory(fused_loss=True), 4096)["activations"] for model in (GEMMA, without)
    )
    assert with_them - alone == pytest.approx(4096 * 12 * 42 * 256 / GIB, rel=1e-3)
    # Two projections in each layer and one for all.
    rank_1 = Lora(rank=1)
    more = 42 * 2 * (2560 + 256) + 2560 + 42 * 256
    assert adapter_parameters(GEMMA, rank_1) - adapter_parameters(without, rank_1) == more


def test_encoders_are_frozen_and_whole_on_each_tensor_parallel_rank() -> None:
    text = named("qwen2_5_7b")
    sees = replace(text, encoder_parameters=676_000_000)
    layout = Layout(tensor_parallel_size=2, zero_stage=1, offload="none", micro_batch_tokens=1)
    terms, without = (state_terms(model, layout, TrainingMemory()) for model in (sees, text))
    assert terms["weights"] - without["weights"] == pytest.approx(2 * 676e6 / GIB)
    assert (terms["gradients"], terms["optimizer"]) == (without["gradients"], without["optimizer"])
    sharded = Layout(data_parallel_size=4, zero_stage=3, offload="none", micro_batch_tokens=1)
    spread = [state_terms(model, sharded, TrainingMemory())["weights"] for model in (sees, text)]
    assert spread[0] - spread[1] == pytest.approx(2 * 676e6 / 4 / GIB)
    engines = [generate_memory(model, layout, 80).terms["weights"] for model in (sees, text)]
    assert engines[0] - engines[1] == pytest.approx(2 * 676e6 / GIB)


@pytest.mark.parametrize(
    ("stage", "bytes_"), [(0, (2, 2, 4)), (1, (2, 2, 1)), (2, (2, 0.5, 1)), (3, (0.5, 0.5, 1))], ids=str
)
def test_ends_that_are_trained_beside_adapters_have_copies(stage: int, bytes_: tuple[float, ...]) -> None:
    """Weights, gradients and Adam's moments in bf16 for the embeddings and the head of Qwen2.5 7B, on four ranks."""
    layout = Layout(zero_stage=stage, offload="none", micro_batch_tokens=1, data_parallel_size=4)
    text = named("qwen2_5_7b")
    adapters = TrainingMemory(weights=2, gradients=2, optimizer=4, lora=Lora(rank=8))
    plain, trained = (state_terms(text, layout, replace(adapters, trains_ends=ends)) for ends in (False, True))
    ends = 2 * 152064 * 3584 / GIB
    expected = {name: size * ends for name, size in zip(("weights", "gradients", "optimizer"), bytes_, strict=True)}
    assert {name: trained[name] - plain[name] for name in plain} == pytest.approx(expected)


def test_layers_that_share_a_checkpoint() -> None:
    """Two layers at a time keep half of the inputs, and are recomputed together."""
    layout = Layout(zero_stage=0, offload="none", micro_batch_tokens=4096, gradient_checkpointing=True)
    llama = named("llama2_7b")
    one = TrainingMemory(fused_loss=True, logits=0)
    kept = [
        update_terms(llama, layout, replace(one, layers_per_checkpoint=count), 4096)["activations"] for count in (1, 2)
    ]
    bytes_ = layer_activations(llama, llama.layer_kinds[0], fused=False)
    layer = bytes_.whole + bytes_.split + 2 * 11008
    assert kept[1] - kept[0] == pytest.approx(4096 * (layer - 32 * 4096) / GIB)


def test_a_width_that_the_class_rounds() -> None:
    """LFM2's file has 12288 for the MLP, of which its class takes two thirds."""
    file = {
        "model_type": "lfm2",
        "hidden_size": 2048,
        "block_ff_dim": 12288,
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "intermediate_size": 12288,
        "max_position_embeddings": 128000,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rope_theta": 1000000.0,
        "vocab_size": 65536,
    }
    assert architecture_from_config(file, "m") == named("lfm2_1_2b")
