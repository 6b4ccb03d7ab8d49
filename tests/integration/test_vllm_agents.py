"""Agents on vLLM: chats over HTTP, whose tokens a trainer scores as vLLM has sampled them."""

from dataclasses import replace

import numpy as np
import pytest

from rlflow.batch import Conversations, Packed, Prompts
from rlflow.batch.segments import unfold
from rlflow.engines.transformers import TransformersEngine
from rlflow.nodes.agent import AgentEpisodes
from tests.helpers import ARCHITECTURE, MODEL, spec
from tests.integration.engine_process import EngineProcess
from tests.unit.agents import agents_of_tests

SHARED_PROCESSES = "vLLM"
pytestmark = pytest.mark.slow
BYTES = replace(
    MODEL,
    characters=None,
    tokenizer="bytes",
    architecture=replace(ARCHITECTURE, vocab_size=265, max_position_embeddings=512),
)
SPEC = replace(spec("rollout", model=BYTES), max_model_len=400, max_num_seqs=16)


def rollouts_of(process: EngineProcess, agent: str, rows: list[dict[str, object]]) -> Conversations:
    node = AgentEpisodes(
        environment=f"{agents_of_tests.__name__}:{agent}",
        max_calls=20,
        turn_tokens=12,
        max_tokens=380,
        group_size=2,
        processes=1,
    )
    keys = np.array([[0, number, 0] for number in range(len(rows))])
    samples = Prompts(keys=keys, ids=Packed.from_rows([[1, 2]] * len(rows), np.int32), rows=tuple(rows))
    batch = process.build("vllm", SPEC).generate(samples, node.sampling)
    assert isinstance(batch, Conversations)
    return batch


@pytest.mark.parametrize("agent", ["chat", "tree"])
def test_the_trainer_scores_what_was_sampled(vllm_process: EngineProcess, agent: str) -> None:
    batch = rollouts_of(vllm_process, agent, [{"turns": 3, "prompt": "hello"}, {"turns": 2, "prompt": "you"}])
    segments = unfold(batch.as_sequences())
    assert len(batch) == 4
    assert (len(segments) == 4) == (agent == "chat")
    scored = TransformersEngine(SPEC).logprobs(segments, 1.0).values.values
    own = batch.own_tokens().values
    assert scored[own] == pytest.approx(batch.logprobs.values[own], abs=1e-4)
    assert (batch.logprobs.values[own] < 0).all()
