"""Placement in a Ray of simulated hosts: what was planned is bound, and what is missing is named."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pytest

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.errors import EngineError, PlacementError
from rlflow.recipe.compose import load_cluster
from rlflow.runtime.ray.cluster.binding import match_hosts, wanted_gpus
from rlflow.runtime.ray.cluster.connection import simulated
from rlflow.runtime.ray.cluster.hosts import gpu_users, live_hosts
from rlflow.runtime.ray.runtime import RayRuntime, bound
from tests.conftest import CONFIG_DIR, ROOT, Typed
from tests.helpers import load

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMMAND = [sys.executable, "-m", "rlflow", "--config-dir", str(CONFIG_DIR), "recipe=fake"]
MARK = "RLFLOW_TEST_MARK"


def using(cluster: str) -> Plan:
    """Return a plan that uses all GPUs of the cluster."""
    gpus = sum(host.gpus for host in load_cluster(cluster).hosts)
    pins = [f"roles.rollout.gpus={gpus}", "roles.rollout.tensor_parallel_size=1"]
    return rlflow.compile(load("recipe=fake", *pins, config_dir=CONFIG_DIR), cluster)


def processes(mark: str) -> list[str]:
    """Return the command lines of all processes with the mark in their environment, except for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and f"{MARK}={mark}" in (folder / "environ").read_text(errors="replace"):
                found.append((folder / "cmdline").read_text().replace("\0", " "))
        except OSError:  # it has ended
            continue
    return found


def seconds_until(done: Any, most: float = 20) -> float:
    began = time.monotonic()
    while not done():
        assert time.monotonic() - began < most
        time.sleep(0.05)
    return time.monotonic() - began


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Mark all processes that the test starts, and check that none is left after it."""
    value = uuid4().hex
    monkeypatch.setenv(MARK, value)
    yield value
    seconds_until(lambda: not processes(value))


@pytest.mark.soak
def test_sixteen_hosts(mark: str) -> None:
    plan = using("16x8@cpu")
    with simulated(plan.cluster):
        check_every_gpu(plan)


def check_every_gpu(plan: Plan) -> None:
    """Check that each GPU of the plan is bound on its host, by what Ray's own table says too."""
    from ray.util import placement_group_table

    with bound(plan) as placed:
        group = placement_group_table(placed.group)
        assert group["stats"]["end_to_end_creation_latency_ms"] < 5000
        assert len(placed.gpu_ids) == sum(host.gpus for host in plan.cluster.hosts)
        assert all(
            (placed.hosts[b.host].name, gpu) == (b.host, str(b.gpu))
            and group["bundles_to_node_id"][placed.bundle_indices[b]] == placed.hosts[b.host].node_id
            for b, gpu in placed.gpu_ids.items()
        )


@pytest.fixture(scope="class")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Start simulated hosts with an nvidia-smi that lists two GPUs."""
    tool = tmp_path_factory.mktemp("bin") / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'GPU 0: NVIDIA A10G (UUID: GPU-a)\\nGPU 1: NVIDIA A10G (UUID: GPU-b)\\n'\n")
    tool.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
        with simulated(load_cluster("3x2@cpu")) as there:
            yield there


class TestHosts:
    """Tests on the same hosts, each of which frees all that it used."""

    @pytest.fixture(autouse=True)
    def all_is_let_go(self, hosts: Any) -> Iterator[None]:
        yield
        until_nothing_is_left()

    def test_every_gpu_is_bound(self) -> None:
        check_every_gpu(using("3x2@cpu"))

    def test_a_host_is_missing(self) -> None:
        error = error_of(using("4x2@cpu"))
        assert "Ray has none for 'host-3' (2 GPUs)" in error
        assert "Known: host-0 (2 GPUs), host-1 (2 GPUs), host-2 (2 GPUs)" in error

    def test_a_gpu_is_taken_by_an_actor(self) -> None:
        with taken("host-1"):
            assert "uses 2 GPUs of 'host-1' and 1 are free (taken: 1 by actor 'thief' of job" in error_of(
                using("2x2@cpu")
            )

    def test_a_gpu_is_taken_by_a_task(self, tmp_path: Path) -> None:
        """One that has ended is not named."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node_id = next(each.node_id for each in live_hosts() if each.name == "host-1")
        where = NodeAffinitySchedulingStrategy(node_id, soft=False)
        task = ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy=where)(until_there)
        (tmp_path / "there").touch()
        ray.get(task.options(name="before").remote(tmp_path / "there"), timeout=60)
        held = task.options(name="thief").remote(tmp_path / "end")
        try:
            # Ray tells it once a second.
            seconds_until(lambda: ["thief" in who for who in gpu_users().get(node_id, [])] == [True])
            assert "of 'host-1' and 1 are free (taken: 1 by task 'thief' of job" in error_of(using("2x2@cpu"))
        finally:
            (tmp_path / "end").touch()
            ray.get(held, timeout=60)

    def test_gpus_are_taken_by_another_run(self) -> None:
        with bound(using("2x2@cpu")):
            error = error_of(using("2x2@cpu"))
        assert "'host-0' and 0 are free (taken: 2 by placement group 'rlflow fake')" in error

    def test_a_gpu_is_taken_while_waiting(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def as_if_free(plan: Plan, wanted: Any) -> Any:
            return match_hosts(plan.cluster.hosts, wanted_gpus(wanted), live_hosts())

        monkeypatch.setattr("rlflow.runtime.ray.runtime._hosts_with_room", as_if_free)
        with taken("host-0"):
            assert "GPUs of 'host-0' and 1 are free (taken: 1 by actor 'thief'" in error_of(using("2x2@cpu"))

    def test_another_process_joins_and_leaves(self) -> None:
        program = """
import json
from rlflow.recipe.compose import load_cluster
from rlflow.runtime.ray.cluster.free_gpus import free_gpus
from rlflow.runtime.ray.cluster.connection import connected
from rlflow.runtime.ray.runtime import bound
from tests.integration.test_ray import using
print(json.dumps(free_gpus()))
plan = using("2x2")
with connected(plan.cluster), bound(plan) as placed:
    print(json.dumps([placed.simulated, sorted(placed.addresses), sorted(placed.gpu_ids.values())]))
"""
        import ray

        address = ray.get_runtime_context().gcs_address
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "RAY_ADDRESS": address},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.stderr == ""
        assert done.stdout.splitlines() == [
            '{"host-0": [], "host-1": [], "host-2": []}',
            '[true, ["host-0", "host-1"], ["0", "0", "1", "1"]]',
        ]

    def test_gpus_of_another_kind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlflow.runtime.ray.cluster.hosts.SIMULATED_LABEL", "no label that they have")
        assert "GPUs of the kind h200 (NVIDIA H200), and GPU 0 of 'host-0' is NVIDIA A10G" in error_of(
            using("1x2@h200")
        )
        with bound(using("1x2@a10g")):
            pass

    def test_no_gpu_is_free(self) -> None:
        import ray

        program = """
from rlflow.errors import PlacementError
from rlflow.runtime.ray.cluster import hosts
from rlflow.runtime.ray.cluster.free_gpus import free_gpus
hosts.SIMULATED_LABEL = "no label that they have"
try:
    free_gpus()
except PlacementError as error:
    print(error.fact)
"""
        address = ray.get_runtime_context().gcs_address
        with bound(using("3x2@cpu")):
            done = subprocess.run(
                [sys.executable, "-c", program],
                env={**os.environ, "RAY_ADDRESS": address},
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=120,
            )
        assert done.stderr == ""
        by = "2 by placement group 'rlflow fake'"
        assert done.stdout == (
            f"Ray has 6 GPUs, and none is free (taken: 'host-0': {by}; 'host-1': {by}; 'host-2': {by})\n"
        )

    def test_why_a_run_failed_comes_before_what_fails_after_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ray import util

        def failing(group: Any) -> None:
            remove(group)
            raise RuntimeError("no GCS")

        remove = util.remove_placement_group
        monkeypatch.setattr(util, "remove_placement_group", failing)
        with pytest.raises(EngineError, match="the cause"), bound(using("1x2@cpu")):
            raise EngineError("the cause")


@pytest.mark.parametrize("before", ["placement_group", pytest.param("_ask", marks=pytest.mark.soak)])
def test_a_host_that_dies_while_waiting(before: str, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Ray itself takes half a minute to notice that a host has died, and only then is all that it had let go.
    monkeypatch.setenv("RAY_health_check_period_ms", "500")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    plan = using("2x2@cpu")
    with simulated(plan.cluster) as hosts:
        (dying,) = hosts.worker_nodes

        def killing(*arguments: Any, **options: Any) -> Any:
            for process in dying.all_processes["raylet"]:
                process.process.kill()
            return function(*arguments, **options)

        module = "ray.util" if before == "placement_group" else "rlflow.runtime.ray.runtime"
        function = getattr(sys.modules[module], before)
        monkeypatch.setattr(f"{module}.{before}", killing)
        assert "lost 'host-1'" in error_of(plan)
        until_nothing_is_left()


@pytest.mark.parametrize(("kind", "inside"), [(RuntimeError, False), ("RpcError", False), ("RpcError", True)])
def test_errors_of_ray_itself(kind: Any, inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray import exceptions

    def failing() -> Any:
        raise error

    error = getattr(exceptions, kind)("no GCS") if isinstance(kind, str) else kind("no GCS")
    plan = using("1x2@cpu")
    monkeypatch.setattr("rlflow.runtime.ray.runtime.connected", nullcontext)
    if inside:
        monkeypatch.setattr("rlflow.runtime.ray.runtime.bound", nullcontext)
        monkeypatch.setattr("rlflow.runtime.ray.runtime.placement_record", lambda plan, placed: {})
        monkeypatch.setattr("rlflow.runtime.ray.engine_set.start_engines", lambda *given: nullcontext({}))
    else:
        monkeypatch.setattr("rlflow.runtime.ray.runtime.live_hosts", failing)
    with (
        pytest.raises(EngineError, match=rf"^Ray failed: {type(error).__name__}: no GCS\.$"),
        RayRuntime().start(plan, {}, tmp_path),
    ):
        failing()


def test_the_address_that_others_find_stays_theirs(mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Short, for the names of sockets below it.
    with TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)
        note = Path(folder) / "ray" / "ray_current_cluster"
        note.parent.mkdir()
        note.write_text("10.0.0.1:6379")
        with simulated(load_cluster("1x1@cpu")):
            assert note.read_text() == "10.0.0.1:6379"
            note.write_text("10.0.0.2:6379")
        assert note.read_text() == "10.0.0.2:6379"


def error_of(plan: Plan) -> str:
    began = time.monotonic()
    with pytest.raises(PlacementError) as raised, bound(plan):
        pass
    assert time.monotonic() - began < 10
    return str(raised.value)


def until_nothing_is_left() -> None:
    """Wait until no placement group, actor or GPU is in use."""
    from ray._private.state import actors
    from ray.util import placement_group_table

    seconds_until(lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()))
    seconds_until(lambda: all(actor["State"] == "DEAD" for actor in actors().values()))
    seconds_until(lambda: all(host.free_gpus == host.gpus for host in live_hosts() if host.alive))


@contextmanager
def taken(host: str) -> Iterator[None]:
    """Have an actor take a GPU of the host."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    node_id = next(each.node_id for each in live_hosts() if each.name == host)
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    thief = ray.remote(Thief).options(name="thief", num_gpus=1, num_cpus=0, scheduling_strategy=where).remote()
    ray.get(thief.ready.remote(), timeout=60)
    yield
    ray.kill(thief)


def until_there(file: Path) -> None:
    end = time.monotonic() + 120
    while not file.exists():
        assert time.monotonic() < end, f"nobody writes {file}"
        time.sleep(0.1)


class Thief:
    def ready(self) -> None:
        pass


@pytest.mark.soak
def test_ctrl_c_leaves_nothing(mark: str, tmp_path: Path) -> None:
    command = [*COMMAND, "cluster=2x1@cpu", "roles.rollout.colocate=[]"]
    options = ["steps=100000", f"hydra.run.dir={tmp_path}/run", "checkpoints.every=100000", "evaluation.every=100000"]
    run = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, process_group=0
    )
    try:
        seconds_until(lambda: run.poll() is not None or (tmp_path / "run" / "metrics.jsonl").exists(), 120)
        os.killpg(run.pid, signal.SIGINT)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, err) == (130, ""), out
    assert "simulated" in (tmp_path / "run" / "placement.json").read_text()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001"])
def test_an_address_that_cannot_be_joined(address: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    code, _, errors = typed(*COMMAND[3:], "cluster=2x8", "roles.rollout.gpus=16")
    assert code == 2
    assert errors.startswith(f"PlacementError: cluster: RAY_ADDRESS is '{address}', ")
