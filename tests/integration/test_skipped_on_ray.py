"""Skipped steps on simulated hosts, with two ranks of DeepSpeed and values in the object stores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlflow
from rlflow.report.records import MetricsWriter
from rlflow.runtime.ray.runtime import RayRuntime
from rlflow.runtime.run import run
from rlflow.runtime.skipped_steps import read_skipped, skipped_folders
from tests.conftest import CONFIG_DIR
from tests.helpers import Warnings, load

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("hosts")]
MODULE = "tests.integration.poisoned_nodes"


@pytest.mark.soak
def test_ranks_and_workers_on_hosts_skip_a_step_together(tmp_path: Path) -> None:
    """One of two ranks gets an infinite advantage in step 2, and a worker on a host makes a NaN in step 3."""
    plan = rlflow.compile(
        load(
            "recipe=real",
            "steps=4",
            "evaluation=null",
            "roles.actor={engine: deepspeed, zero_stage: 2, data_parallel_size: 2, micro_batch_tokens: 64}",
            f"graph.update={{node: '{MODULE}:PoisonedUpdate', role: actor, bad_step: 2, num_minibatches: 1}}",
            f"+graph.old_logprobs={{node: '{MODULE}:PoisonedLogprobs', bad_step: 3}}",
            config_dir=CONFIG_DIR,
        ),
        "2x1@cpu",
    )
    warnings = Warnings()
    report = run(plan, tmp_path, RayRuntime(), [MetricsWriter(), warnings])
    assert report.status == "finished"
    lines = {line["step"]: line for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())}
    skipped = {step: key for step, line in lines.items() for key in line if key.startswith("skipped_at/")}
    assert skipped == {2: "skipped_at/update", 3: "skipped_at/old_logprobs"}
    assert [step for step, line in lines.items() if "update/loss" in line] == [1, 4]
    texts = [text for text in warnings.texts if "skipped" in text]
    assert "not finite there: advantages" in texts[0]
    assert "1 logprobs of 1 of 12 samples are not finite (step 2 prompt 1 sample 3; first at token" in texts[1]
    first, second = (read_skipped(folder, plan.graph) for folder in skipped_folders(tmp_path))
    rollouts: Any = first.edges["rollouts"]
    assert sorted(map(tuple, rollouts.keys.tolist())) == [(1, p, s) for p in range(3) for s in range(4)]
    logprobs: Any = second.edges["old_logprobs"]
    assert int(np.isnan(logprobs.values.values).sum()) == 1
