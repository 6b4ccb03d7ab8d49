"""Measure images from the data to what is learned from them: ``python -m benchmarks.vision [--seeds N] [--json FILE]``.

- ``packed_error_max``: the largest difference of a logprob between a packed pass and a plain pass of transformers for
  each row, over tiny models of four families. Groups share prompts of none to three images.
- ``encoder_calls_per_pass``: the largest number of times that such a pass encodes images.
- ``load_seconds_10000``: 10,000 photographs of 640x480 in a folder are checked, and their prompts become tokens.
- ``stored_over_encoded``: steps of GRPO with 64 x 8 rollouts run on Ray, in rlflow's own loop, with engines that
  generate without a model. The bytes that images take in the object stores, over the bytes of their files; a second run
  without images tells the other bytes. The same difference of the controller's messages is printed.
- ``digits_min``, ``digits_exchanged_max``: what a tiny model reads after training, by ``benchmarks.vision_digits``.
"""

import argparse
import json
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np

import rlflow
from benchmarks.reporting import Goal, finish
from benchmarks.traffic import counted
from benchmarks.vision_digits import EXCHANGED, READ, read_digits
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.encoding import Reader
from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.runtime.ray.cluster.connection import simulated
from rlflow.runtime.ray.engine_set import RayEngines
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training

FILES, PROMPTS, GROUP_SIZE, STEPS = 10_000, 64, 8, 3
IMAGE_TOKENS = 300
STORE = 1_000_000_000
LIMITS = {
    "packed_error_max": 2e-6,
    "encoder_calls_per_pass": 1,
    "load_seconds_10000": 10.0,
    "stored_over_encoded": 1.05,
    "digits_exchanged_max": EXCHANGED,
}


def compare_passes() -> tuple[float, int]:
    """Return the largest difference of a logprob over all families, and the largest number of encoder calls."""
    import torch
    from transformers import AutoModelForImageTextToText

    from rlflow.engines.causal_lm.token_outputs import token_scores
    from tests.unit.engines.vision.test_passes import build_case, plain_logprobs
    from tests.vision_models import KINDS, model_folder

    errors, most_calls = [], 0
    for kind in KINDS:
        case, calls = build_case(kind), list[int]()
        plain = AutoModelForImageTextToText.from_pretrained(model_folder(kind), dtype=torch.float32)
        family: Any = case.vision.family
        encode = family.encode
        family.encode = lambda *inputs, encode=encode, calls=calls: calls.append(1) or encode(*inputs)
        prompts, responses = case.sequences.prompt_ids, case.sequences.response_ids
        with torch.no_grad():
            packed = token_scores(case.model, case.sequences, 1.0, vision=case.vision)[:, 0]
            plain_rows = [
                plain_logprobs(kind, plain, prompts[row], case.pictures[row], responses[row])
                for row in range(len(prompts))
            ]
        expected = torch.cat(plain_rows)
        errors.append(float((packed - expected).abs().max()))
        most_calls = max(most_calls, len(calls))
        print(f"{kind}: logprobs of {len(expected)} tokens differ by at most {errors[-1]:.1e}")
    return max(errors), most_calls


def photographs(count: int) -> list[bytes]:
    """Return different JPEGs of 640x480 with about as many bytes as photographs have."""
    import PIL.Image

    draw, encoded = np.random.default_rng(0), []
    for _ in range(count):
        large = PIL.Image.fromarray(draw.integers(0, 256, (60, 80, 3), np.uint8)).resize((640, 480))
        noisy = np.asarray(large, np.int16) + draw.integers(-24, 25, (480, 640, 3))
        buffer = BytesIO()
        PIL.Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(buffer, "JPEG", quality=60)
        encoded.append(buffer.getvalue())
    return encoded


def write_rows(folder: Path, count: int, *, with_images: bool = True) -> int:
    """Write rows, each with a photograph of its own if any; return the mean bytes of a file."""
    pool = photographs(min(count, 64))
    for number in range(count if with_images else 0):
        # Bytes after the end of a JPEG make another file of it.
        (folder / f"{number}.jpg").write_bytes(pool[number % len(pool)] + number.to_bytes(4, "big"))
    prompt = "1+1=" if with_images else "1+1=" + "1" * IMAGE_TOKENS
    images = (f"{number}.jpg" if with_images else None for number in range(count))
    rows = ({"prompt": prompt, "answer": "2", "image": image} for image in images)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return sum(map(len, pool)) // len(pool)


def plan_of(source: Path) -> Plan:
    """Return the plan of steps on a host with two CPUs, where every role uses both."""
    pins = [f"roles.{role}.{pin}" for role in ("actor", "rollout", "reference") for pin in ("engine=fake", "gpus=2")]
    recipe = rlflow.load(
        [
            "recipe=grpo_tiny_cluster",
            *pins,
            "models.policy={recipe: null, random_weights: true, characters: '0123456789+='}",
            "models.policy.architecture={model_type: qwen3, hidden_size: 64, intermediate_size: 128,"
            " num_attention_heads: 2, num_hidden_layers: 2, num_key_value_heads: 1, head_dim: 32, vocab_size: 13,"
            " max_position_embeddings: 512}",
            f"data={{source: {source}, max_prompt_tokens: 400, batch_size: {PROMPTS}}}",
            "evaluation=null",
            f"graph.rollouts={{group_size: {GROUP_SIZE}, max_tokens: 4}}",
        ]
    )
    return rlflow.compile(recipe, "1x2@cpu")


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plan of the steps."""
    write_rows(folder, 1, with_images=False)
    yield plan_of(folder / "rows.jsonl")


def open_data(plan: Plan) -> DataSource:
    """Return the data of a plan, for a model that reads each image as 300 tokens."""
    tokenizer = load_tokenizer("policy", models_in_use(plan.recipe)["policy"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["[image]"]})
    token = tokenizer.convert_tokens_to_ids("[image]")
    vision: Any = SimpleNamespace(
        placeholder="[image]",
        placeholder_id=token,
        media_ids=frozenset({token}),
        tokenizer=tokenizer,
        image_ids=lambda width, height: np.full(IMAGE_TOKENS, token, np.int32),
    )
    rows = load_rows(plan.recipe.data, "split")
    return open_training_data(plan.recipe.data, tokenizer, rows, 0, reader=Reader(load_vision=lambda: vision))


def load_seconds() -> float:
    """Return the seconds in which a data set of photographs is loaded."""
    with TemporaryDirectory() as folder:
        size = write_rows(Path(folder), FILES)
        plan = plan_of(Path(folder) / "rows.jsonl")
        began = time.perf_counter()
        data = open_data(plan)
        seconds = time.perf_counter() - began
        assert data.images is not None
        print(f"{len(data.images)} files of {size / 1000:.0f} kB loaded in {seconds:.1f} s")
    return seconds


def bytes_of_steps(*, with_images: bool) -> tuple[int, int, int]:
    """Return the bytes of steps in the stores, those of the controller's messages, and those of the images' files."""
    with TemporaryDirectory() as folder:
        size = write_rows(Path(folder), PROMPTS * STEPS, with_images=with_images)
        plan = plan_of(Path(folder) / "rows.jsonl")
        data = open_data(plan)
        with RayRuntime().start(plan, models_in_use(plan.recipe), Path(folder)) as engines:
            assert isinstance(engines, RayEngines)
            training = Training.of(plan, engines, engines.place_with_tokens(data))
            train_step(training, 0)
            with counted() as traffic:
                steps = [train_step(training, step) for step in range(1, STEPS)]
            stored = sum(round(value) for step in steps for name, value in step.items() if name.startswith("store/"))
    return stored, traffic.nbytes, size * PROMPTS * (STEPS - 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="runs that learn to read digits")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    error, calls = compare_passes()
    figures = {"packed_error_max": error, "encoder_calls_per_pass": calls, "load_seconds_10000": load_seconds()}
    with TemporaryDirectory() as folder:
        (plan,) = plans(Path(folder))
    with simulated(plan.cluster, STORE):
        (stored, sent, encoded), (other, other_sent, _) = (bytes_of_steps(with_images=seen) for seen in (True, False))
    figures["stored_over_encoded"] = (stored - other) / encoded
    print(f"images of {encoded / 1e6:.1f} MB took {(stored - other) / 1e6:.1f} MB of the stores")
    print(f"and {(sent - other_sent) / 1000:.1f} kB of the controller's messages")
    read, exchanged, _ = zip(*map(read_digits, range(arguments.seeds)), strict=True)
    figures |= {"digits_min": min(read), "digits_exchanged_max": max(exchanged)}
    goals = {name: Goal(f"at most {limit:g}", figures[name] <= limit) for name, limit in LIMITS.items()}
    goals["digits_min"] = Goal(f"at least {READ:g}", figures["digits_min"] >= READ)
    return finish("vision", figures, goals, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
