"""Small models, prompts and sequences for tests."""

import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from hydra.core.override_parser.overrides_parser import OverridesParser
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

import rlflow
from rlflow.batch import Conversations, Minibatch, Packed, Pairs, Prompts, Repeated, Rollouts, Sequences
from rlflow.compiler.checks import check
from rlflow.compiler.graph import Graph
from rlflow.compiler.problem import Problem
from rlflow.compiler.wire import wire
from rlflow.data.source import make_pairs
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.fake import FakeEngine
from rlflow.engines.group_progress import PartialResponse
from rlflow.engines.serving.activity import EngineActivity
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.recipe import Model, Optimizer, Recipe
from rlflow.recipe.arguments import hydra_arguments
from rlflow.recipe.compose import compose, load_cluster, recipe_from_config
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.runtime.checkpoint import CheckpointWriter, RunProgress
from rlflow.runtime.protocols import Observer

CHARACTERS = "0123456789+="
ARCHITECTURE = Architecture(
    model_type="qwen3",
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    # The least that vLLM takes on the CPU.
    head_dim=32,
    vocab_size=13,
    max_position_embeddings=64,
)
MODEL = Model(random_weights=True, characters=CHARACTERS, architecture=ARCHITECTURE, dtype="float32")


def problem_of(recipe: Recipe, cluster: str) -> Problem:
    """Return the problem of placing a recipe on a cluster."""
    return Problem(recipe, wire(recipe), load_cluster(cluster), {})


def checked_graph(recipe: Recipe) -> Graph:
    """Return the graph of a recipe that must pass all rules."""
    graph = wire(recipe)
    check(recipe, graph)
    return graph


@cache
def load(*overrides: str, config_dir: Path | None = None) -> Recipe:
    """Return what ``rlflow.load`` returns, where ``overrides`` are free of mistakes.

    Hydra takes a tenth of a second to combine files, so it combines the same ones once. Values are set on a copy.
    """
    arguments = hydra_arguments(overrides, config_dir)
    changes = [argument for argument in arguments if argument[0] in "+~"]
    values = [argument for argument in changes if argument.startswith("++")]
    if changes != [*(change for change in changes if change not in values), *values]:
        return rlflow.load(overrides, config_dir)  # a key is added or deleted after a value is set
    config = deepcopy(_combined(tuple(argument for argument in arguments if argument not in values), config_dir))
    for value in OverridesParser.create().parse_overrides(values):
        OmegaConf.update(config, value.key_or_group, value.value(), force_add=True)
    return recipe_from_config(config, config_dir)


@cache
def _combined(arguments: tuple[str, ...], config_dir: Path | None) -> DictConfig:
    return compose(arguments, config_dir)


def spec(
    role: str = "actor",
    *,
    model: Model = MODEL,
    capabilities: Sequence[str] = ("Trains",),
    micro_batch_tokens: int = 4096,
    optimizer: Optimizer | None = None,
    seed: int = 0,
) -> EngineSpec:
    return EngineSpec(
        role=role,
        model_name="policy",
        model=model,
        capabilities=frozenset(capabilities),
        device="cpu",
        seed=seed,
        steps=10,
        optimizer=optimizer or Optimizer(learning_rate=1e-3),
        layout=Layout(micro_batch_tokens=micro_batch_tokens),
        max_model_len=64,
    )


def keys(prompts: int, samples: int = 1, step: int = 0) -> NDArray[np.int64]:
    return np.array([[step, prompt, sample] for prompt in range(prompts) for sample in range(samples)], np.int64)


def prompts(lengths: Sequence[int] = (3, 5, 2), step: int = 0, seed: int = 0) -> Prompts:
    draw = np.random.default_rng(seed)
    ids = Packed.from_rows([draw.integers(1, 13, length) for length in lengths], np.int32)
    return Prompts(keys=keys(len(lengths), step=step), ids=ids, rows=tuple({"answer": "1"} for _ in lengths))


def sequences(prompt_lengths: Sequence[int], response_lengths: Sequence[Sequence[int]], seed: int = 0) -> Sequences:
    """Return a group of responses of these lengths for each prompt."""
    draw = np.random.default_rng(seed)
    prompt_rows = [draw.integers(1, 13, length) for length in prompt_lengths]
    groups = list(zip(prompt_rows, response_lengths, strict=True))
    return Sequences(
        keys=np.array([[0, p, s] for p, (_, group) in enumerate(groups) for s in range(len(group))], np.int64),
        prompt_ids=Packed.from_rows([row for row, group in groups for _ in group], np.int32),
        response_ids=Packed.from_rows([draw.integers(1, 13, n) for _, group in groups for n in group], np.int32),
    )


def pairs(count: int, seed: int = 0) -> Pairs:
    """Return pairs of prompts and responses of one to eight tokens."""
    draw = np.random.default_rng(seed)
    columns = (
        Packed.from_rows([draw.integers(1, 13, draw.integers(1, 9)) for _ in range(count)], np.int32) for _ in range(3)
    )
    return make_pairs(keys(count), *columns)


def minibatch(of: Sequences, step: int = 0, **columns: NDArray[Any]) -> Minibatch:
    """Return a minibatch in which every token has the same weight."""
    size = len(of.response_ids.values)
    return Minibatch(
        **vars(of),
        step=step,
        columns={name: of.response_ids.like(values.astype(np.float32)) for name, values in columns.items()},
        weights=of.response_ids.like(np.full(size, 1 / size, np.float32)),
    )


def rollouts(rewarded: Sequences, texts: Sequence[str] | None = None) -> Rollouts:
    response = rewarded.response_ids
    return Rollouts(
        **vars(rewarded),
        logprobs=response.like(np.zeros(len(response.values), np.float32)),
        versions=Repeated(np.zeros(len(response), np.int32), response.lengths),
        temperature=1.0,
        finished=np.ones(len(rewarded), np.bool_),
        texts=tuple(texts or ["1"] * len(rewarded)),
        rows=({"answer": "1"},) * len(rewarded),
    )


class Warnings(Observer):
    """An observer that keeps the warnings of a run."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warned(self, warning: str) -> None:
        self.texts.append(warning)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run without times and without figures of object stores."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k and not k.startswith("store/")} for line in lines]


def done(count: int) -> Packed:
    """Return the column ``unfinished`` of conversations that are all done."""
    return Packed.from_rows([[]] * count, np.uint8)


class WritingEngine(SessionEngine, FakeEngine):
    """The fake engine as one that takes new samples while it writes. ``given``: the prompts of what came at once."""

    def __init__(self, spec: EngineSpec, room: tuple[int, int] = (4, 10_000)) -> None:
        super().__init__(spec)
        self._room = room
        self.given: list[list[int]] = []
        self._steps = 0

    @property
    def capacity(self) -> tuple[int, int]:
        return self._room

    @property
    def decode_steps(self) -> int:
        return self._steps

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Any]]":
        """Return finished responses."""
        self._steps += sampling.max_tokens
        self.given.append(samples.keys[:, 1].tolist())
        return [self.response(samples.take(np.array([row])), sampling) for row in range(len(samples))]

    def abort(self, answers: "Collection[Future[Any]]") -> None:
        """Do nothing, because all responses are finished."""

    def response(self, sample: Prompts, sampling: Sampling) -> "Future[Any]":
        done: Future[Any] = Future()
        rollouts = FakeEngine.generate(self, sample, replace(sampling, group_size=1))
        done.set_result(SimpleNamespace(rollouts=rollouts, length=int(rollouts.response_ids.lengths[0]), is_done=True))
        return done

    def rollouts(self, samples: Prompts, responses: Sequence[Any], sampling: Sampling) -> Rollouts:
        return Rollouts.concatenate([response.rollouts for response in responses])

    def take_activity(self) -> list[EngineActivity]:
        return [EngineActivity(0.0, 1.0, 10, 1, 0, 0.5, 0)]


def conversations(groups: Sequence[Sequence[Sequence[int]]], rewards: Sequence[Sequence[float]]) -> Conversations:
    """Return conversations in ``groups``, each as the lengths of its turns: the model's, the environment's and so on.

    ``rewards`` are those of the turns of each conversation.
    """
    pieces = [turns for group in groups for turns in group]
    numbers = np.concatenate([np.arange(len(turns)) for turns in pieces])
    written = rollouts(sequences([2] * len(groups), [[sum(turns) for turns in group] for group in groups]))
    return Conversations(
        **vars(written),
        turn=Repeated(
            np.where(numbers % 2, -1, numbers // 2).astype(np.int32),
            np.concatenate([np.array(turns) for turns in pieces]),
            np.array([len(turns) for turns in pieces]),
        ),
        turn_rewards=Packed.from_rows(rewards, np.float32),
        reasons=np.array([""] * len(pieces)),
        measures=({},) * len(pieces),
        unfinished=done(len(pieces)),
    )


def save_checkpoint(run: Path, progress: RunProgress, parts: Mapping[str, Any], keep: int) -> None:
    """Write a checkpoint as a run does, and wait for it."""
    writer = CheckpointWriter(run, parts, keep, None)
    writer.save(progress)
    writer.wait()
