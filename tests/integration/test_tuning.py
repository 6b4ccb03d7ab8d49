"""A run that is tuned: its micro-batches change, what it learns does not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rlflow.recipe.options import RunOptions
from rlflow.report.records import MetricsWriter
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.run import run
from tests.helpers import metrics_of
from tests.integration.test_run import plan_of

pytestmark = pytest.mark.slow


def test_the_same_is_learned(tmp_path: Path) -> None:
    plan = plan_of("sft_tiny", "steps=20", "checkpoints.every=100", "data.batch_size=64")
    # From where there is something to gain.
    actor = plan.roles["actor"]
    small = replace(actor, layout=replace(actor.layout, micro_batch_tokens=64))
    plan = replace(plan, roles={"actor": small})
    for name, tune in (("plain", False), ("tuned", True)):
        run(plan, tmp_path / name, LocalRuntime(), [MetricsWriter()], RunOptions(tune=tune))
    found = json.loads((tmp_path / "tuned" / "tuning.json").read_text())["actor"]
    assert len(found["trials"]) > 1
    assert found["trials"][1]["setting"] == 96
    assert not (tmp_path / "plain" / "tuning.json").exists()
    for plain, tuned in zip(metrics_of(tmp_path / "plain"), metrics_of(tmp_path / "tuned"), strict=True):
        for figure in ("update/loss", "update/grad_norm"):
            assert tuned[figure] == pytest.approx(plain[figure], rel=1e-4)
