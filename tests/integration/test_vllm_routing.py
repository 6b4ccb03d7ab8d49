"""The experts that vLLM records on a CPU, against those of the same model in transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Packed, Prompts, Rollouts
from rlflow.batch.routing import from_records
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.group_progress import GroupProgress
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from tests.expert_models import NUM_EXPERTS, save_model
from tests.helpers import keys, spec
from tests.integration.engine_process import EngineProcess, processes
from tests.integration.test_vllm import broken_off

SHARED_PROCESSES = "vLLM with experts"
pytestmark = pytest.mark.slow

SAMPLING = Sampling(max_tokens=8, group_size=3)


def given(step: int = 0) -> Prompts:
    """Return prompts, the first two of which share a block of vLLM's cache."""
    draw = np.random.default_rng(step)
    first = draw.integers(1, 13, 40)
    ids = [first, np.concatenate([first[:36], draw.integers(1, 13, 3)]), draw.integers(1, 13, 5)]
    return Prompts(keys=keys(3, step=step), ids=Packed.from_rows(ids, np.int32), rows=({},) * 3)


@pytest.fixture(scope="module")
def vllm_process() -> Iterator[EngineProcess]:
    """Return a process of its own: vLLM makes groups for experts only in one whose first model has some."""
    with processes(1, "vllm") as (started,):
        yield started


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    model = save_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", head_dim=32)
    changes: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 4, "routing_replay": True}
    return replace(spec("rollout", model=model), **changes)


def experts_of(rollouts: Rollouts) -> list[Any]:
    """Return the sorted experts of each row, [tokens, layers, experts of a token]."""
    assert rollouts.routing is not None
    rows = [rollouts.routing[row] for row in range(len(rollouts))]
    return [np.sort(from_records(row, NUM_EXPERTS, row.itemsize // 2), axis=-1) for row in rows]


def test_each_token_has_the_experts_that_the_model_uses(vllm_process: EngineProcess, of: EngineSpec) -> None:
    """In float32 both libraries choose the same, also for cached prompts and for samples that are broken off."""
    engine = vllm_process.build("vllm", of)
    generated = [engine.generate(given(), SAMPLING), engine.generate(given(), SAMPLING)]
    interrupted: Rollouts | None = None
    for tokens in (1, 3, 5, 2, 8, 8, 8):
        vllm_process.send(broken_off, engine._place, given(1), SAMPLING, tokens, interrupted)
        interrupted = vllm_process.receive()
    assert interrupted is not None
    assert GroupProgress(given(1), SAMPLING, interrupted).complete.all()
    reference = TransformersEngine(of)
    trained = TorchEngine(replace(of, role="actor", capabilities=frozenset({"Trains", "Scores"})))
    for rollouts in (*generated, interrupted):
        check(rollouts, reference, trained)
    # A weight sync packs experts for vLLM's kernels, too.
    for weight in trained._model.parameters():
        weight.data *= 1.5
    engine.load_weights([(name, weight.clone()) for name, weight in trained.weights()], 1)
    synced = engine.generate(given(2), SAMPLING)
    assert trained.logprobs(synced, 1.0).values.values == pytest.approx(synced.logprobs.values, abs=1e-5)


def check(rollouts: Rollouts, reference: TransformersEngine, trained: TorchEngine) -> None:
    lengths = rollouts.prompt_ids.lengths + rollouts.response_ids.lengths - 1
    assert rollouts.routing is not None
    assert rollouts.routing.lengths.tolist() == lengths.tolist()
    scores = trained.logprobs(rollouts, 1.0).values.values
    assert scores == pytest.approx(rollouts.logprobs.values, abs=1e-5)
    for row, experts in enumerate(experts_of(rollouts)):
        assert (experts == read_by(reference, rollouts, row)).all()


def read_by(reference: TransformersEngine, rollouts: Rollouts, row: int) -> Any:
    """Return the experts that the model of transformers chooses for the tokens of a row."""
    tokens: Sequence[Any] = [*rollouts.prompt_ids[row], *rollouts.response_ids[row][:-1]]
    whole = Prompts(keys=keys(1), ids=Packed.from_rows([tokens], np.int32), rows=({},))
    (experts,) = experts_of(reference.generate(whole, Sampling(max_tokens=1)))
    return experts
