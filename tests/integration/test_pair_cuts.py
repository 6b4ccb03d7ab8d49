"""Pairs, cut in many ways: the gradients of what compares them are the same, for logprobs and for a reward head."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Metrics, Minibatch
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.minibatches import Weighting
from rlflow.nodes.preference import DpoLoss, RankingLoss
from rlflow.recipe import Model
from tests.helpers import minibatch, pairs
from tests.integration.engine_process import EngineProcess, all_of, free_address
from tests.integration.test_cuts import (
    Cut,
    Gradients,
    all_and_none,
    build,
    compare,
    evenly,
    gradients,
    plain,
    spec_of,
)

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

# Stand-ins for nodes, of which ``gradients`` uses only the loss.
DPO: Any = SimpleNamespace(loss=lambda temperature: DpoLoss(beta=0.5, temperature=temperature), head="Scores")
REWARD: Any = SimpleNamespace(loss=lambda temperature: RankingLoss(), head="Evaluates")
GIVEN = pairs(7)


def batch() -> Minibatch:
    lengths = GIVEN.response_ids.lengths
    reference = np.random.default_rng(0).normal(-2.5, 0.2, lengths.sum())
    weights = Weighting(aggregation="sequence").weights(lengths, np.ones(len(lengths), np.bool_), GIVEN.keys[:, :2])
    return replace(minibatch(GIVEN, 0, reference=reference), weights=weights)


def spec_for(node: Any, *arguments: Any) -> Any:
    return replace(spec_of(*arguments), capabilities=frozenset({"Trains", node.head}))


def pair_gradients(engines: list[Any], place: int, given: Minibatch, tokens: int, name: str) -> Any:
    """Return the gradients of pairs, in the child process."""
    return gradients(engines, place, given, tokens, {"Scores": DPO, "Evaluates": REWARD}[name])


@cache
def in_one_pass(name: str) -> tuple[Gradients, Metrics]:
    node = {"Scores": DPO, "Evaluates": REWARD}[name]
    return gradients([plain(spec_for(node, None, 1))], 0, batch(), 4096, node)


@pytest.fixture(scope="module")
def places(two: Sequence[EngineProcess]) -> Callable[[Any, int | None, int], list[int]]:
    """Return a function that builds an engine in each process, and returns its places there."""
    address = free_address()

    @cache
    def built(head: str, stage: int | None, size: int) -> list[int]:
        node = {"Scores": DPO, "Evaluates": REWARD}[head]
        return all_of(two, build, [spec_for(node, stage, size, rank, 2, address) for rank in range(2)])

    return lambda node, stage, size: built(node.head, stage, size)


@pytest.mark.parametrize("node", [DPO, REWARD], ids=["dpo", "reward"])
@pytest.mark.parametrize("tokens", [90, 40, 1])
def test_on_one_rank(tokens: int, node: Any) -> None:
    """With one token per micro-batch, each pair has a pass of its own."""
    compare(gradients([plain(spec_for(node, None, 1))], 0, batch(), tokens, node), in_one_pass(node.head))


@pytest.mark.parametrize("node", [DPO, REWARD], ids=["dpo", "reward"])
@pytest.mark.parametrize(
    "cut", [Cut(40), Cut(40, 0, evenly), Cut(22, 3, evenly), Cut(40, 2, all_and_none), Cut(22, 3)], ids=str
)
def test_on_two_ranks(
    cut: Cut, node: Any, two: Sequence[EngineProcess], places: Callable[[Any, int | None, int], list[int]]
) -> None:
    """Two of which share each sequence, where there is no other split."""
    given = batch()
    parts = [given] * 2 if cut.split is None else cut.split(given)
    engine = places(node, cut.stage, 2 if cut.split is None else 1)
    for ours in all_of(two, pair_gradients, engine, parts, [cut.tokens] * 2, [node.head] * 2):
        compare(ours, in_one_pass(node.head))


def export(engines: list[Any], place: int, folder: Path) -> Any:
    """Export the model in the child process, and return its rewards of the first pairs."""
    engines[place].export(folder)
    return engines[place].evaluate(GIVEN).values


@pytest.mark.parametrize("stage", [0, 3])
def test_a_sharded_reward_model_from_a_folder_and_back(
    stage: int, two: Sequence[EngineProcess], places: Callable[[Any, int | None, int], list[int]], tmp_path: Path
) -> None:
    said = all_of(two, export, places(REWARD, stage, 1), [tmp_path / "model"] * 2)
    of = replace(spec_for(REWARD, None, 1), model=Model(path=str(tmp_path / "model"), dtype="float32"))
    alone = TorchEngine(replace(of, capabilities=frozenset({"Evaluates"}))).evaluate(GIVEN).values
    for values in said:
        assert values == pytest.approx(alone, abs=1e-6)
    address = free_address()
    specs = [replace(spec_for(REWARD, stage, 1, rank, 2, address), model=of.model) for rank in range(2)]
    again = all_of(two, build, [replace(each, capabilities=frozenset({"Evaluates"})) for each in specs])
    for values in all_of(two, export, again, [tmp_path / "again"] * 2):
        assert values == pytest.approx(alone, abs=1e-6)
