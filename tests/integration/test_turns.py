"""Engines on hosts that take turns with training, and leave samples of later steps unfinished."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import ray

import rlflow
from rlflow.engines.base import EngineSpec
from rlflow.engines.fake import FakeEngine
from rlflow.engines.memory import PhasePeaks
from rlflow.report.records import MetricsWriter, SampleLog, read_lines
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.ray.worker import EngineWorker
from rlflow.runtime.run import run
from tests import helpers, stepwise
from tests.conftest import CONFIG_DIR
from tests.helpers import load
from tests.stepwise import MAX_TOKENS, Stepwise, response

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS, PROMPTS, GROUP = 6, 3, 2


class Worker(EngineWorker):
    """A worker whose engine has room for two of a step's six responses, which are known beforehand."""

    def build(self, engine: str, spec: EngineSpec) -> None:
        if "Generates" in spec.capabilities:
            self._engine_thread = None
        self._engine = Stepwise(spec, (2, 10_000)) if "Generates" in spec.capabilities else FakeEngine(spec)
        self._peaks = PhasePeaks(spec.device)


@pytest.fixture(scope="module", autouse=True)
def workers_of_this_module(hosts: None) -> None:
    for module in (sys.modules[__name__], helpers, stepwise):
        ray.cloudpickle.register_pickle_by_value(module)


def test_each_step_trains_on_its_own_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stops and resumes with unfinished samples in its checkpoint."""
    overrides = (
        "overlap={max_staleness: 2, in_flight: keep, deterministic: false}",
        "roles.rollout={engine: vllm, gpus: 1, colocate: [actor, reference]}",
        f"graph.rollouts={{group_size: {GROUP}, max_tokens: {MAX_TOKENS}}}",
        f"data.batch_size={PROMPTS}",
        f"steps={STEPS}",
        "evaluation=null",
        # In float32 a run ends where engines with the same weights differ, as these do.
        "models.policy.dtype=bfloat16",
    )
    plan = rlflow.compile(load("recipe=fake", *overrides, config_dir=CONFIG_DIR), "2x1@cpu")
    assert plan.takes_turns
    monkeypatch.setattr("rlflow.runtime.ray.role_workers.EngineWorker", Worker)
    stops = iter([False, False, True])
    run(plan, tmp_path, RayRuntime(), [MetricsWriter(), SampleLog()], stop=lambda: next(stops))
    assert list(tmp_path.glob("checkpoints/*/graph.rollouts/*.npz"))
    run(plan, tmp_path, RayRuntime(), [MetricsWriter(), SampleLog()], resume=True)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "overlap/staleness_max" in line]
    keys = [[np.array([step, p, s]) for p in range(PROMPTS) for s in range(GROUP)] for step in range(STEPS)]
    lengths = [[len(response(key)) for key in of_step] for of_step in keys]
    assert [line["rollouts/length_mean"] for line in steps] == pytest.approx([np.mean(each) for each in lengths])
    assert [line["rollouts/length_max"] for line in steps] == [max(each) for each in lengths]
    assert 1 <= max(line["overlap/staleness_max"] for line in steps) <= 2
    samples = read_lines(tmp_path / "samples.jsonl")
    assert sorted({sample["step"] for sample in samples}) == list(range(1, STEPS + 1))
    for sample in samples:
        key = np.array([sample["step"] - 1, sample["prompt_number"], sample["sample_number"]])
        assert sample["length"] == len(response(key))
        assert sample["oldest_version"] <= sample["newest_version"] < sample["step"]
