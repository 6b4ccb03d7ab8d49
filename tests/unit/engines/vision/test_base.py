"""Families of vision-language models: how many tokens an image has, and where they are."""

from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.engines.vision.base import VisionFamily, find_family, load_vision
from rlflow.errors import RecipeError
from rlflow.recipe import Model
from tests.vision_models import KINDS, encoded_picture, model_folder

# Building the models takes seconds.
pytestmark = pytest.mark.slow
SIZES = [(16, 16), (32, 32), (33, 31), (48, 32), (24, 40), (9, 119), (120, 64), (64, 120), (100, 101), (131, 60)]


def load_family(kind: str) -> VisionFamily:
    from transformers import AutoTokenizer

    folder = model_folder(kind)
    return load_vision("policy", Model(path=str(folder)), AutoTokenizer.from_pretrained(folder))


def open_picture(width: int, height: int, seed: int = 0) -> Any:
    from PIL import Image

    return Image.open(BytesIO(encoded_picture(width, height, seed)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_as_many_placeholders_as_features(kind: str) -> None:
    """The number of tokens follows from the size alone; the features are those of the real pixels."""
    import torch
    from transformers import AutoModelForImageTextToText

    family = load_family(kind)
    model = AutoModelForImageTextToText.from_pretrained(model_folder(kind), dtype=torch.float32)
    pictures = [family.read(open_picture(*size)) for size in SIZES]
    counts = [int((family.image_ids(*size) == family.placeholder_id).sum()) for size in SIZES]
    with torch.no_grad():
        separate = [family.encode(model, [picture]) for picture in pictures]
        together = family.encode(model, pictures)
        dummy = family.encode(model, [family.dummy()])
    assert [len(features[0]) for features in separate] == counts
    for layer, features in enumerate(together):
        torch.testing.assert_close(features, torch.cat([each[layer] for each in separate]), atol=2e-6, rtol=0)
    assert len(dummy[0]) > 0
    assert len(set(counts)) > 2


def test_idefics3_expands_as_its_processor_does() -> None:
    from transformers import Idefics3Processor

    family = load_family("idefics3")
    processor = Idefics3Processor(family.image_processor, family.tokenizer, image_seq_len=16)
    for size in SIZES:
        text = processor(text=["a<image>b"], images=[[open_picture(*size)]])["input_ids"][0]
        assert text[1:-1] == family.image_ids(*size).tolist(), size


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_positions_of_qwen_are_those_of_transformers(kind: str) -> None:
    import torch
    from transformers import AutoModelForImageTextToText

    family = load_family(kind)
    model = AutoModelForImageTextToText.from_pretrained(model_folder(kind))
    sizes = SIZES[:3] + SIZES[5:7]
    images = [family.read(open_picture(*size)) for size in sizes]
    text = np.array([40, 41], np.int32)
    ids = np.concatenate([text, *(np.concatenate([family.image_ids(*size), text]) for size in sizes)])
    grids = torch.tensor([(1, *image.grid) for image in images if image.grid])
    tokens = torch.from_numpy(ids)[None].long()
    expected, _ = model.model.get_rope_index(tokens, (tokens == family.placeholder_id).int(), grids)
    np.testing.assert_array_equal(family.positions(ids, images), expected[:, 0].numpy())


@pytest.mark.parametrize("kind", KINDS)
def test_every_weight_has_a_part(kind: str) -> None:
    from transformers import AutoModelForImageTextToText

    family = load_family(kind)
    model = AutoModelForImageTextToText.from_pretrained(model_folder(kind))
    decoder = {f"model.{name}" for name in ("language_model", "text_model")}
    for name, _ in model.named_parameters():
        is_language = ".".join(name.split(".")[:2]) in decoder or name.startswith("lm_head")
        assert (family.part_of(name) == "language") == is_language, name
    assert {family.part_of(name) for name, _ in model.named_parameters()} == {"language", "tower", "projector"}


def test_other_models_are_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig().save_pretrained(tmp_path)
    family = load_family("idefics3")
    with pytest.raises(RecipeError, match="images are not supported for models of the type 'llama'"):
        load_vision("policy", Model(path=str(tmp_path)), family.tokenizer)
    assert find_family("llama") is None


def test_a_model_without_its_image_processor_is_refused(tmp_path: Path) -> None:
    family = load_family("idefics3")
    family.config.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"the image processor of .* cannot be loaded"):
        load_vision("policy", Model(path=str(tmp_path)), family.tokenizer)
