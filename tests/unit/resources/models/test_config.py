import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rlflow
from rlflow.errors import RecipeError
from rlflow.resources.models.config import architecture_from_config, find_config, read_architecture
from tests.conftest import CONFIG_DIR
from tests.unit.resources.models.test_architecture import SETS_OF_CARDS, card, config_fields, named

# Files from the hub: that of Qwen2.5 has only the keys that matter, and that of Gemma 3 those that its class lacks.
QWEN: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 152064,
}
GEMMA = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "vocab_size": 32000,
}
EXPERTS = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 64}
OPT = {
    "model_type": "opt",
    "ffn_dim": 8192,
    "hidden_size": 2048,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "vocab_size": 50272,
    "word_embed_proj_dim": 2048,
}


@pytest.mark.parametrize(
    ("config", "name"), [(QWEN, "qwen2_5_7b"), (GEMMA, "gemma3_4b"), (MIXTRAL, "mixtral_8x7b"), (OPT, "opt_1_3b")]
)
def test_figures_of_a_file_on_the_hub(config: dict[str, Any], name: str) -> None:
    assert architecture_from_config(config, "m") == named(name)


@SETS_OF_CARDS
def test_figures_of_a_card_come_back_from_the_file_that_transformers_writes(
    cards: list[Path], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    transformers = pytest.importorskip("transformers")
    for path in cards:
        with subtests.test(path.stem):
            of = card(path)
            transformers.AutoConfig.for_model(**config_fields(of)).save_pretrained(tmp_path)
            assert read_architecture(str(tmp_path), "m") == replace(of, vision=None)


def test_a_model_that_sees_has_the_figures_of_its_text() -> None:
    seeing = {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "patch_size": 14}
    figures = QWEN | {"model_type": "qwen2_5_vl", "vision_config": seeing}
    assert architecture_from_config(figures, "m") == replace(named("qwen2_5_7b"), vision=named("qwen2_5_vl_7b").vision)
    del seeing["intermediate_size"]
    with pytest.raises(RecipeError, match=r"^m\.vision\.intermediate_size: is missing"):
        architecture_from_config(figures, "m")
    nested = {"model_type": "qwen2_5_vl", "tie_word_embeddings": True, "text_config": dict(QWEN)}
    del nested["text_config"]["tie_word_embeddings"]  # type: ignore[attr-defined]
    assert architecture_from_config(nested, "m") == replace(named("qwen2_5_7b"), tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("changes", "windowed", "span"),
    [
        ({"use_sliding_window": True, "max_window_layers": 21, "sliding_window": 100}, 7, (21 * 500 + 7 * 95) / 28),
        ({"use_sliding_window": True, "max_window_layers": 28, "sliding_window": 100}, 0, 500),
        ({"sliding_window": 100}, 0, 500),
        ({"model_type": "mistral", "sliding_window": 100}, 28, 95),
        ({"model_type": "mistral", "sliding_window": None}, 0, 500),
        ({"model_type": "gemma2", "sliding_window": 100}, 14, (500 + 95) / 2),
        ({"model_type": "gemma3_text", "sliding_window": 100, "sliding_window_pattern": 4}, 21, (500 + 3 * 95) / 4),
        ({"model_type": "llama", "sliding_window": 100}, 0, 500),
    ],
)
def test_windows(changes: dict[str, Any], windowed: int, span: float) -> None:
    of = architecture_from_config(QWEN | {"num_attention_heads": 28, "head_dim": 128} | changes, "m")
    assert of.num_windowed_layers == windowed
    assert of.attention_span(1000.0) == pytest.approx(span)


def test_layers_without_experts() -> None:
    figures = QWEN | {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 64,
    }
    assert architecture_from_config(figures, "m").num_dense_layers == 0
    assert architecture_from_config(figures | {"decoder_sparse_step": 2}, "m").num_dense_layers == 14
    assert architecture_from_config(figures | {"mlp_only_layers": [0, 5]}, "m").num_dense_layers == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "qwen4"},
            "m.path: the planner does not know models of type 'qwen4'.\n  Known: deepseek_v3, gemma2,",
        ),
        ({"model_type": None}, "m.path: the planner does not know models of type 'None'"),
        ({"hidden_size": 0}, "m.path: the model's config.json has hidden_size 0, not a number from 1"),
        ({"num_hidden_layers": -1}, "m.path: the model's config.json has num_hidden_layers -1, not a number from 1"),
        ({"vocab_size": "many"}, "m.path: the model's config.json has vocab_size 'many', not a number from 1"),
        ({"num_attention_heads": True}, "m.path: the model's config.json has num_attention_heads True, not a number"),
        ({"num_key_value_heads": 0}, "m.path: the model's config.json has num_key_value_heads 0, not a number from 1"),
        ({"intermediate_size": None}, "m.path: the model's config.json does not say intermediate_size"),
        ({"num_attention_heads": 30}, "m.path: hidden_size 3584 is not a multiple of 30 heads"),
        ({"num_key_value_heads": 56}, "m.path.num_key_value_heads: does not divide num_attention_heads"),
        ({"model_type": "mixtral"}, "m.path: the model's config.json does not say num_experts"),
        ({"model_type": "llama", "mlp_bias": True}, "m.path: a model with mlp_bias True is not known to the planner"),
        ({"rope_theta": -1}, "m.path.rope_theta: -1 is not valid"),
        ({"rope_theta": "x", "rope_parameters": "y"}, "m.path.rope_theta: 'x' is not valid"),
        ({"tie_word_embeddings": 2}, "m.path.tie_word_embeddings: 2 is not valid"),
        (
            {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 0},
            "m.path: the model's config.json has sliding_window_pattern 0",
        ),
        (
            {"model_type": "mixtral", "num_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": -1},
            "m.path.num_dense_layers: -1 is not valid",
        ),
        ({"use_sliding_window": True, "sliding_window": -4}, "m.path: the model's config.json has sliding_window -4"),
        (
            {"use_sliding_window": True, "layer_types": ["linear_attention"] * 28},
            "m.path: layers of linear_attention are not known to the planner",
        ),
        ({"num_hidden_layers": 2_000_000_000}, "m.path: the model's config.json has num_hidden_layers 2000000000, not"),
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 2_000_000_000},
            "m.path: the model's config.json has num_hidden_layers 2000000000, not a number from 1 to 10000",
        ),
        *(
            ({**EXPERTS, "mlp_only_layers": layers}, "m.path: the model's config.json has mlp_only_layers that are not")
            for layers in (5, [[1]], "0", {"0": 1})
        ),
        ({**EXPERTS, "decoder_sparse_step": 0}, "m.path: the model's config.json has decoder_sparse_step 0, not"),
        ({"model_type": "qwen3_next", "full_attention_interval": 0}, "m.path: the model's config.json has a value of"),
        ({"model_type": "lfm2", "full_attn_idxs": 5}, "m.path: the model's config.json has a value of another type"),
        ({"model_type": "x" * 10**6}, f"m.path: the planner does not know models of type '{'x' * 200}'"),
        ({"vocab_size": "x" * 10**6}, f"m.path: the model's config.json has vocab_size '{'x' * 199}, not a number"),
        ({"model_type": "\x1b[2J\x07"}, "m.path: the planner does not know models of type '\\x1b[2J\\x07'"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        architecture_from_config(QWEN | changes, "m.path")
    assert str(raised.value).startswith(message)
    assert raised.value.notes["Fix"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "m: '.*config.json' cannot be read"),
        ("[]", "m: '.*config.json' is not the configuration of a model"),
        ('{"a":' * 100_000, "m: '.*config.json' is nested too deeply"),
        ('{"text_config":' * 99 + "5" + "}" * 99, "m: '.*config.json' is nested too deeply"),
        (" " * 2**23, "m: '.*config.json' is larger than 4 MiB"),
    ],
    ids=["cut off", "list", "open", "nested", "large"],
)
def test_a_damaged_file(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RecipeError, match=message):
        read_architecture(str(tmp_path), "m")


@pytest.mark.parametrize(
    ("changes", "nested", "message"),
    [
        ({"num_hidden_layers": 10_000}, 63, ""),
        ({"num_hidden_layers": 10_001}, 63, "num_hidden_layers"),
        ({}, 64, "is nested too deeply"),
    ],
)
def test_the_largest_configuration_is_read_and_a_larger_one_is_not(
    changes: dict[str, Any], nested: int, message: str, tmp_path: Path
) -> None:
    text = json.dumps(QWEN | changes)[:-1] + ', "extra": ' + "[" * nested + "]" * nested + "}"
    (tmp_path / "config.json").write_text(text)
    if not message:
        assert read_architecture(str(tmp_path), "m") is not None
        return
    with pytest.raises(RecipeError, match=message):
        read_architecture(str(tmp_path), "m")


def test_where_the_file_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    assert find_config("Qwen/Qwen2.5-7B") is None
    assert read_architecture("Qwen/Qwen2.5-7B", "m") is None
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen2.5-7B" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert find_config("Qwen/Qwen2.5-7B") == snapshot / "config.json"
    assert find_config(str(snapshot)) == snapshot / "config.json"
    assert find_config(str(tmp_path)) is None
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HOME", "/nowhere")
    assert find_config("Qwen/Qwen2.5-7B") == snapshot / "config.json"


def test_a_recipe_has_the_figures_of_the_model_at_its_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    model = {"random_weights": "false", "characters": "null", "architecture": "null", "path": str(tmp_path)}
    overrides = ["recipe=fake", *(f"models.policy.{key}={value}" for key, value in model.items())]
    assert rlflow.load(overrides, CONFIG_DIR).models["policy"].architecture == named("qwen2_5_7b")
    (tmp_path / "config.json").unlink()
    assert rlflow.load(overrides, CONFIG_DIR).models["policy"].architecture is None
