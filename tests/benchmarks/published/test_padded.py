"""The time of generation without an engine."""

import pytest

from benchmarks.published.padded import padded_generation
from rlflow.resources.cluster import Gpu
from rlflow.resources.layout import Layout
from rlflow.resources.models.architecture import Architecture
from rlflow.resources.time.decoding import Requests
from rlflow.resources.time.lengths import Lengths
from rlflow.resources.time.speed import Efficiency, gpu_speed

LLAMA = Architecture(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=131072,
)
H100 = Gpu(
    memory_gib=79.6, peak_tflops={"bfloat16": 989.4}, memory_gb_s=3350, link_gb_s=450, network_gb_s=50, source="here"
)


def test_without_an_engine_each_batch_waits_for_its_longest() -> None:
    layout, speed = Layout(micro_batch_tokens=8192), gpu_speed(H100, 8, Efficiency())
    many = Requests(sequences=32, prompts=Lengths((128.0,)), responses=Lengths((100.0, 300.0)))
    _, seconds = padded_generation(LLAMA, layout, speed, many, batch=8, gather_s=0.1)
    assert seconds == pytest.approx(4 * 300 * 0.1)
    few = Requests(sequences=8, prompts=Lengths((128.0,)), responses=Lengths((100.0, 300.0)))
    _, launched = padded_generation(LLAMA, layout, speed, few, batch=8)
    assert launched == pytest.approx(300 * (32 * 0.5e-3 + 6e-3))
