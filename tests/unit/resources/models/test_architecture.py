from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlflow.errors import RecipeError
from rlflow.resources.models.architecture import Architecture, check
from rlflow.schema import parse
from tests.conftest import ROOT
from tests.helpers import ARCHITECTURE

CARDS = sorted((ROOT / "conf" / "model").glob("*.yaml"))
# All cards, for tests that are run with each of them: `make check` takes these few and `make test` all.
FEW = {"gemma2_2b", "llama3_1_8b", "qwen2_5_7b", "qwen3_30b_a3b"}
SETS_OF_CARDS = pytest.mark.parametrize(
    "cards",
    [
        pytest.param([path for path in CARDS if path.stem in FEW], id="few"),
        pytest.param([path for path in CARDS if path.stem not in FEW], marks=pytest.mark.slow, id="others"),
    ],
)
# Sources: the counts of the weights on the models' pages on the hub; for OpenAI's and DeepSeek's, of which the weights
# are quantized there or hold more than the model, the developers' own.
PUBLISHED = {
    "codellama_34b": 33_743_970_304,
    "deepseek_r1_distill_qwen_1_5b": 1_777_088_000,
    "deepseek_v3": 671_026_419_200,
    "gemma2_27b": 27_227_128_320,
    "gemma2_2b": 2_614_341_888,
    "gemma2_9b": 9_241_705_984,
    "gemma3_1b": 999_885_952,
    "glm4_9b_0414": 9_400_279_040,
    "granite_4_0_h_micro": 3_191_396_096,
    "gpt_oss_20b": 20_914_757_184,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama2_7b": 6_738_415_616,
    "llama3_1_405b": 405_853_388_800,
    "llama3_1_70b": 70_553_706_496,
    "llama3_1_8b": 8_030_261_248,
    "llama3_2_1b": 1_235_814_400,
    "lfm2_1_2b": 1_170_340_608,
    "llama3_2_3b": 3_212_749_824,
    "mistral_7b": 7_241_732_096,
    "mistral_nemo_12b": 12_247_782_400,
    "mixtral_8x22b": 140_630_071_296,
    "mixtral_8x7b": 46_702_792_704,
    "nemotron_nano_12b_v2": 12_310_001_152,
    "nemotron_nano_9b_v2": 8_888_227_328,
    "opt_6_7b": 6_658_473_984,
    "phi3_mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "qwen1_5_moe_a2_7b": 14_315_784_192,
    "qwen2_5_0_5b": 494_032_768,
    "qwen2_5_14b": 14_770_033_664,
    "qwen2_5_1_5b": 1_543_714_304,
    "qwen2_5_32b": 32_763_876_352,
    "qwen2_5_3b": 3_085_938_688,
    "qwen2_5_72b": 72_706_203_648,
    "qwen2_5_7b": 7_615_616_512,
    "qwen3_14b": 14_768_307_200,
    "qwen3_235b_a22b": 235_093_634_560,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_32b": 32_762_123_264,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
}


def card(path: Path) -> Architecture:
    mapping: Any = OmegaConf.to_container(OmegaConf.load(path))
    return parse(Architecture, mapping["architecture"], "architecture")


def named(name: str) -> Architecture:
    return card(ROOT / "conf" / "model" / f"{name}.yaml")


def config_fields(of: Architecture) -> dict[str, Any]:
    """Return the figures under the names in the ``config.json`` of the model type."""
    figures = {name: value for name, value in asdict(of).items() if value is not None}
    theta, full = figures.pop("rope_theta"), figures.pop("num_full_attention_layers")
    shared, dense = figures.pop("shared_expert_intermediate_size"), figures.pop("num_dense_layers")
    alone, recurrent = figures.pop("num_mlp_layers"), figures.pop("recurrent", None)
    if recurrent is not None:
        figures |= {"layer_types": _layer_types(of)} | _recurrence_fields(of.model_type, recurrent)
    figures["sliding_window"] = of.sliding_window
    figures.pop("vision", None)
    figures["pad_token_id"] = 0  # the classes' own are beyond small vocabularies
    if of.model_type == "opt":
        return figures | {"ffn_dim": figures.pop("intermediate_size")}
    figures["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
    if of.model_type == "gemma3_text":
        figures["rope_parameters"] = dict.fromkeys(("full_attention", "sliding_attention"), figures["rope_parameters"])
    if of.model_type == "deepseek_v3":
        del figures["head_dim"]
        figures |= {"n_routed_experts": figures.pop("num_experts"), "first_k_dense_replace": dense}
        figures |= {"n_shared_experts": shared // figures["moe_intermediate_size"], "q_lora_rank": of.q_lora_rank}
    if of.model_type in ("mixtral", "gpt_oss"):
        figures["num_local_experts"] = figures.pop("num_experts")
    if of.model_type == "granitemoehybrid":
        width = shared or figures.pop("intermediate_size")
        figures |= {"num_local_experts": figures.pop("num_experts", 0), "shared_intermediate_size": width}
    if of.model_type == "nemotron_h":
        experts = "moe" if of.num_experts else "mlp"
        figures["layers_block_type"] = figures.pop("layer_types") + alone * [experts]
        figures |= {"n_routed_experts": figures.pop("num_experts", 8), "moe_shared_expert_intermediate_size": shared}
    if of.model_type == "gemma4_text":
        every = of.num_hidden_layers // full
        figures["layer_types"] = full * [*(every - 1) * ["sliding_attention"], "full_attention"]
        figures |= {"enable_moe_block": bool(of.num_experts), "top_k_experts": of.num_experts_per_tok}
        del figures["rope_parameters"]
    if of.model_type in ("qwen3_next", "qwen3_5_moe_text"):
        figures["shared_expert_intermediate_size"] = shared
    if of.model_type in ("lfm2", "lfm2_moe"):
        figures |= {"num_dense_layers": dense, "block_auto_adjust_ff_dim": False}
    if of.model_type == "qwen2_moe":
        figures["shared_expert_intermediate_size"] = shared
    if of.model_type in ("gemma2", "gemma3_text", "gpt_oss"):
        figures["layer_types"] = full * ["full_attention"] + (of.num_hidden_layers - full) * ["sliding_attention"]
    return figures


def _layer_types(of: Architecture) -> list[str]:
    """Return the types of layers, recurrent ones first, whatever their order in the model."""
    name = "conv" if of.model_type.startswith("lfm2") else "linear_attention"
    return of.num_recurrent_layers * [name] + of.num_attention_layers * ["full_attention"]


def _recurrence_fields(model_type: str, recurrent: dict[str, Any]) -> dict[str, Any]:
    heads, size, kernel = recurrent["num_heads"], recurrent["head_dim"], recurrent["conv_kernel"]
    groups, state = recurrent["num_key_heads"], recurrent["key_head_dim"]
    if model_type.startswith("lfm2"):
        return {"conv_L_cache": kernel}
    if model_type == "nemotron_h":
        named = {"mamba_num_heads": heads, "mamba_head_dim": size, "ssm_state_size": state}
        return named | {"n_groups": groups, "conv_kernel": kernel}
    if model_type == "granitemoehybrid":
        named = {"mamba_n_heads": heads, "mamba_d_head": size, "mamba_d_state": state}
        return named | {"mamba_n_groups": groups, "mamba_d_conv": kernel}
    named = {"linear_num_value_heads": heads, "linear_value_head_dim": size, "linear_num_key_heads": groups}
    return named | {"linear_key_head_dim": state, "linear_conv_kernel_dim": kernel}


def weights(of: Architecture) -> dict[str, int]:
    """Return the sizes of transformers' modules by name, with buffers that are saved, and tied ones once."""
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_fields(of)))
    first: dict[int, tuple[str, int]] = {}
    for name, weight in built.state_dict(keep_vars=True).items():
        first.setdefault(id(weight), (name, weight.numel()))
    return dict(first.values())


def test_there_are_cards() -> None:
    assert len(CARDS) >= 30
    assert {path.stem for path in CARDS} >= FEW
    assert set(PUBLISHED) <= {path.stem for path in CARDS}


@SETS_OF_CARDS
def test_sizes_of_a_card_are_those_of_the_modules(cards: list[Path], subtests: pytest.Subtests) -> None:
    for path in cards:
        with subtests.test(path.stem):
            of = card(path)
            check(of, "architecture")
            sizes = weights(of).values()
            assert of.num_parameters == sum(sizes)
            assert of.largest_tensor == max(sizes)
            assert of.largest_module >= of.largest_tensor


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_parameters_are_those_of_the_modules(model_type: str) -> None:
    of = replace(ARCHITECTURE, model_type=model_type)  # type: ignore[arg-type]
    assert of.num_parameters == sum(weights(of).values())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "deepseek_v3",
        "gemma2_2b",
        "gemma3_1b",
        "glm4_9b_0414",
        "gpt_oss_20b",
        "llama3_2_1b",
        "qwen3_0_6b",
        "qwen3_30b_a3b",
    ],
)
def test_attention_biases_are_those_of_the_modules(name: str, bias: bool) -> None:
    of = replace(named(name), num_hidden_layers=4, num_full_attention_layers=0, vocab_size=128, attention_bias=bias)
    assert of.num_parameters == sum(weights(of).values())


def test_parameters_are_those_of_the_published_weights() -> None:
    assert {name: named(name).num_parameters for name in PUBLISHED} == PUBLISHED


# Billions of parameters, all and active, that the developers state for the text model.
STATED = {
    "gemma4_26b_a4b": (25.2, 3.8),
    "gemma4_31b": (30.7, 30.7),
    "lfm2_8b_a1b": (8.3, 1.5),
    "granite_4_0_h_small": (32, 9),
    "nemotron_3_nano_30b_a3b": (31.6, 3.6),
    "nemotron_3_super_120b_a12b": (120.6, 12.7),
    "olmo_hybrid_7b": (7.4, 7.4),
    "qwen3_5_122b_a10b": (122, 10),
    "qwen3_5_27b": (27, 27),
    "qwen3_5_35b_a3b": (35, 3.3),
    "qwen3_5_397b_a17b": (397, 17),
    "qwen3_5_9b": (9, 9),
    "qwen3_next_80b_a3b": (80, 3.9),
}


def test_parameters_of_hybrids_are_about_those_that_developers_state() -> None:
    sizes = {name: (named(name).num_parameters / 1e9, named(name).num_active_parameters / 1e9) for name in STATED}
    assert {name: size for name, (size, _) in sizes.items()} == {
        name: pytest.approx(size, rel=0.015) for name, (size, _) in STATED.items()
    }
    assert {name: active for name, (_, active) in sizes.items()} == {
        name: pytest.approx(active, rel=0.05) for name, (_, active) in STATED.items()
    }


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("deepseek_v3", 37_552_297_472),
        ("gpt_oss_20b", 4_187_440_704),
        ("mixtral_8x7b", 12_879_925_248),
        ("moonlight_16b_a3b", 2_914_776_192),
        ("qwen1_5_moe_a2_7b", 2_689_173_504),
        ("qwen3_235b_a22b", 22_190_763_520),
        ("qwen3_30b_a3b", 3_353_032_704),
    ],
)
def test_active_parameters_leave_out_the_experts_that_a_token_does_not_take(name: str, active: int) -> None:
    of = named(name)
    routed = sum(size for weight, size in weights(of).items() if ".experts." in weight)
    assert of.num_expert_parameters == routed
    assert of.num_experts is not None
    assert of.num_experts_per_tok is not None
    assert of.num_active_parameters == of.num_parameters - routed + routed * of.num_experts_per_tok // of.num_experts
    assert of.num_active_parameters == active


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2_9b", "llama3_2_1b", "opt_1_3b", "qwen2_5_7b"])
def test_parts_are_those_of_the_modules(name: str) -> None:
    of = named(name)
    built = weights(of)
    last = f".layers.{of.num_hidden_layers - 1}."
    largest_layer = max(kind.parameters for kind in of.layer_kinds)
    assert largest_layer == sum(size for weight, size in built.items() if last in weight)
    assert of.embedding_parameters == sum(size for weight, size in built.items() if ".embed_" in weight)
    assert of.head_parameters == built.get("lm_head.weight", 0)
    assert (of.num_active_parameters == of.num_parameters) is (of.num_experts is None)


def test_widths() -> None:
    qwen, deepseek, mixtral = named("qwen2_5_7b"), named("deepseek_v3"), named("mixtral_8x7b")
    assert (qwen.query_width, qwen.key_value_width, qwen.output_width, qwen.mlp_width) == (3584, 1024, 3584, 18944)
    assert (deepseek.query_width, deepseek.output_width) == (128 * 192, 128 * 128)
    assert deepseek.key_value_width == 128 * (192 + 128)
    assert deepseek.mlp_width == 18432 == 8 * 2048 + 2048
    assert mixtral.mlp_width == 2 * 14336
    assert named("qwen3_30b_a3b").mlp_width == 8 * 768


def test_cached_values() -> None:
    qwen, deepseek, gemma = named("qwen2_5_7b"), named("deepseek_v3"), named("gemma3_27b")
    assert qwen.kv_values_per_token == 2 * 4 * 128 * 28
    assert qwen.kv_values(1000.0) == 1000 * qwen.kv_values_per_token
    assert deepseek.kv_values_per_token == (512 + 64) * 61
    assert gemma.kv_values(1024.0) == 1024 * gemma.kv_values_per_token
    # Ten layers keep all tokens, 52 the last 1024.
    assert gemma.kv_values(8192.0) == 2 * 16 * 128 * (10 * 8192 + 52 * 1024)


def test_attention_span_is_the_mean_over_queries_and_layers() -> None:
    assert named("qwen2_5_7b").attention_span(1000.0) == 500
    gemma, tokens, window = named("gemma2_9b"), 10_000, 4096
    assert gemma.attention_span(4096.0) == 2048
    windowed = sum(min(query + 0.5, window) for query in range(tokens)) / tokens
    assert gemma.attention_span(float(tokens)) == pytest.approx((tokens / 2 + windowed) / 2, rel=1e-6)
    # All layers of Mistral's first have the window.
    assert named("mistral_7b").attention_span(1e9) == pytest.approx(4096, rel=1e-3)


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"model_type": "mixtral"}, "m.num_experts: is missing for mixtral.\n  Fix: add m.num_experts=..."),
        (
            {"model_type": "mixtral", "num_experts": 4, "num_experts_per_tok": 8},
            "m.num_experts_per_tok: 8 is more than the 4 of num_experts",
        ),
        ({"model_type": "deepseek_v3", "num_experts": 4, "num_experts_per_tok": 2}, "m.kv_lora_rank: is missing"),
        ({"num_key_value_heads": 8}, "m.num_key_value_heads: does not divide num_attention_heads"),
        ({"sliding_window": 8, "num_full_attention_layers": 3}, "m.num_full_attention_layers: 3 is more than the 2"),
    ],
)
def test_figures_that_do_not_go_together(figures: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        check(replace(ARCHITECTURE, **figures), "m")
    assert str(raised.value).startswith(message)
