"""Tiny vision-language models of each family with random weights, as folders that ``from_pretrained`` reads."""

from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np

KINDS = ("idefics3", "internvl", "qwen2_5_vl", "qwen3_vl")
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz ?.,:\n"
SIDE, PATCH, HIDDEN = 32, 4, 64


@cache
def model_folder(kind: str) -> Path:
    """Return the folder of a tiny model with its tokenizer and image processor, float32."""
    import torch
    import transformers

    folder = Path(mkdtemp(prefix=f"rlflow-{kind}-"))
    tokenizer = _tokenizer(_SPECIAL_TOKENS[kind])
    config, image_processor = _BUILDERS[kind](tokenizer)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for weight in model.parameters():
            # Larger than usual: images must matter.
            weight.data += 0.05 * torch.randn_like(weight)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    image_processor.save_pretrained(folder)
    return folder


def encoded_picture(width: int, height: int, seed: int = 0) -> bytes:
    """Return a PNG of random pixels."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


_SPECIAL_TOKENS = {
    "idefics3": [
        *("<image>", "<fake_token_around_image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
    ],
    "internvl": ["<img>", "</img>", "<IMG_CONTEXT>", "<video>"],
    "qwen2_5_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
    "qwen3_vl": ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"],
}


# The names by which InternVL's processor asks its tokenizer for them.
_NAMED_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}


def _tokenizer(special: list[str]) -> Any:
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(["<|end|>", *special, *CHARACTERS])}
    words = Tokenizer(WordLevel(vocabulary))
    words.pre_tokenizer, words.decoder = Split(Regex(r"[\s\S]"), "isolated"), Fuse()
    names = {name: token for name, token in _NAMED_TOKENS.items() if token in special}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<|end|>", pad_token="<|end|>", extra_special_tokens=names
    )
    tokenizer.add_tokens(special, special_tokens=True)
    return tokenizer


def _text_config(tokenizer: Any, **more: Any) -> dict[str, Any]:
    return {
        **{"vocab_size": len(tokenizer), "hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN},
        **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
        **{"max_position_embeddings": 4096, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None},
        **{"pad_token_id": tokenizer.pad_token_id, "tie_word_embeddings": True},
        **more,
    }


_TOWER = {"hidden_size": HIDDEN, "intermediate_size": 2 * HIDDEN, "patch_size": PATCH}


def _idefics3(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import Idefics3Config
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tower = {**_TOWER, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIDE}
    config = Idefics3Config(
        text_config=_text_config(tokenizer, model_type="llama"),
        vision_config=tower,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    processor = Idefics3ImageProcessorPil(size={"longest_edge": 4 * SIDE}, max_image_size={"longest_edge": SIDE})
    return config, processor


def _internvl(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import InternVLConfig
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    sizes = {"image_size": (SIDE, SIDE), "patch_size": (PATCH, PATCH)}
    config = InternVLConfig(
        text_config=_text_config(tokenizer, model_type="qwen2"),
        vision_config={**_TOWER, **sizes, "num_hidden_layers": 2, "num_attention_heads": 2},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=(SIDE // PATCH) ** 2 // 4,
    )
    processor = GotOcr2ImageProcessorPil(
        size={"height": SIDE, "width": SIDE}, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return config, processor


def _qwen(tokenizer: Any, config_class: Any, rope: dict[str, Any], tower: dict[str, Any]) -> tuple[Any, Any]:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for name, token in {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start"}.items()
    }
    head_dim = HIDDEN // 2
    # Half of a head, in three parts.
    sections = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4]}
    config = config_class(
        text_config=_text_config(tokenizer, rope_parameters={**sections, **rope}, head_dim=head_dim),
        vision_config={
            **{**_TOWER, "depth": 2, "num_heads": 2, "spatial_merge_size": 2, "temporal_patch_size": 2},
            **{"out_hidden_size": HIDDEN, **tower},
        },
        **ids,
        tie_word_embeddings=True,
    )
    size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (2 * SIDE) ** 2}
    return config, Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=size)


def _qwen2_5_vl(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig

    return _qwen(tokenizer, Qwen2_5_VLConfig, {}, {"window_size": 8 * PATCH, "fullatt_block_indexes": [1]})


def _qwen3_vl(tokenizer: Any) -> tuple[Any, Any]:
    from transformers import Qwen3VLConfig

    tower = {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return _qwen(tokenizer, Qwen3VLConfig, {"mrope_interleaved": True}, tower)


_BUILDERS = {"idefics3": _idefics3, "internvl": _internvl, "qwen2_5_vl": _qwen2_5_vl, "qwen3_vl": _qwen3_vl}
