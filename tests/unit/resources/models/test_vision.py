"""The tower of a model with random weights: figures that cannot be built are refused when the recipe is loaded."""

import pytest

import rlflow
from rlflow.errors import RecipeError

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
