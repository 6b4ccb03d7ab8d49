"""Tensor parallelism on ranks of the FSDP engine, against the plain engine on one."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlflow.engines.base import EngineSpec
from rlflow.errors import EngineError, RecipeError
from rlflow.recipe import Model
from tests.expert_models import save_model
from tests.helpers import ARCHITECTURE, CHARACTERS, MODEL
from tests.integration.engine_process import EngineProcess, all_of, free_address, processes
from tests.integration.test_deepspeed import GIVEN, LOSS, of_path, policy_minibatch
from tests.integration.test_fsdp import MUON, actor, assert_equal_training, assert_same_weights, of_ranks, plain, shares

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

# Ranks share a vocabulary evenly.
EVEN = replace(MODEL, characters=f"{CHARACTERS}-", architecture=replace(ARCHITECTURE, vocab_size=14))
TIED = replace(EVEN, architecture=replace(ARCHITECTURE, vocab_size=14, tie_word_embeddings=True))


def wide(ranks: int = 2, tensor: int = 2, **layout: Any) -> EngineSpec:
    """Return the spec of a role on so many ranks, of which neighbours have a part of each layer."""
    of = actor(ranks, **layout)
    data = of.layout.data_parallel_size // tensor
    return replace(of, model=EVEN, layout=replace(of.layout, data_parallel_size=data, tensor_parallel_size=tensor))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Return a model with experts in a folder."""
    return save_model(tmp_path_factory.mktemp("qwen3_moe"), "qwen3_moe", tokens=EVEN)


@pytest.mark.parametrize(
    "of",
    [
        wide(),
        wide(gradient_checkpointing=True, reduces_once=True),
        replace(wide(), model=TIED),
        replace(wide(), optimizer=MUON),
    ],
    ids=["untied", "recomputed", "tied", "muon"],
)
def test_it_trains_as_one_rank_does(two: Sequence[EngineProcess], address: str, of: EngineSpec) -> None:
    assert_equal_training(of_ranks(two, address, of), of)


def test_ranks_with_a_part_of_each_layer_divide_experts(
    two: Sequence[EngineProcess], address: str, sparse: Any
) -> None:
    of = replace(wide(expert_parallel_size=2), model=sparse)
    assert_equal_training(of_ranks(two, address, of), of)
    whole = replace(of, layout=replace(of.layout, expert_parallel_size=1))
    with pytest.raises(RecipeError, match="groups of 1 ranks for experts do not consist of 2"):
        of_ranks(two, address, whole)


@pytest.mark.soak
def test_four_ranks_are_parallel_in_two_ways(sparse: Any) -> None:
    with processes(4) as four:
        for of in (wide(4), wide(4, replicas=2), wide(4, sequence=2), replace(wide(4, sequence=2), model=TIED)):
            assert_equal_training(of_ranks(four, free_address(), of), of)
        for size in (2, 4):
            of = replace(wide(4, expert_parallel_size=size), model=sparse)
            assert_equal_training(of_ranks(four, free_address(), of), of)


def forget_other_heads(engines: list[Any], place: int) -> None:
    """Leave the other rank's heads out of the gradients of the norms of queries and keys."""
    for name, module in engines[place]._model.named_modules():
        if name.endswith(("q_norm", "k_norm")):
            del module.forward


def halve_sums(engines: list[Any], place: int) -> None:
    from torch.distributed.fsdp import FSDPModule

    for module in engines[place]._model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(2.0)


def forget_other_shards(engines: list[Any], place: int) -> None:
    """Leave the other rank's shards out of the norm of the gradients."""
    engines[place]._sum_over_shards = lambda value: value


@pytest.mark.parametrize("mistake", [forget_other_heads, halve_sums, forget_other_shards])
def test_a_mistake_is_noticed(two: Sequence[EngineProcess], address: str, mistake: Any) -> None:
    of = wide() if mistake is forget_other_heads else actor()
    ranks = of_ranks(two, address, of)
    all_of(two, mistake, ranks._places)
    with pytest.raises(AssertionError):
        assert_equal_training(ranks, of)


@pytest.mark.parametrize("model", [EVEN, TIED], ids=["untied", "tied"])
def test_checkpoints_and_exports_fit_any_ranks(
    two: Sequence[EngineProcess], single: Sequence[EngineProcess], address: str, tmp_path: Path, model: Any
) -> None:
    of, on_shards, alone = (replace(spec, model=model) for spec in (wide(), actor(), actor(1)))
    first, second = of_ranks(two, address, of), of_ranks(two, address, on_shards)
    one = of_ranks(single, free_address(), alone)
    first.update([policy_minibatch(0)] * 2, [LOSS] * 2)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first.save([tmp_path / "first"] * 2)
    second.restore([tmp_path / "first"] * 2)
    one.restore([tmp_path / "first"])
    for other in (second, one):
        assert_same_weights(other.weights()[0], first.weights()[0])
    batch = policy_minibatch(1)
    for ranks, spec in ((first, of), (second, on_shards), (one, alone)):
        parts = shares(spec, batch)
        ranks.update(parts, [LOSS] * len(parts))
        assert_same_weights(ranks.weights()[0], first.weights()[0], 1e-5)
    second.save([tmp_path / "second"] * 2)
    first.restore([tmp_path / "second"] * 2)
    assert_same_weights(first.weights()[0], second.weights()[0])
    first.export([tmp_path / "model"] * 2)
    again = plain(replace(of, model=of_path(tmp_path / "model")))
    assert_same_weights(list(again.weights()), first.weights()[0])


def test_values_and_bfloat16(two: Sequence[EngineProcess], address: str, tmp_path: Path) -> None:
    """A new value head is that of one rank, and weights leave as the file has them, rounded to bfloat16."""
    saved = plain(replace(actor(), model=EVEN))
    saved.export(tmp_path)
    of = replace(wide(), model=of_path(tmp_path), capabilities=frozenset({"Trains", "Values"}))
    parts = of_ranks(two, address, of).values([GIVEN] * 2)
    expected = plain(of).values(GIVEN).values.values
    for part in parts:
        assert part.values.values == pytest.approx(expected, abs=1e-6)
    rounded = replace(wide(), model=replace(of_path(tmp_path), dtype="bfloat16"))
    for (name, value), (_, exact) in zip(of_ranks(two, address, rounded).weights()[0], saved.weights(), strict=True):
        assert torch.equal(value, exact.bfloat16()), name


def test_what_ranks_cannot_share_evenly_is_refused(two: Sequence[EngineProcess], address: str) -> None:
    with pytest.raises(EngineError, match=r"Qwen3ForCausalLM cannot be tensor-parallel: .* a width of 13"):
        of_ranks(two, address, replace(wide(), model=MODEL))
    few = replace(ARCHITECTURE, vocab_size=14, num_key_value_heads=1)
    with pytest.raises(EngineError, match=r"2 ranks cannot share 4 attention heads \(1 of keys and values\)"):
        of_ranks(two, address, replace(wide(), model=replace(EVEN, architecture=few)))


def test_scores_are_those_of_the_whole_vocabulary(two: Sequence[EngineProcess], address: str) -> None:
    of = wide()
    scores = of_ranks(two, address, of).logprobs([GIVEN] * 2, [0.7] * 2)
    expected = plain(of).logprobs(GIVEN, 0.7).values.values
    for part in scores:
        assert part.values.values == pytest.approx(expected, abs=1e-6)
    assert expected.std() > 0.01
