"""Vision-language models with random weights: built from a recipe, and read again from their export."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer, save_model
from rlflow.engines.vision.base import load_vision
from rlflow.recipe import Model
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.models.vision import VisionTower
from tests.vision_models import encoded_picture

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("model_type", "count"), [("idefics3", 7), ("internvl", 6)])
def test_a_new_model_sees_the_same_after_its_export(model_type: str, count: int, tmp_path: Path) -> None:
    import torch

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    tower = VisionTower(model_type=model_type, image_size=16, patch_size=4, **sizes)  # type: ignore[arg-type]
    architecture = Architecture(
        model_type="qwen2",
        num_key_value_heads=1,
        head_dim=32,
        vocab_size=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        vision=tower,
        **sizes,
    )
    model = Model(random_weights=True, characters="0123456789:", architecture=architecture, dtype="float32")
    spec = EngineSpec(
        role="actor",
        model_name="policy",
        model=model,
        capabilities=frozenset({"Scores"}),
        device="cpu",
        seed=0,
        steps=1,
        layout=Layout(micro_batch_tokens=2**20),
    )
    tokenizer = load_tokenizer("policy", model)
    family = load_vision("policy", model, tokenizer)
    ids = family.image_ids(20, 30)
    assert ((ids == family.placeholder_id).sum(), len(ids)) == (4, count)
    built = load_model(spec, dtype=torch.float32)
    save_model(built, tokenizer, tmp_path, family=family)
    again = load_vision("policy", Model(path=str(tmp_path)), tokenizer)
    pixels = [each.read(Image.open(BytesIO(encoded_picture(20, 30)))) for each in (family, again)]
    np.testing.assert_array_equal(pixels[0].values, pixels[1].values)
    with torch.no_grad():
        features = family.encode(built, pixels[:1])[0]
    assert features.shape == (4, 64)
    assert float(features.std()) > 0.1
