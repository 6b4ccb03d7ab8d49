"""Ranks of the FSDP engine against the plain engine on one, and against DeepSpeed."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded.trained_state import MOMENTS
from rlflow.engines.torch import TorchEngine
from rlflow.errors import EngineError, NotFiniteError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Optimizer
from rlflow.resources.layout import Layout
from rlflow.resources.models.lora import Lora
from tests.helpers import ARCHITECTURE, MODEL, minibatch, sequences, spec
from tests.integration.engine_process import EngineProcess, all_of, free_address, processes
from tests.integration.test_deepspeed import (
    GIVEN,
    LOSS,
    Ranks,
    build_deepspeed,
    of_path,
    policy_minibatch,
    split,
    with_sgd,
)

SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.slow

LORA = Lora(rank=4, alpha=6, b_learning_rate=4.0)
MUON = Optimizer(kind="muon", learning_rate=1e-4)


def build_fsdp(engines: list[Any], of: EngineSpec, sgd: bool) -> int:
    """Build an engine in the child process."""
    from rlflow.engines.fsdp import FsdpEngine

    engines.append(with_sgd(FsdpEngine, sgd)(of))
    return len(engines) - 1


def actor(ranks: int = 2, sequence: int = 1, replicas: int = 1, **layout: Any) -> EngineSpec:
    """Return the spec of a role on so many ranks. At this rate Adam's step does not magnify rounding."""
    of = spec(capabilities=["Trains", "Scores"], optimizer=Optimizer(learning_rate=1e-4))
    degrees = Layout(
        micro_batch_tokens=16,
        data_parallel_size=ranks // sequence,
        sequence_parallel_size=sequence,
        num_replicas=replicas,
        zero_stage=3,
        **layout,
    )
    return replace(of, layout=degrees)


def plain(of: EngineSpec) -> TorchEngine:
    return TorchEngine(replace(of, layout=spec(micro_batch_tokens=16).layout))


def of_ranks(two: Sequence[EngineProcess], address: str, of: EngineSpec) -> Ranks:
    return Ranks(two, of, address, build=build_fsdp)


def shares(of: EngineSpec, batch: Any) -> list[Any]:
    """Return the rows of each rank, which need not have the same number of rows or micro-batches."""
    ends = {1: [6], 2: [5, 6], 4: [2, 4, 5, 6]}[of.layout.data_parallel_size]
    parts = [batch.take(np.arange(start, end)) for start, end in pairwise([0, *ends])]
    return [part for part in parts for _ in range(of.layout.ranks_per_share)]


def assert_equal_training(ranks: Ranks, of: EngineSpec) -> None:
    """Compare three steps with one rank in float32."""
    expected = plain(of)
    for step in range(3):
        batch = policy_minibatch(step)
        parts = shares(of, batch)
        first, *others = ranks.update(parts, [LOSS] * len(parts))
        assert all(other == first for other in others)
        metrics = expected.update(batch, LOSS).values
        assert first.values["loss"] == pytest.approx(metrics["loss"], abs=1e-6)
        assert first.values["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-5)
    weights = dict(expected.weights())
    for name, value in ranks.weights()[0]:
        assert float((value - weights.pop(name)).abs().max()) <= 1e-5, name
    assert not weights


@pytest.mark.parametrize(
    "of",
    [
        actor(reduces_once=True),
        actor(gradient_checkpointing=True, kept_layers=1),
        actor(replicas=2),
        actor(sequence=2, reduces_once=True),
        replace(actor(), model=replace(MODEL, architecture=replace(ARCHITECTURE, tie_word_embeddings=True))),
        replace(actor(reduces_once=True), lora=LORA),
        replace(actor(replicas=2), optimizer=MUON),
        replace(actor(), optimizer=MUON),
    ],
    ids=["fsdp", "checkpointing", "replicas", "ulysses", "tied", "lora", "muon in replicas", "muon"],
)
def test_it_trains_as_one_rank_does(two: Sequence[EngineProcess], address: str, of: EngineSpec) -> None:
    assert_equal_training(of_ranks(two, address, of), of)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_it_trains_as_deepspeed_does(two: Sequence[EngineProcess], address: str, zero_stage: int) -> None:
    """Every stage of ZeRO gives the same weights after three steps."""
    of = actor(reduces_once=True)
    zero = replace(of, layout=replace(of.layout, num_replicas=None, reduces_once=False, zero_stage=zero_stage))
    ours, theirs = of_ranks(two, address, of), Ranks(two, zero, address, build=build_deepspeed)
    for step in range(3):
        batch = split(policy_minibatch(step))
        metrics = [ranks.update(batch, [LOSS] * 2)[0].values for ranks in (ours, theirs)]
        assert metrics[0] == pytest.approx(metrics[1], rel=1e-5, abs=1e-6)
    assert_same_weights(ours.weights()[0], theirs.weights()[0], 1e-5)


@pytest.mark.soak
def test_two_replicas_of_two_ranks_each() -> None:
    """Each replica shares sequences or data, and reduces its gradients in every pass or once."""
    with processes(4) as four:
        for of in (actor(4, replicas=2), actor(4, sequence=2, replicas=2, reduces_once=True)):
            assert_equal_training(of_ranks(four, free_address(), of), of)


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_each_rank_scores_its_rows(two: Sequence[EngineProcess], address: str, zero_stage: int) -> None:
    of = replace(actor(), role="reference", capabilities=frozenset({"Scores"}))
    of = replace(of, layout=replace(of.layout, zero_stage=zero_stage))
    ours = of_ranks(two, address, of).logprobs(split(GIVEN), [0.7] * 2)
    expected = plain(of).logprobs(GIVEN, 0.7).values.values
    assert np.concatenate([part.values.values for part in ours]) == pytest.approx(expected, abs=1e-6)


def count_gathered(engines: list[Any], place: int) -> int:
    from torch.distributed.tensor import DTensor

    return sum(not isinstance(weight, DTensor) for weight in engines[place]._model.parameters())


def test_scoring_leaves_nothing_gathered(two: Sequence[EngineProcess], address: str) -> None:
    ranks = of_ranks(two, address, actor())
    ranks.logprobs(split(GIVEN), [1.0] * 2)
    assert all_of(two, count_gathered, ranks._places) == [0, 0]


def test_a_new_value_head_is_that_of_one_rank(two: Sequence[EngineProcess], address: str, tmp_path: Path) -> None:
    plain(actor()).export(tmp_path)
    of = replace(actor(), model=of_path(tmp_path), capabilities=frozenset({"Trains", "Values"}))
    parts = of_ranks(two, address, of).values(split(GIVEN))
    expected = plain(of).values(GIVEN).values.values
    assert np.concatenate([part.values.values for part in parts]) == pytest.approx(expected, abs=1e-6)
    assert expected.std() > 1e-4


@pytest.mark.parametrize("lora", [None, LORA])
def test_a_model_with_tied_weights_from_a_folder_and_back(
    two: Sequence[EngineProcess], address: str, lora: Lora | None, tmp_path: Path
) -> None:
    tied = replace(MODEL, architecture=replace(ARCHITECTURE, tie_word_embeddings=True))
    plain(replace(actor(), model=tied)).export(tmp_path / "first")
    of = replace(actor(reduces_once=True), model=of_path(tmp_path / "first"), lora=lora)
    ours = of_ranks(two, address, of)
    assert_equal_training(ours, of)
    ours.export([tmp_path / "second"] * 2)
    scores = [part.values.values for part in ours.logprobs(split(GIVEN), [0.9] * 2)]
    again = plain(replace(actor(), model=of_path(tmp_path / "second")))
    assert again.logprobs(GIVEN, 0.9).values.values == pytest.approx(np.concatenate(scores), abs=1e-6)
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "second" / "config.json").read_text()


def test_a_checkpoint_goes_from_mesh_to_mesh_and_engine_to_engine(
    two: Sequence[EngineProcess], single: Sequence[EngineProcess], address: str, tmp_path: Path
) -> None:
    """The weights are the same, and so are those after two more steps: so is the optimizer's state."""
    first = of_ranks(two, address, actor(reduces_once=True))
    first.update(split(policy_minibatch(0)), [LOSS] * 2)
    first.save([tmp_path] * 2)
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors", ".json"}
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    first.save([tmp_path] * 2)
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    alone = replace(actor(1), address=free_address())
    others = [
        of_ranks(two, address, actor(replicas=2)),
        of_ranks(two, address, actor(sequence=2)),
        of_ranks(single, free_address(), alone),
        Ranks(two, replace(actor(), layout=replace(actor().layout, num_replicas=None)), address, build=build_deepspeed),
    ]
    reference = plain(actor())
    reference.restore(tmp_path)
    for other, of in zip(others, (actor(), actor(sequence=2), actor(1), actor()), strict=True):
        ranks = of.layout.num_gpus
        other.restore([tmp_path] * ranks)
        assert_same_weights(other.weights()[0], first.weights()[0])
    for step in (1, 2):
        batch = policy_minibatch(step)
        first.update(split(batch), [LOSS] * 2)
        reference.update(batch, LOSS)
        for other, of in zip(others, (actor(), actor(sequence=2), actor(1), actor()), strict=True):
            parts = shares(of, batch)
            other.update(parts, [LOSS] * len(parts))
    for other in others:
        assert_same_weights(other.weights()[0], first.weights()[0], 1e-5)
    assert_same_weights(list(reference.weights()), first.weights()[0], 1e-5)


def test_a_checkpoint_with_muon_goes_from_mesh_to_mesh(
    two: Sequence[EngineProcess], address: str, tmp_path: Path
) -> None:
    """A matrix has one moment, other weights have two."""
    first = of_ranks(two, address, replace(actor(), optimizer=MUON))
    first.update(split(policy_minibatch(0)), [LOSS] * 2)
    first.save([tmp_path] * 2)
    moments = {kind: {name for file in tmp_path.glob(f"{kind}-*") for name in load_file(file)} for kind in MOMENTS}
    only_first = moments["exp_avg"] - moments["exp_avg_sq"]
    assert {name.split(".")[-2].removesuffix("_proj") for name in only_first} == {
        *("q", "k", "v", "o"),
        *("gate", "up", "down"),
    }
    assert "model.embed_tokens.weight" in moments["exp_avg_sq"] < moments["exp_avg"]
    other = of_ranks(two, address, replace(actor(replicas=2), optimizer=MUON))
    other.restore([tmp_path] * 2)
    reference = plain(replace(actor(), optimizer=MUON))
    reference.restore(tmp_path)
    for step in (1, 2):
        batch = policy_minibatch(step)
        first.update(split(batch), [LOSS] * 2)
        other.update(split(batch), [LOSS] * 2)
        reference.update(batch, LOSS)
    assert_same_weights(other.weights()[0], first.weights()[0], 1e-5)
    assert_same_weights(list(reference.weights()), first.weights()[0], 1e-5)


def assert_same_weights(found: list[Any], expected: list[Any], tolerance: float = 0.0) -> None:
    assert [name for name, _ in found] == [name for name, _ in expected]
    for (name, value), (_, same) in zip(found, expected, strict=True):
        assert float((value - same).abs().max()) <= tolerance, name


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "exp_avg of .*: expected .* values, got"),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "Error while deserializing"),
    ],
)
def test_a_file_that_is_missing_or_cut_is_noticed(
    two: Sequence[EngineProcess], address: str, tmp_path: Path, damage: Any, message: str
) -> None:
    ranks = of_ranks(two, address, actor())
    ranks.update(split(policy_minibatch(0)), [LOSS] * 2)
    ranks.save([tmp_path] * 2)
    damage(tmp_path / "exp_avg-00001-00000.safetensors")
    with pytest.raises(EngineError, match=rf"role actor: '.*' cannot be restored .*{message}"):
        ranks.restore([tmp_path] * 2)
    ranks.logprobs(split(GIVEN), [0.7] * 2)


def test_bfloat16_has_masters_in_float32(two: Sequence[EngineProcess], address: str) -> None:
    """Steps smaller than bfloat16 can tell add up all the same."""
    of = replace(actor(reduces_once=True), model=replace(MODEL, dtype="bfloat16"))
    ours, expected = of_ranks(two, address, of), plain(replace(of, model=MODEL))
    first = [ours.update(split(minibatch(GIVEN)), [LikelihoodLoss()] * 2)[0].values["loss"] for _ in range(20)]
    exact = [expected.update(minibatch(GIVEN), LikelihoodLoss()).values["loss"] for _ in range(20)]
    assert first == pytest.approx(exact, abs=0.02)
    assert first[0] - first[-1] == pytest.approx(exact[0] - exact[-1], rel=0.2)
    assert {str(value.dtype) for _, value in ours.weights()[0]} == {"torch.bfloat16"}


def test_in_bfloat16_one_rank_computes_as_the_plain_engine_does(single: Sequence[EngineProcess]) -> None:
    of = replace(actor(1), model=replace(MODEL, dtype="bfloat16"))
    ours, expected = of_ranks(single, free_address(), of), plain(of)
    for step in range(3):
        batch = policy_minibatch(step)
        metrics = ours.update([batch], [LOSS])[0].values
        assert metrics == pytest.approx(expected.update(batch, LOSS).values, rel=1e-3)
    assert_same_weights(ours.weights()[0], list(expected.weights()), 1e-3)


def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(two: Sequence[EngineProcess], address: str) -> None:
    """A loss that is not finite on one rank, then gradients whose square is too large."""
    ours, undisturbed = of_ranks(two, address, actor(reduces_once=True)), of_ranks(two, address, actor())
    before = ours.weights()[0]
    broken, steep = policy_minibatch(0), policy_minibatch(0)
    broken.columns["advantages"].values[0] = np.inf
    steep.columns["advantages"].values[:] = 1e37
    for batch, message in ((broken, "the loss is nan at .* prompt 0 sample 0"), (steep, "grad_norm is (inf|nan)")):
        with pytest.raises(NotFiniteError, match=message):
            ours.update(split(batch), [LOSS] * 2)
        assert_same_weights(ours.weights()[0], before)
    for ranks in (ours, undisturbed):
        ranks.update(split(policy_minibatch(1)), [LOSS] * 2)
    assert_same_weights(ours.weights()[0], undisturbed.weights()[0], 1e-6)


def offload(engines: list[Any], place: int) -> tuple[int, int]:
    """Return the bytes of weights and of moments that leave the device. Sleep does nothing on CPUs."""
    engine = engines[place]
    engine._offload()
    memory = engine._offloaded_weights, engine._offloaded_state
    assert all(storage.nbytes() == 0 for part in memory for storage, _ in part._storages)
    sizes = [part.num_bytes for part in memory]
    engine.wake()
    return sizes[0], sizes[1]


def test_what_is_offloaded_comes_back(two: Sequence[EngineProcess], address: str) -> None:
    one, other = of_ranks(two, address, actor()), of_ranks(two, address, actor())
    for ranks in (one, other):
        ranks.update(split(policy_minibatch(0)), [LOSS] * 2)
    total = sum(value.nbytes for _, value in one.weights()[0])
    weights, moments = np.sum(all_of(two, offload, one._places), axis=0)
    assert weights >= total
    assert moments >= 2 * total
    batch = split(policy_minibatch(1))
    assert one.update(batch, [LOSS] * 2) == other.update(batch, [LOSS] * 2)


def count_messages(engines: list[Any], place: int, batch: Any, loss: Any, backend: str) -> tuple[dict[str, int], Any]:
    """Return how many collectives a step has, and its metrics; with a ``backend`` the layers are compiled."""
    from collections import Counter

    from torch.utils._python_dispatch import TorchDispatchMode

    from rlflow.engines.causal_lm.compilation import compile_layers

    class Messages(TorchDispatchMode):  # type: ignore[no-untyped-call]
        counts: Counter[str] = Counter()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace in ("c10d", "_c10d_functional"):
                self.counts[function.name().split("::")[1].split(".")[0].strip("_")] += 1
            return function(*args, **(kwargs or {}))

    if backend:
        compile_layers(engines[place]._model, backend)
        return {}, engines[place].update(batch, loss)
    engines[place].update(batch, loss)
    with Messages() as messages:  # type: ignore[no-untyped-call]
        metrics = engines[place].update(batch, loss)
    return dict(messages.counts), metrics


def test_a_step_gathers_twice_a_pass_and_reduces_once(two: Sequence[EngineProcess], address: str) -> None:
    """Seven groups: four layers, embeddings, output layer, and the last norm, which stays gathered for the gradient.

    Besides these, ranks sum the metrics and the norm.
    """
    of = actor(reduces_once=True, gradient_checkpointing=True)
    of = replace(of, model=replace(MODEL, architecture=replace(ARCHITECTURE, num_hidden_layers=4)))
    ranks = of_ranks(two, address, of)
    # Two passes of a row of 13 tokens on each rank.
    batches = [minibatch(sequences([9, 9], [[4], [4]], seed=seed)) for seed in (0, 1)]
    answers = all_of(two, count_messages, ranks._places, batches, [LikelihoodLoss()] * 2, [""] * 2)
    assert [counts for counts, _ in answers] == [{"allgather_base": 26, "reduce_scatter_base": 7, "allreduce": 3}] * 2


def test_compiled_layers_give_the_same(two: Sequence[EngineProcess], address: str) -> None:
    compiled, expected = of_ranks(two, address, actor()), of_ranks(two, address, actor())
    for step in range(2):
        batch = split(policy_minibatch(step))
        metrics = all_of(two, count_messages, compiled._places, batch, [LOSS] * 2, ["eager"] * 2)[0][1].values
        assert metrics == pytest.approx(expected.update(batch, [LOSS] * 2)[0].values, abs=1e-5)
