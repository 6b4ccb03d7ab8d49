"""vLLM accepts the engine arguments of every recipe for GPUs, on the layouts that are planned, as on H100s."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.contract.cuda_configs import EXPERTS, MANY
from tests.helpers import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml") if "_tiny" not in path.stem)
WITH_VLLM = [
    "dapo_32b",
    "distill_7b_from_32b",
    "grpo_32b",
    "grpo_70b",
    "grpo_7b",
    "grpo_lora_32b",
    "gspo_30b_a3b",
    "ppo_7b",
]
# vLLM asks the processor of a model that sees images, and a card has none.
SEES = {"grpo_internvl_8b"}
# Two hosts have no room for them.
LARGE = {"gspo_235b_a22b", "gspo_deepseek_v3"}


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.contract.cuda_configs", *WITH_VLLM],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_all_recipes_for_gpus_are_here() -> None:
    roles = {name: load(f"recipe={name}").roles.values() for name in RECIPES}
    with_vllm = {name for name in RECIPES if any(role.engine == "vllm" for role in roles[name])}
    assert with_vllm == {*WITH_VLLM, *SEES, *LARGE}
    assert set(RECIPES) - with_vllm == {"beginner_digits", "dpo_7b", "dpo_deepseek_v3", "grpo_digits", "rm_7b"}


@pytest.mark.parametrize("recipe", [*WITH_VLLM, MANY, EXPERTS])
def test_vllm_accepts_the_engine_as_planned(recipe: str, lines: list[dict[str, Any]]) -> None:
    of_recipe = [line for line in lines if line["recipe"] == recipe]
    assert of_recipe
    for line in of_recipe:
        assert "error" not in line, line["error"]
        assert line["found"] == line["planned"], (line["cluster"], line["role"])
        assert (line["device"], line["asynchronous"]) == ("cuda", True)


def test_experts_are_divided_where_a_recipe_asks_for_it(lines: list[dict[str, Any]]) -> None:
    divided = [line["planned"] for line in lines if line["planned"]["whole experts"]]
    assert [planned["ranks"] for planned in divided] == [[4, 1]]


def test_all_ways_of_weights_are_among_them(lines: list[dict[str, Any]]) -> None:
    assert {line["planned"]["backend"] for line in lines} == {"ipc", "nccl", None}
