"""The checks of the doctor that need DeepSpeed, vLLM and Ray, with the real libraries on the CPU."""

from collections.abc import Iterator

import pytest

from rlflow.commands.doctor.checks import serving, updates
from rlflow.commands.doctor.finding import Finding
from rlflow.resources.models.architecture import Architecture
from tests.integration.engine_process import EngineProcess, processes

# vLLM on the CPU has attention for heads of 32 and more.
SMALL = Architecture(
    model_type="qwen2",
    hidden_size=128,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    vocab_size=512,
    max_position_embeddings=256,
    tie_word_embeddings=True,
)
WRITTEN = (
    "model_type: qwen2, hidden_size: 128, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 2, head_dim: 32, vocab_size: 512, max_position_embeddings: 256"
)


SHARED_PROCESSES = "DeepSpeed"
pytestmark = pytest.mark.soak


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    with processes(1) as (process,):
        yield process


def update(engines: list[object], zero_stage: int) -> list[Finding]:
    return updates.update(
        "cpu",
        engine="deepspeed",
        zero_stage=zero_stage,
        architecture=SMALL,
        rows=2,
        prompt_tokens=4,
        response_tokens=8,
    )


def sleep(engines: list[object]) -> list[Finding]:
    return serving.sleep("cpu", architecture=SMALL, prompts=4, max_tokens=8)


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_updates_by_deepspeed(zero_stage: int, process: EngineProcess) -> None:
    process.send(update, zero_stage)
    measured = process.receive()
    assert len(measured) == 3
    assert not any(each.broken for each in measured), measured


def test_vllm_wakes_as_it_was(process: EngineProcess) -> None:
    process.send(sleep)
    (responses,) = process.receive()
    assert responses.fact.startswith("4 of 4; ")


def test_the_colocated_run() -> None:
    steps, difference = serving.colocated_run("cpu", cluster="1x1@cpu", architecture=WRITTEN)
    assert not steps.broken
    assert not difference.broken
