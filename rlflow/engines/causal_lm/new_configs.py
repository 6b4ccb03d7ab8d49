"""Configurations of transformers for models with random weights."""

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rlflow.recipe import Model
from rlflow.resources.models.vision import VisionTower

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# The spread of random weights. With the usual 0.02 a tiny tower does not learn what it sees within hundreds of steps.
_VISION_SPREAD = 0.2


def new_config(options: Model, tokenizer: "PreTrainedTokenizerBase", **extra: Any) -> Any:
    """Return the configuration of a model with random weights, with ``extra`` fields."""
    from transformers import AutoConfig

    assert options.architecture is not None
    tower = options.architecture.vision
    fields_of_text = {**_text_fields(options), "eos_token_id": tokenizer.eos_token_id}
    if tower is None:
        return AutoConfig.for_model(**fields_of_text, **extra)
    spread = {"initializer_range": _VISION_SPREAD}
    sizes: dict[str, Any] = {"image_size": tower.image_size, "patch_size": tower.patch_size}
    if tower.model_type == "internvl":
        sizes = {name: (size, size) for name, size in sizes.items()}
        extra["image_seq_length"] = tower.num_image_tokens
    else:
        extra |= {"scale_factor": 2, "pad_token_id": tokenizer.pad_token_id}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = AutoConfig.for_model(
        tower.model_type,
        text_config={**fields_of_text, **spread},
        vision_config={**{name: getattr(tower, name) for name in names}, **sizes, **spread},
        image_token_id=tokenizer.convert_tokens_to_ids(next(iter(tower.tokens.values()))),
        tie_word_embeddings=options.architecture.tie_word_embeddings,
        **extra,
    )
    config.initializer_range = _VISION_SPREAD
    return config


def new_image_processor(tower: VisionTower) -> Any:
    """Return an image processor that makes one tile of each image."""
    if tower.model_type == "internvl":
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        return GotOcr2ImageProcessorPil(size={"height": tower.image_size, "width": tower.image_size})
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    edge = {"longest_edge": tower.image_size}
    return Idefics3ImageProcessorPil(size=edge, max_image_size=edge, do_image_splitting=False)


def _text_fields(options: Model) -> dict[str, Any]:
    """Return the architecture of the language model as the fields of a ``config.json``."""
    # Fields at their defaults are left out: most of them belong to other types.
    assert options.architecture is not None
    values = vars(options.architecture)
    config = {
        field.name: values[field.name]
        for field in fields(options.architecture)
        if values[field.name] != field.default and field.name != "vision"
    }
    config.pop("rope_theta", None)
    return config | {"rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]}}
