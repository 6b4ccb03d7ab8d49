"""What docs/clusters.md offers to copy: scripts that parse, recipes and variables that exist."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import rlflow
from tests.conftest import ROOT

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
        assert (path.parent / link).exists(), link
