"""vLLM against transformers: the same weights give the same logprobs, whatever became of earlier weight syncs."""

import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Prompts, Rollouts
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.group_progress import GroupProgress, is_done
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.recipe import Model
from rlflow.resources.layout import Layout
from tests.helpers import ARCHITECTURE, CHARACTERS, MODEL, prompts, spec
from tests.integration.engine_process import EngineProcess, RemoteEngine, processes

SHARED_PROCESSES = "vLLM"
pytestmark = pytest.mark.slow

NUM_COPIES = pytest.mark.parametrize("copies", [2, pytest.param(20, marks=pytest.mark.soak)])
NUM_FAILURES = pytest.mark.parametrize("failures", [5, pytest.param(20, marks=pytest.mark.soak)])
# Logprobs in float32 differ by a few units in the last place, because the order of additions differs.
TOLERANCE = 1e-5
# Longer than a block of vLLM's cache, so that keys and values of old weights would be found in it.
GIVEN = prompts((70, 40, 5))
SAMPLING = Sampling(max_tokens=12, group_size=4)
GREEDY = Sampling(max_tokens=12, temperature=0.0)

LAYOUTS = {
    "alone": Layout(micro_batch_tokens=1),
    "pair": Layout(micro_batch_tokens=1, tensor_parallel_size=2),
}

Weights = list[tuple[str, torch.Tensor]]


def serving(**changes: Any) -> EngineSpec:
    model = replace(MODEL, architecture=replace(ARCHITECTURE, max_position_embeddings=256))
    return replace(spec("rollout", model=model), **({"max_model_len": 128, "max_num_seqs": 16} | changes))


@pytest.fixture(scope="module")
def process(vllm_process: EngineProcess) -> EngineProcess:
    return vllm_process


@pytest.fixture(scope="module")
def alone(process: EngineProcess) -> RemoteEngine:
    return process.build("vllm", serving())


@pytest.fixture(scope="module")
def pair() -> Iterator[RemoteEngine]:
    with processes(1, "vllm") as (started,):
        yield started.build("vllm", serving(layout=LAYOUTS["pair"]))


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    return TransformersEngine(serving())


@pytest.fixture(params=["alone", "pair"])
def engine(request: pytest.FixtureRequest) -> RemoteEngine:
    """Return an engine on one rank, and one that is tensor-parallel on two."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def layout(request: pytest.FixtureRequest) -> Layout:
    """Return the layout of ``engine``."""
    return LAYOUTS[request.node.callspec.params["engine"]]


def new_weights(seed: int) -> Weights:
    """Return weights far from those before, so that a layer with old weights would show."""
    model = TransformersEngine(replace(serving(), seed=seed))._model
    return [(name, tensor * 2) for name, tensor in model.state_dict().items()]


def difference(reference: TransformersEngine, out: Rollouts) -> float:
    scored = reference.logprobs(out, out.temperature).values.values
    return float(np.abs(scored - out.logprobs.values).max())


def check_weights(engine: RemoteEngine, reference: TransformersEngine, version: int) -> None:
    drawn, likeliest = engine.generate(GIVEN, SAMPLING), engine.generate(GIVEN, GREEDY)
    for out in (drawn, likeliest):
        assert set(out.versions.values.tolist()) == {version}
        assert difference(reference, out) < TOLERANCE
    assert likeliest.response_ids.values.tolist() == reference.generate(GIVEN, GREEDY).response_ids.values.tolist()


def check_against_fresh(engine: RemoteEngine, fresh: RemoteEngine) -> None:
    for sampling in (SAMPLING, GREEDY):
        out, expected = engine.generate(GIVEN, sampling), fresh.generate(GIVEN, sampling)
        assert out.response_ids.values.tolist() == expected.response_ids.values.tolist()
        assert out.logprobs.values == pytest.approx(expected.logprobs.values, abs=TOLERANCE)


@NUM_COPIES
def test_after_each_copy_logprobs_are_those_of_the_new_weights(
    engine: RemoteEngine,
    process: EngineProcess,
    reference: TransformersEngine,
    layout: Layout,
    copies: int,
    tmp_path: Path,
) -> None:
    """After each copy the tokens, drawn and likeliest, are those of a vLLM engine on one rank that has just
    been built from files with the same weights, and the logprobs equal to 1e-5; these are those of transformers too.
    The soak compares the engine on two ranks with new ones on two ranks as well, which take long to start, after the
    first sync and the last.
    """
    texts = set()
    for version in range(1, copies + 1):
        weights = new_weights(version)
        engine.load_weights(weights, version)
        reference.load_weights(weights, version)
        check_weights(engine, reference, version)
        texts.add(engine.generate(GIVEN, GREEDY).texts)
        folder = tmp_path / str(version)
        reference._model.save_pretrained(folder)
        load_tokenizer("policy", MODEL).save_pretrained(folder)
        model = Model(path=str(folder), dtype="float32")
        check_against_fresh(engine, process.build("vllm", serving(model=model)))
        if layout.tensor_parallel_size > 1 and copies > 2 and version in (1, copies):
            with processes(1, "vllm") as (another,):
                check_against_fresh(engine, another.build("vllm", serving(model=model, layout=layout)))
    assert len(texts) > copies / 2


@dataclass(frozen=True)
class BrokenOff:
    weights: Weights

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights
        raise OSError("the trainer is gone")


def broken(weights: Weights, kind: int, draw: np.random.Generator) -> tuple[Any, str]:
    place = int(draw.integers(1, len(weights)))
    name, tensor = weights[place]
    if kind == 0:
        return BrokenOff(weights[:place]), "failed .OSError: the trainer is gone"
    if kind == 1:
        return [*weights[:place], (name, tensor[:-1]), *weights[place + 1 :]], f"'{name}' does not fit"
    if kind == 2:
        return [*weights[:place], *weights[place + 1 :]], f"the weights lack '{name}'"
    return [*weights[:place], (f"{name}.another", tensor), *weights[place:]], r"another' does not fit"


@NUM_FAILURES
def test_a_copy_that_fails_midway_is_never_generated_from(
    engine: RemoteEngine, reference: TransformersEngine, failures: int
) -> None:
    draw = np.random.default_rng(0)
    for attempt in range(failures):
        bad, message = broken(new_weights(1000 + attempt), attempt % 4, draw)
        with pytest.raises(EngineError, match=message):
            engine.load_weights(bad, 1000 + attempt)
        with pytest.raises(EngineError, match="it cannot generate: its weights are incomplete"):
            engine.generate(GIVEN, SAMPLING)
        if attempt % 3:  # else the next failure comes on top of this one
            weights = new_weights(2000 + attempt)
            engine.load_weights(weights, attempt)
            reference.load_weights(weights, attempt)
            check_weights(engine, reference, attempt)


def load_unchecked(engines: list[Any], place: int, weights: Weights) -> None:
    """Load weights in the engine's process without rlflow's checks, so that vLLM meets those that do not fit."""
    engine = engines[place]
    expected, engine._expected = engine._expected, SimpleNamespace(check=lambda role, given: given)
    try:
        engine.load_weights(weights, 1)
    finally:
        engine._expected = expected


def test_a_copy_that_fails_inside_vllm(engine: RemoteEngine, reference: TransformersEngine) -> None:
    for attempt in range(3):
        weights = new_weights(3000 + attempt)
        place = next(at for at, (name, _) in enumerate(weights) if "layers.1.self_attn.k_proj" in name)
        name, tensor = weights[place]
        bad = [*weights[:place], (name, tensor[:3, :3]), *weights[place + 1 :]]
        engine._process.send(load_unchecked, engine._place, bad)
        with pytest.raises(EngineError, match="role rollout: weight sync 1 failed"):
            engine._process.receive()
        with pytest.raises(EngineError, match="it cannot generate: its weights are incomplete"):
            engine.generate(GIVEN, SAMPLING)
        engine.load_weights(weights, attempt)
        reference.load_weights(weights, attempt)
        check_weights(engine, reference, attempt)


def generate_at_once(engines: list[Any], place: int, groups: Sequence[Any], sampling: Sampling) -> list[Rollouts]:
    """Generate in the engine's process, with a thread for each group of prompts."""
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: engines[place].generate(group, sampling), groups))


def test_many_callers_get_what_one_gets(process: EngineProcess, alone: RemoteEngine) -> None:
    given = prompts(tuple(range(3, 43)))
    whole = alone.generate(given, SAMPLING)
    groups = [given.take(np.array([row])) for row in range(len(given))]
    process.send(generate_at_once, alone._place, groups, SAMPLING)
    parts = Rollouts.concatenate(process.receive())
    assert parts.keys.tolist() == whole.keys.tolist()
    assert parts.texts == whole.texts
    assert parts.response_ids.values.tolist() == whole.response_ids.values.tolist()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("top_p", [1.0, 0.4])
def test_logprobs_are_those_of_the_whole_distribution(
    alone: RemoteEngine, reference: TransformersEngine, temperature: float, top_p: float
) -> None:
    weights = new_weights(6)
    alone.load_weights(weights, 0)
    reference.load_weights(weights, 0)
    out = alone.generate(GIVEN, replace(SAMPLING, temperature=temperature, top_p=top_p))
    assert out.temperature == temperature
    assert difference(reference, out) < TOLERANCE


def test_top_p_cuts(alone: RemoteEngine) -> None:
    least = alone.generate(GIVEN, Sampling(max_tokens=12, top_p=1e-6))
    assert least.texts == alone.generate(GIVEN, GREEDY).texts
    assert least.logprobs.values.min() < -0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "llama"},
        {"model_type": "qwen2", "attention_bias": True, "hidden_size": 128},
        {"tie_word_embeddings": True},
    ],
    ids=["llama", "qwen2", "tied"],
)
def test_other_models(process: EngineProcess, changes: dict[str, Any]) -> None:
    model = replace(MODEL, architecture=replace(ARCHITECTURE, **changes))
    engine = process.build("vllm", serving(model=model, max_model_len=64))
    reference = TransformersEngine(spec(model=model))
    for version in range(3):
        assert difference(reference, engine.generate(prompts((40, 5)), SAMPLING)) < TOLERANCE
        weights = {name: torch.randn_like(tensor) / 8 for name, tensor in reference._model.state_dict().items()}
        if "tie_word_embeddings" in changes:
            weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        engine.load_weights(list(weights.items()), version)
        reference.load_weights(weights.items(), version)


def test_weights_of_another_type_are_rounded(process: EngineProcess, reference: TransformersEngine) -> None:
    engine = process.build("vllm", serving(model=replace(serving().model, dtype="bfloat16")))
    weights = new_weights(7)
    engine.load_weights(weights, 1)
    reference.load_weights(weights, 1)
    assert difference(reference, engine.generate(GIVEN, SAMPLING)) < 0.1


def test_a_response_ends_with_the_end_token_or_at_its_limit(alone: RemoteEngine) -> None:
    out = alone.generate(GIVEN, Sampling(max_tokens=12, group_size=16))
    assert 0 < out.finished.sum() < len(out)
    for row, finished in enumerate(out.finished):
        ids = out.response_ids[row]
        assert (ids[:-1] != 0).all()
        assert finished == (ids[-1] == 0)
        assert finished or len(ids) == 12
        assert out.texts[row] == "".join(CHARACTERS[id_ - 1] for id_ in ids if id_)


def test_the_longest_response_fills_the_model(alone: RemoteEngine) -> None:
    out = alone.generate(prompts((120,)), Sampling(max_tokens=50, group_size=16))
    assert out.response_ids.lengths.max() == 128 - 120
    with pytest.raises(EngineError, match="role rollout: a prompt of 128 tokens leaves no room for a response in 128"):
        alone.generate(prompts((128,)), Sampling(max_tokens=1))


def test_asleep_it_generates_nothing(alone: RemoteEngine) -> None:
    alone.load_weights(new_weights(8), 8)
    before = alone.generate(GIVEN, SAMPLING)
    alone.sleep()
    alone.sleep()
    with pytest.raises(EngineError, match="role rollout: it cannot generate: it is asleep"):
        alone.generate(GIVEN, SAMPLING)
    with pytest.raises(EngineError, match="role rollout: it cannot load weights: it is asleep"):
        alone.load_weights([], 1)
    alone.wake(True)
    with pytest.raises(EngineError, match="role rollout: it cannot generate: it is asleep"):
        alone.generate(GIVEN, SAMPLING)
    alone.load_weights(new_weights(8), 9)
    alone.wake()
    after = alone.generate(GIVEN, SAMPLING)
    assert after.texts == before.texts
    assert set(after.versions.values.tolist()) == {9}


def test_a_model_that_vllm_cannot_run_here(process: EngineProcess) -> None:
    small = replace(MODEL, architecture=replace(ARCHITECTURE, head_dim=8))
    with pytest.raises(RecipeError, match=r"models\.policy: vLLM on the CPU has no attention kernel for head_dim 8"):
        process.build("vllm", serving(model=small))


def kill_a_rank(_: list[Any]) -> None:
    """Kill a rank from the engine's process."""
    multiprocessing.active_children()[-1].kill()


def advance_all(engine: Any, rows: bytes, partial: Rollouts | None, stopped: Event) -> None:
    """Advance a session until these rows are done, or it is stopped."""
    num_left = len(rows) // 4
    while num_left and not stopped.is_set():
        num_left -= len(engine.advance(rows, num_left, partial).rows) // 4
        rows, partial = b"", None


def broken_off(
    engines: Sequence[Any],
    place: int,
    given: Prompts,
    sampling: Sampling,
    steps: int = 8,
    before: Rollouts | None = None,
) -> Rollouts | None:
    """Return the rollouts after some of the engine's steps, with the tokens from before."""
    engine, groups = engines[place], GroupProgress(given, sampling, before)
    rows = np.flatnonzero(~groups.done).astype(np.int32).tobytes()
    engine.begin_session(given, sampling)
    begun = engine.decode_steps
    stopped = Event()
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(advance_all, engine, rows, before, stopped)
        while engine.decode_steps < begun + steps and not writing.done():
            wait([writing], timeout=0.002)
        stopped.set()
        written: Rollouts | None = engine.preempt(rows)
        writing.result(60)
    return groups.merge([part for part in (written, engine.finish_session()) if part is not None])


def gone_on(engines: Sequence[Any], place: int, given: Prompts, sampling: Sampling, begun: Rollouts) -> Rollouts | None:
    """Return the complete rollouts of a generation that was stopped."""
    engine, groups = engines[place], GroupProgress(given, sampling, begun)
    engine.begin_session(given, sampling)
    advance_all(engine, np.flatnonzero(~groups.done).astype(np.int32).tobytes(), begun, Event())
    return groups.merge([engine.finish_session()])


def test_what_is_broken_off_goes_on_with_new_weights(engine: RemoteEngine, reference: TransformersEngine) -> None:
    sampling = Sampling(max_tokens=50, group_size=2)
    weights = [new_weights(seed) for seed in (1, 2)]
    process, place = engine._process, engine._place
    engine.load_weights(weights[0], 1)
    process.send(broken_off, place, GIVEN, sampling)
    begun = process.receive()
    left = ~is_done(begun, sampling)
    assert left.any()
    engine.load_weights(weights[1], 2)
    process.send(gone_on, place, GIVEN, sampling, begun)
    out = process.receive()
    assert is_done(out, sampling).all()
    assert out.keys.tolist() == engine.generate(GIVEN, sampling).keys.tolist()
    of_version = []
    for version in (1, 2):
        reference.load_weights(weights[version - 1], version)
        of_version.append(reference.logprobs(out, 1.0).values.values)
    versions = out.versions.values
    assert set(versions.tolist()) == {1, 2}
    expected = np.where(versions == 1, *of_version)
    assert out.logprobs.values == pytest.approx(expected, abs=TOLERANCE)
    for row, key in enumerate(begun.keys.tolist()):
        same = out.keys.tolist().index(key)
        first = begun.response_ids[row].tolist()
        assert out.response_ids[same][: len(first)].tolist() == first
        assert out.versions[same].tolist() == [1] * len(first) + [2] * (len(out.response_ids[same]) - len(first))
    tokenizer = load_tokenizer("policy", MODEL)
    ids = [out.response_ids[row].tolist() for row in range(len(out))]
    assert list(out.texts) == tokenizer.batch_decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("updates", [4, pytest.param(50, marks=pytest.mark.soak)])
def test_weights_change_at_any_moment_of_a_generation(
    alone: RemoteEngine, reference: TransformersEngine, updates: int
) -> None:
    """Every token has the logprob under the weights of its version, whatever the versions before it."""
    draw, sampling = np.random.default_rng(0), Sampling(max_tokens=60, group_size=4)
    process, place = alone._process, alone._place
    weights: list[Weights] = []
    complete: list[Rollouts] = []
    given, partial = prompts((30, 5), step=0), None
    for version in range(100, 100 + updates):
        weights.append(new_weights(version))
        alone.load_weights(weights[-1], version)
        process.send(broken_off, place, given, sampling, int(draw.integers(1, 9)), partial)
        partial = process.receive()
        if partial is not None and GroupProgress(given, sampling, partial).complete.all():
            complete.append(partial)
            given, partial = prompts((30, 5), step=len(complete)), None
    out = Rollouts.concatenate([*complete, *([] if partial is None else [partial])])
    versions, expected = out.versions.values, np.full(len(out.versions.values), np.nan)
    assert len(set(versions.tolist())) > updates // 2
    for version in set(versions.tolist()):
        reference.load_weights(weights[version - 100], version)
        scored = reference.logprobs(out, 1.0).values.values
        expected = np.where(versions == version, scored, expected)
    assert out.logprobs.values == pytest.approx(expected, abs=TOLERANCE)


# The last one: the pair does nothing after it.
def test_a_rank_that_dies_is_an_error(pair: RemoteEngine) -> None:
    pair._process.send(kill_a_rank)
    pair._process.receive()
    for _ in range(2):
        with pytest.raises(EngineError, match="role rollout: vLLM stopped"):
            pair.generate(GIVEN, SAMPLING)
