"""A Ray that rlflow starts is closed to everybody else: it listens on the loopback, and asks for a token."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlflow.recipe.compose import load_cluster
from rlflow.runtime.objects.ray_api import import_ray
from rlflow.runtime.ray.cluster.connection import connected
from tests.listening import LOOPBACK, descendants, listening

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

TOKEN = "RAY_AUTH_TOKEN"


@pytest.fixture(scope="module")
def earlier() -> list[tuple[str, str]]:
    """Return the sockets of other tests, and of engines that test files share."""
    return listening(descendants(os.getpid()))


@pytest.fixture(scope="module")
def address(earlier: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the address of the head of two simulated hosts, with a worker on each of them."""
    os.environ.pop(TOKEN, None)
    with connected(load_cluster("2x1@cpu")):
        ray = import_ray()
        task = ray.remote(num_gpus=1, num_cpus=0, scheduling_strategy="SPREAD")(_Worker)
        workers = [task.remote() for _ in range(2)]
        assert all(ray.get([worker.token.remote() for worker in workers], timeout=60))
        yield ray.get_runtime_context().gcs_address
    assert TOKEN not in os.environ


class _Worker:
    def token(self) -> str:
        return os.environ[TOKEN]

    def log(self) -> str:
        """Return what Ray itself has logged in this process."""
        logs = Path(import_ray()._private.worker.global_worker.node.get_logs_dir_path())
        (file,) = logs.glob(f"python-core-worker-*_{os.getpid()}.log")
        return file.read_text()


def test_every_process_listens_on_the_loopback_alone(address: str, earlier: list[tuple[str, str]]) -> None:
    found = [each for each in listening(descendants(os.getpid())) if each not in earlier]
    assert len(found) > 10, "Ray's processes were not found"
    assert {f"{name}: {place}" for name, place in found if place.split(":")[0] not in LOOPBACK} == set()


def test_no_process_collects_metrics_of_ray(address: str) -> None:
    """With Ray 2.60, that can crash a process that starts: seen once in 1,500 starts."""
    ray = import_ray()
    worker = ray.remote(num_cpus=0)(_Worker).remote()
    assert "Disabled stats." in ray.get(worker.log.remote(), timeout=60)


def test_nobody_joins_without_the_token(address: str, tmp_path: Path) -> None:
    code = f"import ray; ray.init(address='{address}'); print('joined')"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # One process has no token, and the other a wrong one.
    without = {**environment, "HOME": str(tmp_path), "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    wrong = {**without, "RAY_AUTH_MODE": "token", TOKEN: "0" * 64}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for env in (without, wrong)
    ]
    for process in started:
        said = process.communicate(timeout=90)[0]
        assert process.returncode != 0, said
        assert "joined" not in said
        assert "AuthenticationError" in said, said
