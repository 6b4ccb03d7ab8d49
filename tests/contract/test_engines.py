"""The contract of every engine with a capability, whichever its library is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlflow.batch import Minibatch
from rlflow.engines.base import Sampling, Sleeps
from rlflow.engines.registry import engine_kind, engine_names
from rlflow.errors import EngineError
from rlflow.nodes.critic import ValueLoss
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.recipe import Model, Optimizer
from tests.helpers import minibatch, prompts, sequences, spec
from tests.integration.engine_process import EngineProcess, free_address, processes

SHARED_PROCESSES = "vLLM"

# Builds an engine by its name, from the options of ``tests.helpers.spec``.
Build = Callable[..., Any]


def able(*capabilities: str) -> list[Any]:
    """Return the engines with all of these capabilities. Engines with a process of their own are slow."""
    return [
        pytest.param(name, marks=[pytest.mark.slow] if engine_kind(name).package else [])
        for name in engine_names()
        if engine_kind(name).capabilities.issuperset(capabilities)
    ]


@pytest.fixture(scope="module")
def build(request: pytest.FixtureRequest) -> "Iterator[Build]":
    """Yield a function that builds engines, those of a library in one process."""
    with ExitStack() as running:

        @cache
        def process(name: str) -> EngineProcess:
            if name == "vllm":
                return request.getfixturevalue("vllm_process")  # type: ignore[no-any-return]
            return running.enter_context(processes(1, name))[0]

        def build(name: str, **options: Any) -> Any:
            if engine_kind(name).package is None:
                return engine_kind(name).engine(spec(**options))
            return process(name).build(name, replace(spec(**options), address=free_address()))

        yield build


def test_every_file_is_an_engine() -> None:
    assert engine_names() == ["deepspeed", "fake", "fsdp", "torch", "transformers", "vllm"]
    assert engine_kind("fake").capabilities == {"Generates", "Scores", "Values", "Evaluates", "Trains", "Follows"}
    assert engine_kind("torch").capabilities == {"Scores", "ScoresBase", "ScoresTop", "Values", "Evaluates", "Trains"}
    assert engine_kind("transformers").capabilities == {"Generates", "Scores", "ScoresTop", "Follows"}


@pytest.mark.parametrize("name", able("Generates"))
class TestGenerates:
    def test_a_group_for_each_prompt_in_the_order_of_keys(self, build: Build, name: str) -> None:
        given = prompts((3, 5, 2), step=7)
        out = build(name).generate(given, Sampling(max_tokens=6, group_size=4))
        assert out.keys.tolist() == [[7, prompt, sample] for prompt in range(3) for sample in range(4)]
        assert [row.tolist() for row in map(out.prompt_ids.__getitem__, range(12))] == [
            given.ids[prompt].tolist() for prompt in range(3) for _ in range(4)
        ]
        assert len(out.texts) == len(out.rows) == len(out.finished) == 12

    def test_every_token_has_its_logprob_and_version(self, build: Build, name: str) -> None:
        out = build(name).generate(prompts(), Sampling(max_tokens=6, group_size=4))
        assert out.response_ids.lengths.min() >= 1
        assert out.response_ids.lengths.max() <= 6
        assert out.response_ids.values.dtype == np.int32
        assert (out.logprobs.offsets == out.response_ids.offsets).all()
        assert (out.logprobs.values <= 0).all()
        assert set(out.versions.values.tolist()) == {0}

    def test_a_sample_depends_on_its_key_and_the_seed_alone(self, build: Build, name: str) -> None:
        given, sampling = prompts((3, 5, 2)), Sampling(max_tokens=6, group_size=4)
        whole = build(name).generate(given, sampling)
        part = build(name).generate(given.take(np.array([2])), sampling)
        assert part.response_ids.values.tolist() == whole.response_ids.take(np.arange(8, 12)).values.tolist()
        other = build(name, seed=1).generate(given, sampling)
        assert other.response_ids.values.tolist() != whole.response_ids.values.tolist()
        next_step = build(name).generate(prompts((3, 5, 2), step=1), sampling)
        assert next_step.response_ids.values.tolist() != whole.response_ids.values.tolist()

    def test_a_response_ends_with_a_token_that_stops_it(self, build: Build, name: str) -> None:
        engine, sampling = build(name), Sampling(max_tokens=6, group_size=4)
        plain = engine.generate(prompts(), sampling)
        # The second token of some response, if it is nowhere the last.
        stop = next(int(row[1]) for row in map(plain.response_ids.__getitem__, range(12)) if len(row) > 2)
        out = engine.generate(prompts(), replace(sampling, stop_ids=(stop,)))
        for row in range(12):
            whole = plain.response_ids[row].tolist()
            ends = whole.index(stop) + 1 if stop in whole else len(whole)
            assert out.response_ids[row].tolist() == whole[:ends]
            assert out.finished[row] or not plain.finished[row]
            assert out.finished[row] == (plain.finished[row] or stop in whole)


@pytest.mark.parametrize("name", able("Scores"))
class TestScores:
    def test_a_number_for_each_response_token(self, build: Build, name: str) -> None:
        given = sequences([3, 2], [[4, 1], [2]])
        out = build(name, capabilities=["Scores"]).logprobs(given, 1.0).values
        assert (out.offsets == given.response_ids.offsets).all()
        assert out.values.dtype == np.float32
        assert (out.values <= 0).all()

    def test_the_cut_into_micro_batches_makes_no_difference(self, build: Build, name: str) -> None:
        given = sequences([3, 2, 4], [[4, 1], [2], [5, 5, 3]])
        whole, cut = (
            build(name, capabilities=["Scores"], micro_batch_tokens=size).logprobs(given, 1.0).values
            for size in (4096, 8)
        )
        assert cut.values == pytest.approx(whole.values, abs=1e-6)


@pytest.mark.parametrize("name", able("Scores", "Generates"))
@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_what_is_generated_is_scored_alike(build: Build, name: str, temperature: float) -> None:
    engine = build(name)
    out = engine.generate(prompts(), Sampling(max_tokens=6, group_size=4, temperature=temperature))
    assert out.temperature == (temperature or 1.0)
    assert engine.logprobs(out, out.temperature).values.values == pytest.approx(out.logprobs.values, abs=1e-5)


@pytest.mark.parametrize("name", able("Values"))
def test_values(build: Build, name: str) -> None:
    given = sequences([3, 2], [[4, 1], [2]])
    out = build(name, capabilities=["Values"]).values(given).values
    assert (out.offsets == given.response_ids.offsets).all()
    assert np.isfinite(out.values).all()


@pytest.mark.parametrize("name", able("Values", "Trains"))
class TestTrainsValues:
    """A role whose values are asked for is trained on these."""

    ASKED = ("Values", "Trains")
    GIVEN = sequences([3, 2], [[4, 1], [2]])
    LOSS = ValueLoss(clip_eps=None)

    def batch(self) -> Minibatch:
        size = len(self.GIVEN.response_ids.values)
        return minibatch(self.GIVEN, returns=np.linspace(0.5, 2, size), old_values=np.zeros(size))

    def test_values_come_nearer_to_the_returns(self, build: Build, name: str) -> None:
        engine, batch = build(name, capabilities=self.ASKED), self.batch()
        losses = [engine.update(batch, self.LOSS).values["loss"] for _ in range(5)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]

    def test_it_goes_on_from_what_it_saved(self, build: Build, name: str, tmp_path: Path) -> None:
        engine, other = (build(name, capabilities=self.ASKED) for _ in range(2))
        engine.update(self.batch(), self.LOSS)
        engine.save(tmp_path)
        other.restore(tmp_path)
        for _ in range(2):
            assert other.update(self.batch(), self.LOSS) == engine.update(self.batch(), self.LOSS)
        assert other.values(self.GIVEN).values.values.tolist() == engine.values(self.GIVEN).values.values.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", [each for each in able("Values", "Trains") if each.values[0] != "fake"])
def test_what_it_exports_has_the_same_values(build: Build, name: str, tmp_path: Path) -> None:
    engine, given = build(name, capabilities=["Values", "Trains"]), TestTrainsValues.GIVEN
    engine.update(TestTrainsValues().batch(), TestTrainsValues.LOSS)
    engine.export(tmp_path)
    again = build(name, capabilities=["Values"], model=Model(path=str(tmp_path), dtype="float32"))
    assert again.values(given).values.values == pytest.approx(engine.values(given).values.values, abs=1e-6)


@pytest.mark.parametrize("name", able("Evaluates"))
def test_a_reward_for_each_response(build: Build, name: str) -> None:
    given = sequences([3, 2, 4], [[4, 1], [2], [5, 5, 3]])
    whole, cut = (
        build(name, capabilities=["Trains", "Evaluates"], micro_batch_tokens=size).evaluate(given).values
        for size in (4096, 8)
    )
    assert whole.shape == (6,)
    assert np.isfinite(whole).all()
    assert cut == pytest.approx(whole, abs=1e-6)


@pytest.mark.parametrize("name", able("Trains"))
class TestTrains:
    def test_the_loss_falls(self, build: Build, name: str) -> None:
        engine, batch = build(name, capabilities=["Trains"]), minibatch(sequences([3, 2], [[4, 1], [2]]))
        losses = [engine.update(batch, LikelihoodLoss()).values["loss"] for _ in range(5)]
        assert losses == sorted(losses, reverse=True)
        assert losses[-1] < losses[0]

    def test_it_goes_on_from_what_it_saved(self, build: Build, name: str, tmp_path: Path) -> None:
        batch = minibatch(sequences([3, 2], [[4, 1], [2]]))
        engine, other = build(name, capabilities=["Trains"]), build(name, capabilities=["Trains"])
        engine.update(batch, LikelihoodLoss())
        engine.save(tmp_path)
        other.restore(tmp_path)
        assert other.update(batch, LikelihoodLoss()) == engine.update(batch, LikelihoodLoss())
        for (name_of_one, value), (name_of_other, same) in zip(engine.weights(), other.weights(), strict=True):
            assert name_of_one == name_of_other
            assert (same == value).all()

    def test_weights_that_are_not_finite_end_the_update(self, build: Build, name: str) -> None:
        if name == "fake":
            pytest.skip("its one weight is a count")
        engine = build(name, capabilities=["Trains"], optimizer=Optimizer(learning_rate=1e39))
        with pytest.raises(
            EngineError, match=r"role actor: \S+weight and .* not finite after an update with learning rate 1e\+39"
        ):
            engine.update(minibatch(sequences([3, 2], [[4, 1], [2]])), LikelihoodLoss())

    def test_it_exports(self, build: Build, name: str, tmp_path: Path) -> None:
        build(name, capabilities=["Trains"]).export(tmp_path)
        assert any(tmp_path.iterdir())


@pytest.mark.parametrize("name", able("Follows"))
def test_weights_come_with_their_version(build: Build, name: str) -> None:
    leader = build("fake" if name == "fake" else "torch")
    engine = build(name)
    leader.update(minibatch(sequences([3], [[4]])), LikelihoodLoss())
    engine.load_weights(list(leader.weights()), 5)
    out = engine.generate(prompts(), Sampling(max_tokens=3))
    assert set(out.versions.values.tolist()) == {5}


@pytest.mark.parametrize(
    "name", [each for each in able("Follows") if issubclass(engine_kind(each.values[0]).engine, Sleeps)]
)
def test_weights_come_before_it_is_quite_awake(build: Build, name: str) -> None:
    engine = build(name)
    leader = build("fake" if name == "fake" else "torch")
    engine.sleep()
    with pytest.raises(EngineError, match="asleep"):
        engine.load_weights(list(leader.weights()), 4)
    engine.wake(True)
    engine.load_weights(list(leader.weights()), 5)
    with pytest.raises(EngineError, match="asleep"):
        engine.generate(prompts(), Sampling(max_tokens=3))
    engine.wake()
    assert set(engine.generate(prompts(), Sampling(max_tokens=3)).versions.values.tolist()) == {5}
