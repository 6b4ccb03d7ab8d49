"""The files that docs/clusters.md offers to copy are valid, and name recipes and variables that exist."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from rich.console import Console

import rlflow
from rlflow.report.plan_text import render
from tests.conftest import CONFIG_DIR, ROOT

PAGE = ROOT / "docs" / "clusters.md"
SLURM = ROOT / "docs" / "clusters" / "slurm.sh"
KUBERAY = ROOT / "docs" / "clusters" / "kuberay.yaml"


DOCKERFILE = ROOT / "docs" / "clusters" / "Dockerfile"
SKYPILOT = ROOT / "docs" / "clusters" / "skypilot.yaml"
# Slurm's commands, Ray and Python. Like Slurm's, srun sends a signal to all processes of its step. The run gets the
# signal as soon as it has started, unless it resumes.
STAND_INS = {
    "scontrol": 'if [ "$1" = show ]; then echo host-a; echo host-b; else echo "scontrol $*" >> log; fi',
    "srun": """
export SLURM_NODEID=0 BATCH=$PPID
while [ "$1" != bash ]; do shift; done
set -m
"$@" & step=$!
trap 'again=yes; kill -USR1 -- "-$step"' USR1
trap 'again=yes; kill -TERM -- "-$step"' TERM
again=yes
while [ -n "$again" ]; do again=; wait "$step"; code=$?; done
exit "$code"
""",
    "ray": 'echo "ray $*" >> ray.log; exec tail -f /dev/null',
    "python": """
if [ "$1" = -c ]; then echo 2; exit; fi
echo "python $*" >> log
case "$*" in *resume=*) exit 0;; esac
trap 'mkdir -p outputs/slurm-7/checkpoints/step-3; kill "$waiting"; exit 143' TERM
tail -f /dev/null & waiting=$!
kill -USR1 "$BATCH"
wait "$waiting"
wait "$waiting"
""",
}


def manifest(*, sandbox: bool = False) -> Any:
    text = KUBERAY.read_text()
    return OmegaConf.to_container(OmegaConf.create(text.replace("# sandbox: ", "") if sandbox else text))


def tool(name: str) -> str:
    """Return the path of a program; skip the test where it is not installed."""
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    return path or pytest.skip(f"{name} is not installed")


def passes(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_slurm_script_passes_shellcheck() -> None:
    passes(tool("shellcheck"), SLURM)


def test_the_dockerfile_passes_hadolint() -> None:
    passes(tool("hadolint"), DOCKERFILE)


def test_a_slurm_job_ends_with_a_checkpoint_and_continues(tmp_path: Path) -> None:
    for name, text in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "host-[a-b]", "SLURM_JOB_NUM_NODES": "2"}
    job["SLURM_CPUS_PER_TASK"] = "6"
    environment = {**os.environ, **job, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    codes = [
        subprocess.run(["bash", SLURM, "steps=9"], cwd=tmp_path, env=environment, timeout=60, check=False).returncode
        for _ in range(2)
    ]
    assert codes == [143, 0]
    started = "ray start --head --port=6379 --num-cpus=6 --disable-usage-stats --block"
    assert set((tmp_path / "ray.log").read_text().splitlines()) == {started}
    assert (tmp_path / "log").read_text().splitlines() == [
        "python -m rlflow cluster=auto hydra.run.dir=outputs/slurm-7 steps=9",
        "scontrol requeue 7",
        "python -m rlflow cluster=auto resume=outputs/slurm-7 steps=9",
    ]


# The fields of KubeRay's resource definition that a manifest may use, from its API reference (1.7.1).
KUBERAY_FIELDS = {
    "spec": {"entrypoint", "runtimeEnvYAML", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "backoffLimit"}
    | {"rayClusterSpec", "submissionMode", "suspend", "activeDeadlineSeconds", "jobId", "metadata"},
    "rayClusterSpec": {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs", "enableInTreeAutoscaling"},
    "headGroupSpec": {"rayStartParams", "template", "serviceType", "enableIngress", "resources", "labels"},
    "workerGroupSpecs": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
    | {"numOfHosts", "idleTimeoutSeconds", "suspend", "scaleStrategy", "resources", "labels"},
}


def test_the_manifest_has_fields_of_kuberay() -> None:
    spec = manifest()["spec"]
    cluster = spec["rayClusterSpec"]
    parts = [("spec", spec), ("rayClusterSpec", cluster), ("headGroupSpec", cluster["headGroupSpec"])]
    parts += [("workerGroupSpecs", group) for group in cluster["workerGroupSpecs"]]
    assert [name for name, part in parts if not part.keys() <= KUBERAY_FIELDS[name]] == []
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.slow
@pytest.mark.parametrize("sandbox", [False, True])
def test_kubernetes_accepts_the_pods(sandbox: bool) -> None:
    validate = pytest.importorskip("kubernetes_validate").validate
    cluster = manifest(sandbox=sandbox)["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **group["template"]}
        validate(pod, "1.33", strict=True)
    assert ("securityContext" in pod["spec"]["containers"][0]) is sandbox
    assert pod["spec"].get("hostUsers", True) is not sandbox


def test_the_skypilot_file_is_a_task_of_skypilot() -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema = pytest.importorskip("jsonschema")
    task: Any = OmegaConf.to_container(OmegaConf.load(SKYPILOT))
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_the_scripts_of_the_skypilot_file_pass_shellcheck(tmp_path: Path) -> None:
    task: Any = OmegaConf.to_container(OmegaConf.load(SKYPILOT))
    for part in ("setup", "run"):
        (tmp_path / part).write_text(f"#!/bin/bash\n{task[part]}")
        passes(tool("shellcheck"), "--exclude=SC1090", tmp_path / part)


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


@pytest.mark.parametrize("path", [PAGE, SLURM, KUBERAY, DOCKERFILE, SKYPILOT], ids=lambda path: path.name)
def test_recipes_that_are_named_exist(path: Path) -> None:
    for name in re.findall(r"\brecipe=(\w+)", path.read_text()):
        assert (ROOT / "recipes" / f"{name}.yaml").exists(), name


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "simulated"), [("2x1@cpu", True), ("1x2@cpu", True), ("2x1", False)])
def test_the_output_says_that_hosts_are_simulated(cluster: str, simulated: bool) -> None:
    pins = ["roles.rollout.gpus=2", "roles.rollout.tensor_parallel_size=1"]
    plan = rlflow.compile(rlflow.load(["recipe=fake", *pins], CONFIG_DIR), cluster)
    console = Console(width=100)
    with console.capture() as captured:
        console.print(render(plan))
    assert ("2 of 2 CPUs on simulated hosts" in captured.get()) is simulated


def messages_that_are_quoted() -> list[str]:
    """Return the messages of rlflow in the table of problems."""
    table = PAGE.read_text().partition("\n## When it does not work\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)


def texts_of_rlflow() -> Iterator[str]:
    """Yield patterns of all texts in rlflow's sources that have words of their own."""
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


@pytest.mark.slow
def test_a_kind_of_gpu_of_the_readers_own(tmp_path: Path) -> None:
    (kind,) = re.findall(r"`mine/gpu/l4.yaml`:\n\n```yaml\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "l4.yaml").write_text(kind)
    plan = rlflow.compile(rlflow.load(["recipe=grpo_7b"]), "1x8@l4", tmp_path)
    assert plan.cluster.gpus["l4"].device_name == "NVIDIA L4"
    assert plan.prediction.num_gpus == 8


@pytest.mark.slow
def test_the_plan_for_the_hosts_of_the_page(tmp_path: Path) -> None:
    section = PAGE.read_text().partition("## Your own hosts\n")[2].partition("\n## ")[0]
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "lab.yaml").write_text(section.partition("```yaml\n")[2].partition("```")[0])
    recipe = rlflow.load(["recipe=grpo_7b", "roles.reference.label=slow"])
    plan = rlflow.compile(recipe, "lab", tmp_path).to_dict()
    used = {
        name: {(bundle["host"], bundle["gpu"]) for worker in role["workers"] for bundle in worker["bundles"]}
        for name, role in plan["roles"].items()
    }
    assert {host for host, _ in used["reference"]} == {"gpu-c"}
    assert used["actor"] == {*(("gpu-a", gpu) for gpu in range(8)), *(("gpu-b", gpu) for gpu in range(7))}
    assert len(set().union(*used.values())) == 23
