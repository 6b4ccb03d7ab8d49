"""The part of a model that reads images: what its figures say, and figures that cannot be built with random weights."""

from dataclasses import asdict
from typing import Any

import pytest

import rlflow
from rlflow.errors import RecipeError
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.config import architecture_from_config
from rlflow.resources.models.vision import TrainedParts, VisionTower, trains_images
from tests.unit.resources.models.test_architecture import CARDS, card, config_fields

OVERRIDES = [
    "recipe=beginner_tiny",
    "models.policy.architecture.vocab_size=20",
    "+models.policy.architecture.vision={model_type: internvl, hidden_size: 64, intermediate_size: 128, "
    "num_hidden_layers: 2, num_attention_heads: 2, image_size: 16, patch_size: 4}",
]


def test_a_tower_has_tokens_for_its_images() -> None:
    architecture = rlflow.load(OVERRIDES).models["policy"].architecture
    assert architecture is not None
    assert architecture.vision is not None
    assert next(iter(architecture.vision.tokens.values())) == "<IMG_CONTEXT>"
    assert architecture.vision.num_image_tokens == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("models.policy.architecture.vision.image_size=20", "20 is no multiple of two patches of 4"),
        ("models.policy.architecture.vision.num_attention_heads=5", "5 does not divide hidden_size 64"),
        ("models.policy.architecture.vision.model_type=gemma3", "idefics3"),
        ("models.policy.architecture.vocab_size=16", "12 characters and the end token, and 4 tokens for images"),
    ],
)
def test_what_cannot_be_built_is_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        rlflow.load([*OVERRIDES, override])


def test_bytes_have_no_tokens_for_images() -> None:
    tokens = [
        "models.policy.characters=null",
        "+models.policy.tokenizer=bytes",
        "models.policy.architecture.vocab_size=300",
    ]
    with pytest.raises(RecipeError, match="has no tokens for images"):
        rlflow.load([*OVERRIDES, *tokens])


# Source: the counts of the weights on the models' pages on the hub.
PUBLISHED = {
    "internvl3_14b": 15.12e9,
    "internvl3_2b": 2.09e9,
    "internvl3_8b": 7.94e9,
    "qwen2_5_vl_32b": 33_452_718_336,
    "qwen2_5_vl_3b": 3_754_622_976,
    "qwen2_5_vl_72b": 73_410_777_344,
    "qwen2_5_vl_7b": 8_292_166_656,
    "qwen3_vl_30b_a3b": 31_070_754_032,
    "qwen3_vl_4b": 4_437_815_808,
    "qwen3_vl_8b": 8_767_123_696,
}
SEEING = {path.stem: figures for path in CARDS if (figures := card(path)).vision is not None}


def test_cards_have_as_many_parameters_as_published() -> None:
    assert SEEING.keys() == PUBLISHED.keys()
    for name, figures in SEEING.items():
        assert figures.num_parameters + figures.num_encoder_parameters == pytest.approx(PUBLISHED[name], rel=1e-3), name


def with_tower(figures: Architecture) -> dict[str, Any]:
    """Return the ``config.json`` of a card's model, with a decoder of one layer."""
    tower = figures.vision
    assert tower is not None
    text = {**config_fields(figures), "num_hidden_layers": 1, "pad_token_id": 0}
    vision: dict[str, Any] = {name: value for name, value in asdict(tower).items() if name != "model_type"}
    kind: str = tower.model_type
    if kind == "internvl":
        sides: dict[str, Any] = {name: [vision[name]] * 2 for name in ("image_size", "patch_size")}
        return {"model_type": kind, "text_config": text, "vision_config": {**vision, **sides, "attention_bias": True}}
    named = {"depth": tower.num_hidden_layers, "num_heads": tower.num_attention_heads}
    part: dict[str, Any] = {
        **vision,
        **named,
        "out_hidden_size": figures.hidden_size,
        "spatial_merge_size": tower.merge_size,
    }
    del part["image_size"]
    if kind == "qwen2_5_vl":
        return {"model_type": kind, "text_config": {**text, "model_type": "qwen2_5_vl_text"}, "vision_config": part}
    part["deepstack_visual_indexes"] = [1, 2, 3]
    if figures.num_experts:
        kind, text["model_type"] = "qwen3_vl_moe", "qwen3_vl_moe_text"
    else:
        text["model_type"] = "qwen3_vl_text"
    return {"model_type": kind, "text_config": text, "vision_config": part}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SEEING))
def test_transformers_builds_towers_of_the_same_size(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = with_tower(SEEING[name])
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    parts = ("visual", "vision_tower", "multi_modal_projector")
    count = sum(weight.numel() for key, weight in model.named_parameters() if any(part in key for part in parts))
    assert SEEING[name].num_encoder_parameters == pytest.approx(count, rel=1e-3)
    read = architecture_from_config(config, "path")
    assert read.vision == SEEING[name].vision


def test_operations_of_a_token_by_hand() -> None:
    """Two patches of two values, one layer: an MLP of three, and four patches for each token."""
    sizes: dict[str, Any] = {"hidden_size": 2, "intermediate_size": 3, "num_hidden_layers": 1, "num_attention_heads": 1}
    tower = VisionTower(model_type="qwen3_vl", patch_size=1, **sizes)
    # The layer multiplies 2 x 8 for attention and 2 x 6 for the MLP; the projector 8 x 8 and 8 x 5.
    products = 2 * (4 * (16 + 12) + 64 + 40)
    # A token has four patches, which attend to the 4 x 10 patches of its image, in 2 values, by two products.
    assert tower.token_flops(5, 10) == products + 4 * 40 * 2 * 4


@pytest.mark.parametrize(
    ("trained", "expected"), [("language", False), (("language",), False), ("all", True), (("language", "tower"), True)]
)
def test_whether_images_are_trained(trained: TrainedParts, expected: bool) -> None:
    assert trains_images(trained) == expected
