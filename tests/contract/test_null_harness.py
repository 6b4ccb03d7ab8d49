"""The null harness of verifiers, unchanged, on a real engine: a program for each episode, with tools of an MCP server.

verifiers starts the program by ``uv``, which would download its libraries. A stand-in for ``uv`` on PATH names the
Python of these tests, which has them.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Conversations, Packed, Prompts, Sequences
from rlflow.batch.segments import unfold
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.nodes.agent import AgentEpisodes
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Optimizer
from tests.helpers import ARCHITECTURE, MODEL, keys, minibatch, spec
from tests.unit.agents import sources
from tests.unit.agents.endpoint.conftest import ScriptedEngine, ids_of, save_tokenizer
from tests.unit.agents.sources.test_verifiers import run

ENVIRONMENT = "verifiers:example_taskset"
ROW = {"prompt": "3+1?", "task": {"idx": 3, "prompt": "3+1?", "answer": 4}}
OPTIONS: dict[str, Any] = {"taskset": {"has_tools": True}, "harness": "null"}
# Messages by verifiers' client for evaluation, and tokens by the one for training.
CLIENTS: dict[str, dict[str, Any]] = {
    "messages": OPTIONS,
    "tokens": {**OPTIONS, "renderer": {"name": "qwen3", "enable_thinking": False}},
}
BYTES = replace(
    MODEL,
    characters=None,
    tokenizer="bytes",
    architecture=replace(ARCHITECTURE, hidden_size=64, vocab_size=265, max_position_embeddings=2048),
)
SPEC = replace(spec("rollout", model=BYTES, optimizer=Optimizer(learning_rate=5e-3)), steps=1000, max_model_len=2048)
# An episode is two programs, each of which imports the libraries of OpenAI and of MCP.
pytestmark = pytest.mark.soak


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the taskset at the top level, where verifiers looks for it, and the stand-in for ``uv`` on PATH."""
    [folder] = sources.__path__
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", folder, prepend=":")
    monkeypatch.setenv("RLFLOW_API_KEY", "")
    uv = tmp_path / "uv"
    uv.write_text(f'#!/bin/sh\ncase "$*" in *--help*) echo --script ;; python*) echo {sys.executable} ;; esac\n')
    uv.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[ScriptedEngine]:
    """Start an endpoint whose engine is the test."""
    save_tokenizer(tmp_path)
    engine = ScriptedEngine()
    engine.start(tmp_path)
    yield engine
    engine.endpoint.stop()


def answer(prompt: str) -> str:
    """Call the tool, and then say what it answered."""
    if results := re.findall(r"\[<tool_response>\]\n(\d+)", prompt):
        return str(results[-1])
    return f"<tool_call>\n{json.dumps({'name': 'sums_add', 'arguments': {'a': 3, 'b': 1}})}\n</tool_call>"


def memorize(calls: Sequence[tuple[list[int], list[int]]]) -> TransformersEngine:
    """Return the engine of a model that gives these replies to these prompts."""
    prompts, replies = (Packed.from_rows(column, np.int32) for column in zip(*calls, strict=True))
    batch = minibatch(Sequences(keys=keys(len(calls)), prompt_ids=prompts, response_ids=replies))
    trained, engine = TorchEngine(replace(SPEC, capabilities=frozenset(["Trains"]))), TransformersEngine(SPEC)
    for _ in range(300):
        if trained.update(batch, LikelihoodLoss()).values["loss"] < 0.01:
            break
    engine.load_weights(trained.weights(), version=1)
    return engine


@pytest.mark.parametrize("options", CLIENTS.values(), ids=CLIENTS)
def test_a_model_calls_a_tool(options: dict[str, Any], engine: ScriptedEngine) -> None:
    """A model that has memorized replies gives them, and a trainer scores the tokens as they were sampled."""
    [scripted] = run(engine, answer, [ROW], ENVIRONMENT, **options)
    assert scripted.reward == 1.5
    calls = [(ids_of(call.prompt_ids), reply) for call, reply in zip(engine.calls, engine.replies, strict=True)]
    model = memorize(calls)
    limits: dict[str, Any] = {"max_calls": 2, "turn_tokens": 256, "max_tokens": 2048, "timeout_s": 240.0}
    node = AgentEpisodes(environment=ENVIRONMENT, options=options, group_size=1, processes=1, **limits)
    samples = Prompts(keys=np.zeros((1, 3), np.int64), ids=Packed.from_rows([[1]], np.int32), rows=(ROW,))
    batch = model.generate(samples, replace(node.sampling, temperature=0.0))
    assert isinstance(batch, Conversations)
    assert [row["environment_reward"] for row in batch.rows] == [1.5]
    (first, call), (second, reply) = calls
    assert second[: len(first) + len(call)] == first + call
    assert batch.prompt_ids[0].tolist() == first
    assert batch.response_ids[0].tolist() == [*second[len(first) :], *reply]
    own = batch.own_tokens().values
    scored = model.logprobs(unfold(batch.as_sequences()), batch.temperature).values.values
    assert scored[own] == pytest.approx(batch.logprobs.values[own], abs=1e-4)
