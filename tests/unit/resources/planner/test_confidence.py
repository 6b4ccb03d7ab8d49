from dataclasses import replace

import pytest

from benchmarks.published.libraries import DEEPSPEED
from rlflow.resources.layout import Layout
from rlflow.resources.models.lora import Lora
from rlflow.resources.planner.confidence import MEMORY_BANDS, Band, Kind, Verdict, kind_of


@pytest.mark.parametrize(
    ("peak", "verdict"),
    [(50, Verdict.FITS), (80, Verdict.FITS), (81, Verdict.TIGHT), (125, Verdict.TIGHT), (126, Verdict.DOES_NOT_FIT)],
)
def test_a_verdict_needs_the_whole_band_on_one_side_of_the_limit(peak: float, verdict: Verdict) -> None:
    assert Band(0.8, 1.25).verdict(peak, 100) is verdict


def test_kinds_of_configurations() -> None:
    alone = Layout(micro_batch_tokens=1024)
    adapters = replace(DEEPSPEED, lora=Lora(rank=8))
    assert kind_of(alone, DEEPSPEED) is Kind.ALONE
    assert kind_of(alone, adapters) is Kind.ADAPTERS_ALONE
    assert kind_of(replace(alone, data_parallel_size=2), DEEPSPEED) is Kind.SHARDED
    assert kind_of(replace(alone, data_parallel_size=2), adapters) is Kind.ADAPTERS_SHARDED
    assert kind_of(replace(alone, tensor_parallel_size=2), DEEPSPEED) is Kind.MODEL_PARALLEL


def test_every_kind_has_a_band_around_its_prediction() -> None:
    for kind in Kind:
        assert 0.5 < MEMORY_BANDS[kind].low <= 1 <= MEMORY_BANDS[kind].high < 2
