"""Conversations in vLLM: none waits for another, and the samples are those of turns in batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlflow.batch import Conversations, Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.nodes.generate import Converse
from tests.helpers import prompts
from tests.integration.engine_process import EngineProcess
from tests.integration.test_vllm import serving
from tests.unit.environments.meeting import TURNS

SHARED_PROCESSES = "vLLM"
pytestmark = pytest.mark.slow
GIVEN = replace(prompts((40, 5)), rows=({"name": "late"}, {"name": "early"}))


def sampling_of(file: Path, waits: bool) -> Sampling:
    node = Converse(
        environment="tests.unit.environments.meeting:Meeting",
        options={"file": str(file), "waits": waits},
        # Nearly every turn ends by one of these among its first tokens.
        stop=("2", "4", "6", "8", "="),
        max_turns=TURNS,
        turn_tokens=24,
        max_tokens=80,
        group_size=1,
        processes=2,
        timeout_s=60.0,
    )
    return node.sampling


def in_batches(engines: list[Any], place: int, given: Prompts, sampling: Sampling) -> Rollouts:
    """Generate in the engine's process, where each turn waits for all conversations."""
    assert sampling.turns is not None
    return sampling.turns.generate(engines[place], given, sampling)


def test_conversations_of_different_pace(vllm_process: EngineProcess, tmp_path: Path) -> None:
    """The late one is not answered before the early one has ended, so in batches of turns they would never end."""
    engine = vllm_process.build("vllm", serving())
    out = engine.generate(GIVEN, sampling_of(tmp_path / "ended", waits=True))
    assert isinstance(out, Conversations)
    assert out.turn_rewards.lengths.tolist() == [TURNS, TURNS]
    assert out.finished.all()
    vllm_process.send(in_batches, engine._place, GIVEN, sampling_of(tmp_path / "ended too", waits=False))
    expected = vllm_process.receive()
    assert out.response_ids.values.tolist() == expected.response_ids.values.tolist()
    assert out.response_ids.lengths.tolist() == expected.response_ids.lengths.tolist()
    assert out.turn.values.tolist() == expected.turn.values.tolist()
    assert out.logprobs.values == pytest.approx(expected.logprobs.values, abs=1e-5)
    assert out.texts == expected.texts
    is_own = out.own_tokens().values
    assert (out.logprobs.values[is_own] < 0).all()
    assert not out.logprobs.values[~is_own].any()
