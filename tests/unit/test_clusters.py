"""What docs/clusters.md offers to copy: scripts that parse, recipes and variables that exist."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

import rlflow
from rlflow.compiler.render import render
from tests.conftest import CONFIG_DIR, ROOT

PAGE = ROOT / "docs" / "clusters.md"
SLURM = ROOT / "docs" / "clusters" / "slurm.sh"
KUBERAY = ROOT / "docs" / "clusters" / "kuberay.yaml"


def manifest() -> Any:
    return OmegaConf.to_container(OmegaConf.load(KUBERAY))


def test_the_slurm_script_is_a_script() -> None:
    done = subprocess.run(["bash", "-n", SLURM], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")
    assert 'python -m rlflow cluster=auto "$@" &' in SLURM.read_text()


def test_the_manifest_is_a_job_of_rlflow() -> None:
    job = manifest()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    command, *overrides = job["spec"]["entrypoint"].split(" rlflow ")
    assert command == "python -m"
    recipe, cluster, folder = overrides[0].split()
    assert rlflow.load([recipe]).name == recipe.removeprefix("recipe=")
    assert cluster == "cluster=auto"
    assert folder.startswith("hydra.run.dir=/shared/")


def test_every_pod_has_the_shared_folder_and_memory() -> None:
    cluster = manifest()["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {"shared": "/shared", "shm": "/dev/shm"}
        assert {volume["name"] for volume in pod["volumes"]} == mounts.keys()


def test_only_workers_have_gpus() -> None:
    cluster = manifest()["spec"]["rayClusterSpec"]
    head, workers = cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]
    assert head["rayStartParams"]["num-gpus"] == "0"
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"]


@pytest.mark.parametrize("path", [PAGE, SLURM, KUBERAY], ids=lambda path: path.name)
def test_recipes_and_files_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    for name in re.findall(r"\brecipe=(\w+)", text):
        assert (ROOT / "recipes" / f"{name}.yaml").exists(), name
    for link in re.findall(r"\]\((\w[^):]*)\)", text):
        file, _, heading = link.partition("#")
        assert (path.parent / file).exists(), link
        headings = re.findall(r"^#+ (.+)$", (path.parent / file).read_text(), flags=re.MULTILINE) if heading else []
        assert not heading or heading in {each.lower().replace(" ", "-") for each in headings}, link


@pytest.mark.parametrize(("cluster", "simulated"), [("2x1@cpu", True), ("1x2@cpu", True), ("2x1", False)])
def test_the_output_says_that_hosts_are_simulated(cluster: str, simulated: bool) -> None:
    pins = ["roles.rollout.gpus=2", "roles.rollout.tensor_parallel_size=1"]
    plan = rlflow.compile(rlflow.load(["recipe=fake", *pins], CONFIG_DIR), cluster)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(render(plan))
    assert ("2 of 2 CPUs on simulated hosts" in captured.get()) is simulated


def messages_that_are_quoted() -> list[str]:
    """The left side of the table of what goes wrong, where it is ours."""
    table = PAGE.read_text().partition("\n## When it does not work\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def texts_of_rlflow() -> Iterator[str]:
    """Patterns of all texts in its sources that have words of their own."""
    for path in (ROOT / "rlflow").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            words = [part.value if isinstance(part, ast.Constant) else None for part in parts]
            if sum(map(str.isalpha, "".join(word for word in words if isinstance(word, str)))) >= 4:
                yield "".join(re.escape(word) if isinstance(word, str) else ".*" for word in words)


@pytest.mark.slow
def test_messages_that_are_quoted_exist() -> None:
    quoted = messages_that_are_quoted()
    patterns = [re.compile(pattern) for pattern in texts_of_rlflow()]
    assert len(quoted) > 10
    assert [quote for quote in quoted if not any(pattern.fullmatch(quote) for pattern in patterns)] == []
