"""DeepSpeed on two ranks against the plain engine on one."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Minibatch
from rlflow.engines.base import EngineSpec
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.losses import ClippedPolicyLoss
from rlflow.recipe import Optimizer
from rlflow.resources.layout import Layout
from tests.helpers import minibatch, sequences, spec
from tests.integration.engine_process import EngineProcess, all_of, call, processes

pytestmark = pytest.mark.slow

GIVEN = sequences([3, 6, 2], [[4, 9, 1], [2, 7], [5]])
STEPS = 5


@pytest.fixture(scope="module")
def two() -> "Iterator[Sequence[EngineProcess]]":
    with processes(2) as started:
        yield started


@pytest.fixture(scope="module")
def address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def build_deepspeed(engines: list[Any], of: EngineSpec, sgd: bool) -> int:
    """In the child. DeepSpeed keeps small weights whole, which here would be all of them."""
    import torch

    from rlflow.engines import deepspeed
    from rlflow.engines.sharded.settings import deepspeed_config

    def config(of: EngineSpec, *, trains: bool) -> dict[str, Any]:
        usual = deepspeed_config(of, trains=trains)
        return usual | {"zero_optimization": usual["zero_optimization"] | {"stage3_param_persistence_threshold": 0}}

    vars(deepspeed)["deepspeed_config"] = config

    class Engine(deepspeed.DeepSpeedEngine):
        def _optimizer(self, parameters: Any) -> Any:
            if sgd:
                return torch.optim.SGD(parameters, lr=self._spec.optimizer.learning_rate)
            return super()._optimizer(parameters)

    engines.append(Engine(of))
    return len(engines) - 1


class Ranks:
    """An engine on both ranks: ``update`` and the like split rows as the caller says."""

    def __init__(self, two: Sequence[EngineProcess], of: EngineSpec, address: str, sgd: bool = False) -> None:
        self._two = two
        specs = [replace(of, rank=rank, world_size=2, address=address) for rank in range(2)]
        self._places = all_of(two, build_deepspeed, specs, [sgd, sgd])

    def __getattr__(self, method: str) -> Any:
        """Called with a value for each rank of every argument; returns what each rank did."""
        return lambda *arguments: all_of(self._two, call, self._places, [method] * 2, *arguments)


def actor(stage: int, sequence_parallel_size: int = 1, **options: Any) -> EngineSpec:
    layout = Layout(
        micro_batch_tokens=16,
        zero_stage=stage,
        data_parallel_size=2 // sequence_parallel_size,
        sequence_parallel_size=sequence_parallel_size,
        **options,
    )
    return replace(spec(capabilities=["Trains", "Scores"], optimizer=Optimizer(learning_rate=1e-2)), layout=layout)


def policy_minibatch(step: int) -> Minibatch:
    draw = np.random.default_rng(step)
    size = len(GIVEN.response_ids.values)
    old = {"old_logprobs": draw.normal(-2.5, 0.2, size), "reference": draw.normal(-2.5, 0.2, size)}
    batch = minibatch(GIVEN, advantages=draw.normal(0, 1, size), **old)
    batch.keys[:, 0] = step
    return batch


LOSS = ClippedPolicyLoss(clip_eps=0.2, kl_coef=0.1, temperature=0.9)


def split(batch: Any) -> list[Any]:
    """Five rows and one: ranks need not have the same number of rows, or of micro-batches."""
    return [batch.take(np.arange(5)), batch.take(np.array([5]))]


def plain(sgd: bool) -> TorchEngine:
    import torch

    engine = TorchEngine(spec(optimizer=Optimizer(learning_rate=1e-2)))
    if sgd:
        engine._optimizer = torch.optim.SGD(engine._model.parameters(), lr=1e-2)  # type: ignore[assignment]
    return engine


@pytest.mark.parametrize("sgd", [True, False])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_trains_as_the_plain_engine_does(two: Sequence[EngineProcess], address: str, stage: int, sgd: bool) -> None:
    ours, reference = Ranks(two, actor(stage), address, sgd), plain(sgd)
    for step in range(STEPS):
        batch = policy_minibatch(step)
        first, second = ours.update(split(batch), [LOSS] * 2)
        assert first == second
        expected = reference.update(batch, LOSS).values
        assert first.values.keys() == expected.keys()
        assert expected["grad_norm"] > 0.01
        assert first.values["loss"] == pytest.approx(expected["loss"], abs=1e-5 if sgd else 1e-4)
        if sgd:
            assert first.values == pytest.approx(expected, abs=1e-5)
    weights = dict(reference.weights())
    for name, value in ours.weights()[0]:
        difference = float((value - weights.pop(name)).abs().max())
        assert difference <= (1e-6 if sgd else 1e-3), name
    assert not weights
