"""vLLM draws from the model's distribution, and a response's random numbers do not depend on its interruptions."""

from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from rlflow.batch import Packed, Sequences
from rlflow.engines.base import Sampling
from rlflow.engines.group_progress import is_done
from rlflow.engines.serving.vllm_worker import _sample
from rlflow.engines.transformers import TransformersEngine
from tests.helpers import prompts
from tests.integration.engine_process import EngineProcess, RemoteEngine
from tests.integration.test_vllm import GIVEN, broken_off, gone_on, new_weights, serving

SHARED_PROCESSES = "vLLM"
pytestmark = pytest.mark.slow

Floats = NDArray[np.float64]

PROMPT = prompts((5,))
TOKENS = range(13)
NUM_SAMPLES = 4096


@pytest.fixture(scope="module")
def engine(vllm_process: EngineProcess) -> RemoteEngine:
    engine = vllm_process.build("vllm", serving(max_num_seqs=256))
    engine.load_weights(new_weights(5), 1)
    return engine


@pytest.fixture(scope="module")
def reference() -> TransformersEngine:
    engine = TransformersEngine(serving())
    engine.load_weights(new_weights(5), 1)
    return engine


def check_counts(counts: Floats, probabilities: Floats) -> None:
    """Compare counts with expected ones by Pearson's statistic, which is below mean + 5 standard deviations."""
    assert probabilities.sum() == pytest.approx(1, abs=1e-4)
    assert counts[probabilities == 0].sum() == 0
    expected = probabilities * counts.sum()
    rare = expected < 5
    cells = np.stack([np.append(each[~rare], each[rare].sum()) for each in (counts, expected)])
    cells = cells[:, cells[1] > 0]
    degrees = cells.shape[1] - 1
    assert degrees > 0
    statistic = ((cells[0] - cells[1]) ** 2 / cells[1]).sum()
    assert statistic < degrees + 5 * np.sqrt(2 * degrees)


def cut(probabilities: Floats, top_p: float) -> Floats:
    """Return the distribution of the likeliest tokens, which together have at least ``top_p``."""
    order = np.argsort(-probabilities)
    kept = order[: int(np.searchsorted(probabilities[order].cumsum(), top_p)) + 1]
    left = np.zeros_like(probabilities)
    left[kept] = probabilities[kept] / probabilities[kept].sum()
    return left


def next_token(
    reference: TransformersEngine, starts: Sequence[tuple[int, ...]], temperature: float, top_p: float
) -> list[Floats]:
    """Return the distribution of the token after the prompt and each of the ``starts``."""
    rows = [[*start, token] for start, token in product(starts, TOKENS)]
    count = len(rows)
    given = Sequences(
        keys=np.stack([np.zeros(count, np.int64), np.zeros(count, np.int64), np.arange(count)], 1),
        prompt_ids=Packed.from_rows([PROMPT.ids[0]] * count, np.int32),
        response_ids=Packed.from_rows(rows, np.int32),
    )
    scores = reference.logprobs(given, temperature).values
    last = np.exp([scores[row][-1] for row in range(count)]).reshape(len(starts), len(TOKENS))
    return [cut(row.astype(np.float64), top_p) for row in last]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.0, 0.8), (1.5, 0.9)])
def test_pairs_of_tokens_have_the_distribution_of_the_model(
    engine: RemoteEngine, reference: TransformersEngine, temperature: float, top_p: float
) -> None:
    sampling = Sampling(max_tokens=2, group_size=NUM_SAMPLES, temperature=temperature, top_p=top_p)
    out = engine.generate(PROMPT, sampling)
    (first,) = next_token(reference, [()], temperature, top_p)
    second = np.stack(next_token(reference, [(token,) for token in TOKENS], temperature, top_p))
    expected = first[:, None] * second
    # The end token is the only one of its response.
    expected[0] = 0
    expected[0, 0] = first[0]
    counts = np.zeros_like(expected)
    for row in range(len(out)):
        ids = out.response_ids[row].tolist()
        counts[ids[0], ids[1] if len(ids) > 1 else 0] += 1
    check_counts(counts.ravel(), expected.ravel())


def test_an_interrupted_response_is_the_same_in_the_end(engine: RemoteEngine) -> None:
    """Whatever the batch that it is interrupted in, and the batch in which it is resumed."""
    sampling = Sampling(max_tokens=50, group_size=8)
    whole = engine.generate(GIVEN, sampling)
    for steps in (1, 7):
        engine._process.send(broken_off, engine._place, GIVEN, sampling, steps)
        partial = engine._process.receive()
        assert not is_done(partial, sampling).all()
        engine._process.send(gone_on, engine._place, GIVEN, sampling, partial)
        resumed = engine._process.receive()
        assert resumed.keys.tolist() == whole.keys.tolist()
        assert resumed.response_ids.values.tolist() == whole.response_ids.values.tolist()
        assert resumed.texts == whole.texts


def draw(_: list[Any], logits: Floats, seeds: list[int], positions: NDArray[np.int32], k: int, p: float) -> Any:
    """Draw tokens in a process with vLLM."""
    count = len(seeds)
    runner = SimpleNamespace(input_batch=SimpleNamespace(num_tokens_no_spec=positions))
    generators = {row: SimpleNamespace(initial_seed=lambda seed=seed: seed) for row, seed in enumerate(seeds)}
    rows = torch.tensor(logits, dtype=torch.float32).repeat(count, 1)
    tokens, scores = _sample(runner, [], rows, generators, torch.full((count,), k), torch.full((count,), p))
    return tokens.tolist(), scores[-1].numpy()


LOGITS = np.array([0.0, 2.0, -1.0, 1.5, 0.5, 1.0, -3.0, 0.2])


@pytest.mark.parametrize("of", ["one position of many samples", "many positions of one sample"])
def test_tokens_are_independent_of_each_other(vllm_process: EngineProcess, of: str) -> None:
    one = of.startswith("one")
    seeds = np.random.default_rng(0).integers(0, 2**63, NUM_SAMPLES).tolist() if one else [2**63 - 5] * NUM_SAMPLES
    positions = np.full(NUM_SAMPLES, 17, np.int32) if one else np.arange(NUM_SAMPLES, dtype=np.int32)
    vllm_process.send(draw, LOGITS, seeds, positions, len(LOGITS), 1.0)
    tokens, scores = vllm_process.receive()
    probabilities = np.exp(LOGITS) / np.exp(LOGITS).sum()
    check_counts(np.bincount(tokens, minlength=8).astype(float), probabilities)
    pairs = np.array(tokens[:-1]) * 8 + np.array(tokens[1:])
    check_counts(np.bincount(pairs, minlength=64).astype(float), np.outer(probabilities, probabilities).ravel())
    assert scores == pytest.approx(np.log(probabilities), abs=1e-5)


def test_top_k_and_top_p_cut_what_is_drawn_and_not_the_logprobs(vllm_process: EngineProcess) -> None:
    seeds = list(range(NUM_SAMPLES))
    vllm_process.send(draw, LOGITS, seeds, np.zeros(NUM_SAMPLES, np.int32), 5, 0.7)
    tokens, scores = vllm_process.receive()
    whole = np.exp(LOGITS) / np.exp(LOGITS).sum()
    # Tokens 1 and 3 have 0.68 of the probability of the five likeliest, and 5 is the next.
    left = np.where(np.isin(np.arange(8), [1, 3, 5]), whole, 0)
    check_counts(np.bincount(tokens, minlength=8).astype(float), left / left.sum())
    assert scores == pytest.approx(np.log(whole), abs=1e-5)
