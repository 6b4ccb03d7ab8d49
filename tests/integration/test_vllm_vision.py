"""vLLM with images against the trainer: the same logprobs, before and after syncs with a trained tower."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import Sampling
from rlflow.engines.torch import TorchEngine
from rlflow.errors import EngineError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Optimizer
from tests.helpers import minibatch
from tests.integration.engine_process import EngineProcess, RemoteEngine
from tests.unit.engines.vision.test_passes import build_case, vision_spec
from tests.vision_models import KINDS

SHARED_PROCESSES = "vLLM"
pytestmark = pytest.mark.slow
# vLLM imports torchvision for the others.
NEEDS_TORCHVISION = [
    pytest.param(kind, marks=pytest.mark.skipif(not find_spec("torchvision"), reason="needs torchvision"))
    for kind in KINDS[1:]
]
SAMPLING = Sampling(max_tokens=6, group_size=3)


def encoder_calls(engines: list[Any], place: int) -> int:
    """Return how often vLLM has encoded images since the last call."""
    model = engines[place]._batcher.call(lambda e: e.model_executor.driver_worker.worker.model_runner.get_model())
    if not hasattr(model, "calls"):
        encode, model.calls = model.embed_multimodal, []
        model.embed_multimodal = lambda **fields: model.calls.append(1) or encode(**fields)
    calls, model.calls[:] = len(model.calls), []
    return calls


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [KINDS[0], *NEEDS_TORCHVISION])
def test_samples_have_the_logprobs_of_the_trainer(vllm_process: EngineProcess, kind: str) -> None:
    """Prompts share their text and not their images; a group encodes each image once for each version of weights."""
    of = replace(vision_spec(kind, "Trains", "Scores"), optimizer=Optimizer(learning_rate=1e-2), train="all")
    trainer, sequences = TorchEngine(of), build_case(kind).sequences
    firsts = sequences.take(np.arange(0, 15, 3))
    prompts = Prompts(keys=firsts.keys, ids=firsts.prompt_ids, rows=[{}] * len(firsts), images=firsts.images)
    engine = vllm_process.build("vllm", replace(vision_spec(kind, "Generates"), max_num_seqs=16, max_model_len=1024))
    vllm_process.send(encoder_calls, engine._place)
    vllm_process.receive()
    for version in range(2):
        rollouts = check(engine, trainer, prompts, version)
        vllm_process.send(encoder_calls, engine._place)
        assert vllm_process.receive() <= 7
        trainer.update(minibatch(firsts, step=version), LikelihoodLoss())
        assert np.abs(trainer.logprobs(rollouts, 1.0).values.values - rollouts.logprobs.values).max() > 1e-3
        engine.load_weights(list(trainer.weights()), version + 1)
    greedy = engine.generate(prompts, Sampling(max_tokens=6, temperature=0.0))
    assert greedy.response_ids.values.max() < 100


def check(engine: RemoteEngine, trainer: TorchEngine, prompts: Prompts, version: int) -> Rollouts:
    rollouts: Rollouts = engine.generate(prompts, SAMPLING)
    scored = trainer.logprobs(rollouts, 1.0).values.values
    np.testing.assert_allclose(rollouts.logprobs.values, scored, atol=2e-6)
    assert set(rollouts.versions.values.tolist()) == {version}
    return rollouts


def test_a_sync_of_the_language_part_and_text_without_its_images(vllm_process: EngineProcess) -> None:
    """A frozen tower stays as it is. Prompts with the images of others are refused."""
    of = replace(vision_spec("idefics3", "Generates"), synced_parts=("language",))
    engine = vllm_process.build("vllm", replace(of, max_num_seqs=16, max_model_len=1024))
    trainer = TorchEngine(replace(of, capabilities=frozenset({"Trains", "Scores"}), optimizer=Optimizer()))
    firsts = build_case("idefics3").sequences.take(np.array([0, 6]))
    assert firsts.images is not None
    trainer.update(minibatch(firsts), LikelihoodLoss())
    engine.load_weights(list(trainer.weights()), 1)
    check(engine, trainer, Prompts(keys=firsts.keys, ids=firsts.prompt_ids, rows=[{}] * 2, images=firsts.images), 1)
    prompts = Prompts(
        keys=firsts.keys, ids=firsts.prompt_ids, rows=[{}] * 2, images=firsts.images.take(np.array([1, 0]))
    )
    with pytest.raises(EngineError, match="tokens that stand for images"):
        engine.generate(prompts, SAMPLING)
