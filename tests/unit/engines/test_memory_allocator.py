"""The use of torch's expandable segments, compared with the installed torch."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from rlflow.engines.memory import (
    VARIABLES,
    enable_expandable_segments,
    forbid_expandable_segments,
    set_expandable_segments,
    without_expandable_segments,
)
from rlflow.engines.serving.settings import set_environment
from tests.helpers import spec

SPLIT = "max_split_size_mb:512"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stand for the process's own."""
    clean = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    monkeypatch.setattr(os, "environ", clean)
    return clean


def set_in(environment: dict[str, str]) -> dict[str, str]:
    return {name: environment[name] for name in VARIABLES if name in environment}


@pytest.mark.parametrize(
    ("settings", "enabled", "expected"),
    [
        ("", True, "expandable_segments:True"),
        ("expandable_segments:True", False, "expandable_segments:False"),
        (f"{SPLIT},expandable_segments:True", False, f"{SPLIT},expandable_segments:False"),
        (f"expandable_segments:False,{SPLIT}", True, f"{SPLIT},expandable_segments:True"),
    ],
)
def test_other_settings_stay(settings: str, enabled: bool, expected: str) -> None:
    assert set_expandable_segments(settings, enabled) == expected


@pytest.mark.parametrize("variable", VARIABLES)
def test_trainers_expand_segments_by_default(environment: dict[str, str], variable: str) -> None:
    enable_expandable_segments("cpu")
    assert set_in(environment) == {}
    enable_expandable_segments("cuda:0")
    assert set_in(environment) == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    del environment["PYTORCH_ALLOC_CONF"]
    environment[variable] = SPLIT
    enable_expandable_segments("cuda:0")
    assert set_in(environment) == {"PYTORCH_ALLOC_CONF": f"{SPLIT},expandable_segments:True"}
    del environment["PYTORCH_ALLOC_CONF"]
    for own in ("expandable_segments:False", f"{SPLIT},expandable_segments:True"):
        environment[variable] = own
        enable_expandable_segments("cuda:0")
        assert set_in(environment) == {variable: own}


@pytest.mark.parametrize("variable", VARIABLES)
def test_vllm_never_has_them(environment: dict[str, str], variable: str) -> None:
    forbid_expandable_segments()
    assert set_in(environment) == {}
    environment[variable] = f"expandable_segments:True,{SPLIT}"
    set_environment(spec("rollout"))
    assert set_in(environment) == {"PYTORCH_ALLOC_CONF": f"{SPLIT},expandable_segments:False"}


@pytest.fixture
def settings() -> Iterator[None]:
    before = torch._C._accelerator_getAllocatorSettings()
    yield
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize("before", ["", SPLIT, f"{SPLIT},expandable_segments:True"])
def test_they_are_off_around_what_others_open(before: str) -> None:
    torch._C._accelerator_setAllocatorSettings(before)
    inside = []
    try:
        with without_expandable_segments():
            inside.append(torch._C._accelerator_getAllocatorSettings())
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert "expandable_segments:True" not in inside[0]
    assert (SPLIT in inside[0]) == (SPLIT in before)
    assert torch._C._accelerator_getAllocatorSettings() == before


READ = """
import json, os, sys, torch
os.environ.update(json.loads(sys.argv[1]))
print(torch._C._accelerator_getAllocatorSettings())
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
def test_torch_reads_the_variables_late_and_in_this_order(environment: dict[str, str], first: int) -> None:
    """They may be set after torch is imported, but before it allocates. Its HIP build reads the second."""
    names = [name for name in VARIABLES if "HIP" not in name][first:]
    given = {name: f"max_split_size_mb:{100 + place}" for place, name in enumerate(names)}
    command = [sys.executable, "-c", READ, json.dumps(given)]
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert told.stdout.strip() == "max_split_size_mb:100"
