"""Calls that arrive one by one, on an engine of batches."""

import gc
import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.agents.gathering_engine import GatheringEngine
from rlflow.batch.segments import unfold
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm.decoding import decode
from rlflow.engines.fake import FakeEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.nodes.agent import AgentEpisodes
from tests.helpers import ARCHITECTURE, MODEL, prompts, spec
from tests.unit.agents import agents_of_tests

SAMPLING = Sampling(max_tokens=4)


def test_calls_of_several_callers_are_answered_each_with_its_own() -> None:
    engine = FakeEngine(spec())
    gathering = GatheringEngine(engine)
    samples, expected = prompts(), engine.generate(prompts(), SAMPLING)
    parts = [samples.take(np.array([row])) for row in (2, 0, 1)]
    longer = replace(SAMPLING, max_tokens=3)
    futures = [gathering.submit(part, SAMPLING)[0] for part in parts] + gathering.submit(samples, longer)
    responses = [future.result(20) for future in futures]
    found = gathering.rollouts(samples, [responses[1], responses[2], responses[0]], SAMPLING)
    assert found.response_ids.values.tolist() == expected.response_ids.values.tolist()
    shorter = gathering.rollouts(samples, responses[3:], longer)
    assert shorter.response_ids.values.tolist() == engine.generate(samples, longer).response_ids.values.tolist()


SAMPLES = replace(prompts((1, 1)), rows=({"turns": 3, "prompt": "hello"}, {"turns": 2, "prompt": "you"}))
NODE = AgentEpisodes(
    environment=f"{agents_of_tests.__name__}:chat", max_calls=9, turn_tokens=8, max_tokens=300, group_size=2
)


def model_in_this_process(journal: Path | None = None) -> TransformersEngine:
    architecture = replace(ARCHITECTURE, vocab_size=265, max_position_embeddings=512)
    model = replace(MODEL, characters=None, tokenizer="bytes", architecture=architecture)
    return TransformersEngine(replace(spec("rollout", model=model), max_model_len=400, journal=journal))


@pytest.mark.slow
def test_agents_on_a_model_in_this_process() -> None:
    """The engine scores what it has sampled as it has sampled it."""
    engine = model_in_this_process()
    batch = engine.generate(SAMPLES, NODE.sampling)
    scored = engine.logprobs(unfold(batch.as_sequences()), 1.0).values.values
    own = batch.own_tokens().values
    assert batch.turn_lengths.lengths.tolist() == [3, 3, 2, 2]
    assert scored[own] == pytest.approx(batch.logprobs.values[own], abs=1e-4)


@pytest.mark.slow
def test_recorded_calls_are_not_generated_again_with_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash, some calls of a batch are in the journal."""
    before = model_in_this_process(tmp_path).generate(SAMPLES.take(np.array([0])), NODE.sampling)
    decoded: list[int] = []

    def count(model: Any, ids: Any, sampling: Any, seeds: Sequence[Any], *rest: Any) -> Any:
        decoded.append(len(seeds))
        return decode(model, ids, sampling, seeds, *rest)

    monkeypatch.setattr("rlflow.engines.transformers.decode", count)
    after = model_in_this_process(tmp_path).generate(SAMPLES, NODE.sampling)
    assert after.response_ids[0].tolist() == before.response_ids[0].tolist()
    assert sum(decoded) == 2 * 2  # two episodes of two calls


def test_it_ends_with_its_engine() -> None:
    engine = FakeEngine(spec())
    gathering = weakref.ref(GatheringEngine(engine))
    gc.collect()
    assert gathering() is None
    del engine
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "gathered calls":
            thread.join(20)
            assert not thread.is_alive()
