"""Packed passes with images against one plain pass of transformers for each row."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest

from rlflow.batch import Packed, Prompts, Sequences
from rlflow.batch.images import Image, pack_images
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.causal_lm.decoding import decode
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.causal_lm.token_outputs import token_scores
from rlflow.engines.vision.base import Pixels
from rlflow.engines.vision.passes import Vision
from rlflow.errors import EngineError
from rlflow.recipe import Model
from tests.helpers import spec
from tests.unit.engines.vision.test_base import load_family, open_picture
from tests.vision_models import KINDS, encoded_picture, model_folder

# Building the models takes seconds.
pytestmark = pytest.mark.slow
SIZES: list[list[tuple[int, int]]] = [[(32, 32)], [], [(40, 24), (16, 33)], [(33, 31), (64, 20), (24, 24)], [(32, 32)]]


class Case(NamedTuple):
    """Groups of three rows: the last prompt has the ids of the first one, and another image."""

    vision: Vision
    model: Any
    sequences: Sequences
    pictures: list[list[Any]]


def vision_spec(kind: str, *capabilities: str) -> EngineSpec:
    model = Model(path=str(model_folder(kind)), dtype="float32")
    return replace(spec(model=model, capabilities=capabilities or ("Scores",)), max_model_len=512)


def build_case(kind: str) -> Case:
    import torch

    family, rng = load_family(kind), np.random.default_rng(0)
    text = family.tokenizer("is it?", add_special_tokens=False)["input_ids"]
    images, pictures, prompts, responses = [], [], [], []
    for group, sizes in enumerate(SIZES):
        encoded = [encoded_picture(*size, seed=10 * group + number) for number, size in enumerate(sizes)]
        pieces = [np.concatenate([family.image_ids(*size), text[: number + 2]]) for number, size in enumerate(sizes)]
        prompt = np.concatenate([text[:1], *pieces, text]).astype(np.int32)
        for _ in range(3):
            prompts.append(prompt)
            responses.append(rng.integers(len(family.tokenizer) - 30, len(family.tokenizer), rng.integers(1, 7)))
            images.append([Image(data, *size) for data, size in zip(encoded, sizes, strict=True)])
            pictures.append([open_picture(*size, seed=10 * group + n) for n, size in enumerate(sizes)])
    keys = [(0, row // 3, row % 3) for row in range(len(prompts))]
    sequences = Sequences(
        keys=np.array(keys),
        prompt_ids=Packed.from_rows(prompts, np.int32),
        response_ids=Packed.from_rows(responses, np.int32),
        images=pack_images(images),
    )
    return Case(
        Vision(family, is_trained=True), load_model(vision_spec(kind), dtype=torch.float32), sequences, pictures
    )


def plain_logprobs(kind: str, model: Any, ids: np.ndarray, pictures: Sequence[Any], response: np.ndarray) -> Any:
    """Return the logprobs of a response from a pass of transformers over one row, with positions of its own."""
    import torch

    family = load_family(kind)
    tokens = torch.from_numpy(np.concatenate([ids, response])).long()[None]
    inputs: dict[str, Any] = {}
    if pictures and kind == "idefics3":
        inputs["pixel_values"] = torch.from_numpy(
            np.concatenate(
                [family.image_processor([[picture]], return_tensors="np")["pixel_values"][0] for picture in pictures]
            )
        )[None]
    elif pictures:
        processed = family.image_processor(list(pictures), return_tensors="pt")
        inputs = {name: processed[name] for name in ("pixel_values", "image_grid_thw") if name in processed}
    if kind.startswith("qwen"):
        inputs["mm_token_type_ids"] = (tokens == family.placeholder_id).int()
    logits = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), **inputs).logits[0, len(ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.from_numpy(response).long()[:, None])[:, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_pass_is_exact_and_encodes_images_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups share prompts and images, prompts have none to three of them, and two prompts differ in images alone."""
    import torch
    from transformers import AutoModelForImageTextToText

    vision, model, sequences, pictures = build_case(kind)
    plain = AutoModelForImageTextToText.from_pretrained(model_folder(kind), dtype=torch.float32)
    expected = torch.cat([
        plain_logprobs(kind, plain, sequences.prompt_ids[row], pictures[row], sequences.response_ids[row])
        for row in range(len(sequences))
    ])  # fmt: skip
    weights = torch.from_numpy(np.random.default_rng(1).normal(size=len(expected))).float()
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]

    calls: list[int] = []
    encode = vision.family.encode

    def counted(model: Any, images: Sequence[Pixels]) -> Any:
        calls.append(len(images))
        return encode(model, images)

    monkeypatch.setattr(vision.family, "encode", counted)
    logprobs = token_scores(model, sequences, 1.0, vision=vision)[:, 0]
    (logprobs * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert calls == [sum(map(len, SIZES))]
    torch.testing.assert_close(logprobs, expected, atol=2e-6, rtol=0)
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    for name, weight in theirs.items():
        if weight.grad is None:
            assert ours[name].grad is None, name
            continue
        scale = float(weight.grad.abs().max())
        torch.testing.assert_close(ours[name].grad, weight.grad, atol=2e-5 * max(scale, 1e-3), rtol=0, msg=name)
    assert np.array_equal(sequences.prompt_ids[0], sequences.prompt_ids[12])


@pytest.mark.parametrize("kind", KINDS)
def test_generation_sees_the_images_and_samples_no_placeholder(kind: str) -> None:
    import torch

    vision, model, sequences, _ = build_case(kind)
    rows = np.arange(0, len(sequences), 3)
    firsts = sequences.take(rows)
    prompts = Prompts(keys=firsts.keys, ids=firsts.prompt_ids, rows=[{}] * len(rows), images=firsts.images)
    with torch.no_grad():
        # Without the rule, placeholders would be most of what is sampled.
        head = model.get_output_embeddings().weight
        embedding = model.get_input_embeddings().weight
        head.data = head.clone()
        head.data[vision.family.placeholder_id] = 4 * embedding.mean(0)
    new = decode(model, prompts, Sampling(max_tokens=9, group_size=4), list(range(4 * len(rows))), [0], vision)
    ids = Packed.from_rows(new.ids, np.int32)
    assert not set(ids.values.tolist()) & vision.family.media_ids
    assert len(ids.values) > 100
    repeated = prompts.repeat(4)
    scored = Sequences(keys=repeated.keys, prompt_ids=repeated.ids, response_ids=ids, images=repeated.images)
    with torch.no_grad():
        logprobs = token_scores(model, scored, 1.0, vision=vision)[:, 0]
    np.testing.assert_allclose(np.concatenate(new.logprobs), logprobs.numpy(), atol=2e-6)


def test_lost_images_are_noticed() -> None:
    vision, model, sequences, _ = build_case("idefics3")
    lost = Sequences(keys=sequences.keys, prompt_ids=sequences.prompt_ids, response_ids=sequences.response_ids)
    with pytest.raises(EngineError, match=r"a pass has [0-9]+ tokens that stand for images, and its images have 0"):
        token_scores(model, lost, 1.0, vision=vision)
    with pytest.raises(EngineError, match="the batch has images, which this model cannot see"):
        token_scores(model, sequences, 1.0)


def test_a_placeholder_in_a_response_is_refused() -> None:
    vision, model, sequences, _ = build_case("idefics3")
    sequences.response_ids.values[0] = vision.family.placeholder_id
    with pytest.raises(EngineError, match="tokens that stand for images"):
        token_scores(model, sequences, 1.0, vision=vision)
