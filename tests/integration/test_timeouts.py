"""The limits of waiting between ranks: in exchanges that of the recipe, and for files a long one."""

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d

import rlflow
from rlflow.compiler.models import models_in_use
from rlflow.engines.base import EngineSpec
from rlflow.engines.sharded import process_group as group
from rlflow.errors import PlacementError
from rlflow.runtime.engine_specs import spec_of
from tests.helpers import load
from tests.integration.engine_process import all_of, build, free_address, processes
from tests.integration.test_deepspeed import actor

SHARED_PROCESSES = "DeepSpeed"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def timeouts(engines: list[Any], of: EngineSpec) -> list[timedelta]:
    """Return those of all groups of the process, DeepSpeed's among them, without that for files. Runs in the child."""
    groups = [each for each in distributed_c10d._world.pg_map if each is not group.files_group()]
    return [each._get_backend(torch.device("cpu")).options._timeout for each in groups]


def hold_the_others_up(engines: list[Any], of: EngineSpec) -> str:
    """Make rank 0 wait in vain for longer than its time-out while the others wait for its files. Runs in the child."""
    group.set_timeouts(replace(of, timeout_minutes=0.5 / 60))
    error = ""
    if of.rank == 0:
        try:
            torch.distributed.all_reduce(torch.ones(1))
        except RuntimeError as raised:
            error = str(raised)
    group.wait_for_files()
    return error


def test_exchanges_end_as_the_recipe_says_and_files_take_their_time() -> None:
    address = free_address()
    specs = [replace(actor(3), rank=rank, world_size=2, address=address, timeout_minutes=7) for rank in range(2)]
    with processes(2) as two:
        all_of(two, build, ["deepspeed"] * 2, specs)
        for each in all_of(two, timeouts, specs):
            # The one that the ranks met in, and DeepSpeed's own.
            assert len(each) > 1
            assert set(each) == {timedelta(minutes=7)}
        first, second = all_of(two, hold_the_others_up, specs)
    assert "imed out" in first or "imeout" in first
    assert second == ""


def test_the_field_of_the_recipe(tmp_path: Path) -> None:
    recipe = load("recipe=grpo_7b", "roles.actor.timeout_minutes=45")
    plan = rlflow.compile(recipe, "2x8")
    assert plan.fingerprint == rlflow.compile(load("recipe=grpo_7b"), "2x8").fingerprint
    model = models_in_use(recipe)[recipe.roles["actor"].model]
    assert spec_of(plan, "actor", model, device="cpu").timeout_minutes == 45
    assert spec_of(plan, "reference", model, device="cpu").timeout_minutes == 10
    with pytest.raises(PlacementError, match=r"roles\.rollout\.timeout_minutes: does not apply to this role"):
        rlflow.compile(load("recipe=grpo_7b", "roles.rollout.timeout_minutes=45"), "2x8")
