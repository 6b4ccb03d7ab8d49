"""The comparison of updates on a GPU: its batches, its counts, and which systems it compares."""

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_update.__main__ import main
from benchmarks.gpu_update.cases import DATA, MODELS, TINY_DATA, flops, rows_of
from benchmarks.gpu_update.composite import Stream, micro_batches
from benchmarks.gpu_update.report import disagreement, figures_and_goals
from benchmarks.gpu_update.worker import Result


def test_a_batch_has_the_lengths_that_it_promises() -> None:
    rows = rows_of(DATA["D2"], 1000)
    counts = [len(response) for response in rows.responses]
    assert len(counts) == 128
    assert max(counts) <= 4096
    assert np.mean(counts) == pytest.approx(512, rel=0.2)
    assert all(np.array_equal(rows.prompts[0], prompt) for prompt in rows.prompts[:8])
    assert not np.array_equal(rows.prompts[7], rows.prompts[8])


def test_matrices_and_operations_are_those_of_the_published_model() -> None:
    """Qwen2.5-0.5B has 0.36 billion parameters besides its embeddings, as its model card says."""
    shape = MODELS["0.5B"]
    assert shape.matrix_parameters == pytest.approx(0.36e9, rel=0.01)
    rows = rows_of(DATA["D1"], shape.vocab_size)
    head = 6 * 136_134_656 * 128 * 512
    attention = 128 * 6 * 24 * 896 * 612**2
    assert flops(shape, rows, rows.tokens) == 6 * shape.matrix_parameters * 128 * 612 + head + attention


def test_the_composites_micro_batches_have_every_row_once_and_none_is_too_large() -> None:
    rows = rows_of(TINY_DATA["D2"], 512)
    pieces = list(micro_batches(rows, 192))
    assert sorted(row for piece in pieces for row in piece) == list(range(16))
    for piece in pieces:
        stream = Stream.of(rows, piece)
        assert len(stream.ids) == stream.ends[-1] <= 192
        assert np.array_equal(stream.ids[stream.predictors[1:] + 1], stream.targets[1:])
        first = len(rows.prompts[piece[0]])
        assert stream.predictors[0] == first - 1


def result_of(arm: str, loss: float, seconds: float, *, data: str = "D1") -> Result:
    return Result(arm=arm, model="0.5B", data=data, loss=loss, grad_norm=1.0, seconds=[seconds], tokens=1000)


def test_a_system_with_another_loss_is_not_compared() -> None:
    right, wrong = result_of("rlflow", -1.0, 1.0), result_of("composite", -1.05, 2.0)
    results = [right, wrong, result_of("trl+liger", -1.001, 3.0)]
    assert not disagreement(right, results)
    assert "loss" in disagreement(wrong, results)
    figures, goals = figures_and_goals(results)
    assert figures["0.5B/D1/over_trl_liger"] == 3.0
    assert figures["0.5B/D1/tokens_per_second"] == 1000
    assert "0.5B/D1/over_composite" not in figures
    assert not goals["0.5B/D1/over_composite"].is_met


def test_a_loss_that_is_not_finite_agrees_with_nothing() -> None:
    broken = result_of("rlflow", float("nan"), 1.0)
    assert disagreement(broken, [broken, result_of("composite", -1.0, 1.0), result_of("trl", -1.0, 1.0)])


@pytest.mark.soak
def test_a_tiny_model_is_compared_on_the_cpu(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """rlflow and the composite compute the same, each in a process of its own."""
    words = f"--tiny --device cpu --dtype float32 --eager --arms composite,rlflow --data D2 --out {tmp_path}"
    assert main(words.split()) == 0
    results = [Result(**json.loads(text)) for text in (tmp_path / "results.jsonl").read_text().splitlines()]
    composite, rlflow = results
    assert rlflow.loss == pytest.approx(composite.loss, rel=1e-5)
    assert rlflow.grad_norm == pytest.approx(composite.grad_norm, rel=1e-4)
    assert rlflow.computed_tokens < composite.computed_tokens == rlflow.tokens
    assert "NOT THE SAME" not in capfd.readouterr().out
