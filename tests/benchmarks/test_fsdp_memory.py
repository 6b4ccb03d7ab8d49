"""The memory model against torch's own tracker of FSDP2, and of the FSDP engine, on fake tensors."""

import json
from dataclasses import fields

import pytest

from benchmarks.fsdp_memory import Config, measure, predicted_gib
from benchmarks.parallel import memory
from rlflow.resources.layout import GIB
from tests.conftest import ROOT

# Torch's tracker takes seconds to import.
pytestmark = pytest.mark.slow

OF_ENGINE = json.loads((ROOT / "benchmarks" / "parallel" / "memory.json").read_text())
MEASURED = json.loads((ROOT / "benchmarks" / "fsdp_memory.json").read_text())


def test_the_committed_table() -> None:
    assert len(MEASURED) >= 24
    for row in MEASURED:
        config = Config(row["model"], row["ranks"], row["tokens"], row["checkpointing"])
        assert predicted_gib(config) == pytest.approx(row["peak_gib"], rel=0.05)


def test_the_committed_table_of_the_engine() -> None:
    """It has replicas, tensor-parallel ranks and groups of ranks that divide experts."""
    assert len(OF_ENGINE) >= 40
    for row in OF_ENGINE:
        config = memory.Config(**{field.name: row[field.name] for field in fields(memory.Config)})
        assert memory.predicted_gib(config) == pytest.approx(row["peak_gib"], rel=0.05), config


@pytest.mark.soak
@pytest.mark.parametrize("config", [memory.CONFIGS[3], memory.CONFIGS[22]], ids=memory.describe)
def test_a_measurement_of_the_engine(config: memory.Config) -> None:
    assert memory.predicted_gib(config) == pytest.approx(memory.measure(config).peak.bytes / GIB, rel=0.05)


@pytest.mark.soak
@pytest.mark.parametrize(
    "config",
    [
        Config("qwen2_5_0_5b", 8, 2048, True),
        Config("qwen2_5_1_5b", 4, 4096, False),
    ],
    ids=str,
)
def test_a_measurement(config: Config) -> None:
    assert predicted_gib(config) == pytest.approx(measure(config).peak.bytes / GIB, rel=0.05)
