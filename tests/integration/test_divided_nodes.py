"""Rewards on two simulated hosts, each of which judges the samples that lie there."""

import os
import select
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.traffic import counted
from rlflow.batch import Rewards, Rollouts
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.base import Node
from rlflow.nodes.reward import Reward
from rlflow.rewards.callables import RewardTerm
from rlflow.runtime.objects.object_process import ObjectProcess
from rlflow.runtime.objects.ray_api import this_host
from rlflow.runtime.objects.store_usage import StoreUsage
from rlflow.runtime.ray.cluster.hosts import host_names
from rlflow.runtime.ray.cluster.services import RayServices
from rlflow.runtime.ray.remote_objects import DividedNode, RemoteObjects
from rlflow.runtime.ray.waits import Waits
from rlflow.runtime.ray.watchdog import Watchdog
from tests.helpers import rollouts, sequences
from tests.integration.test_data_plane import created

SHARED_PROCESSES = "hosts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180), pytest.mark.usefixtures("hosts")]

COUNT, CHARACTERS = 40, 20_000
FUNCTION = "tests.integration.reward_functions:recorded"


class Samples:
    """Makes rollouts with long texts, each of which begins with the number of its prompt."""

    def make(self, prompts: list[int]) -> Rollouts:
        made = rollouts(sequences([2] * len(prompts), [[3]] * len(prompts)), [text(prompt) for prompt in prompts])
        made.keys[:, 1] = prompts
        return made


def text(prompt: int) -> str:
    return f"{prompt} " + "x" * (CHARACTERS + prompt)


def reward(folder: Path, **options: Any) -> Reward:
    return Reward(functions={"seen": RewardTerm(function=FUNCTION, options={"folder": str(folder), **options})})


@dataclass(frozen=True)
class Made:
    """The samples of all prompts in turn on one host and the other, and what runs nodes on them."""

    batch: Rollouts
    prompts: tuple[list[int], list[int]]
    hosts: tuple[str, str]
    objects: RemoteObjects

    @property
    def local(self) -> Rollouts:
        """Return the same samples in this process."""
        return Samples().make(self.batch.keys[:, 1].tolist())


@contextmanager
def made_on_two_hosts() -> Iterator[Made]:
    names = host_names({})
    first, second = sorted(names, key=lambda host: host != this_host())
    prompts = [list(range(start, COUNT, 2)) for start in (0, 1)]
    actors = []
    for host in (first, second):
        where = NodeAffinitySchedulingStrategy(host, soft=False)
        actors.append(ray.remote(ObjectProcess).options(num_cpus=0, scheduling_strategy=where).remote())
    ray.get([actor.load_object.remote(ray.cloudpickle.dumps(Samples())) for actor in actors])

    limits = Waits({}, other_s=60.0), Watchdog(RayServices({}))
    with RemoteObjects(StoreUsage(names), *limits, simulated=True) as objects:
        parts = ray.get([actors[number].call_and_put.remote(True, "make", prompts[number]) for number in range(2)])
        together = Rollouts.concatenate(parts)
        batch = together.take(np.argsort(together.keys[:, 1]))
        yield Made(batch, (prompts[0], prompts[1]), (first, second), objects)


def folders(parent: Path) -> tuple[Path, Path]:
    """Return new folders for what functions see in this process and on the hosts."""
    both = parent / "here", parent / "there"
    for folder in both:
        folder.mkdir()
    return both


def seen_by_server(folder: Path) -> dict[str, list[int]]:
    """Return the prompts that the workers of each fork server have judged."""
    seen = defaultdict(list)
    for path in folder.iterdir():
        server, _, prompt = path.name.split()
        seen[server].append(int(prompt))
    return {server: sorted(prompts) for server, prompts in seen.items()}


def test_each_host_judges_its_own_samples_and_no_text_moves(tmp_path: Path) -> None:
    """The texts of a host are 0.4 MB, and its rewards 80 bytes."""
    here, there = folders(tmp_path)
    with made_on_two_hosts() as made:
        expected: Any = reward(here).run(made.local)
        node = DividedNode(reward(there), made.objects)
        before = [created(host) for host in made.hosts]
        with counted() as traffic:
            found = node.run(rollouts=made.batch)
        moved = [created(host) - at for host, at in zip(made.hosts, before, strict=True)]
    assert found.values.tolist() == expected.values.tolist() == [len(text(prompt)) for prompt in range(COUNT)]
    assert (found.metrics(), found.failures()) == (expected.metrics(), expected.failures())
    assert list(seen_by_server(here).values()) == [list(range(COUNT))]
    assert sorted(seen_by_server(there).values()) == sorted(made.prompts)
    assert sum(moved) < CHARACTERS
    assert 0 < traffic.nbytes < CHARACTERS


def test_a_function_that_fails_on_one_host(tmp_path: Path) -> None:
    """The error is the same as in one process, and its processes end."""
    (here, there), last = folders(tmp_path), str(COUNT - 1)
    with made_on_two_hosts() as made:
        with pytest.raises(RecipeError) as expected:
            reward(here, failing=last).run(made.local)
        with pytest.raises(RecipeError, match=rf"failed \(ValueError: {last} has 20042 characters\)") as raised:
            DividedNode(reward(there, failing=last), made.objects).run(rollouts=made.batch)
        assert str(raised.value) == str(expected.value)
        processes = {int(number) for path in there.iterdir() for number in path.name.split()[:2]}
        running = [os.pidfd_open(number) for number in processes if Path(f"/proc/{number}").exists()]
    assert running
    for process in running:
        assert select.select([process], [], [], 60)[0], "a process of the function still runs"
        os.close(process)


@dataclass(frozen=True, kw_only=True)
class Fragile(Node, kind="fragile_on_one_host", unit="sample"):
    """A node that can run on no host."""

    def check_host(self) -> None:
        raise EngineError("no user namespaces")

    def run(self, rollouts: Rollouts) -> Rewards:
        return Rewards(values=np.zeros(len(rollouts), np.float32))


def test_a_host_on_which_a_node_cannot_run_is_named_before_the_first_step() -> None:
    with made_on_two_hosts() as made:
        name = host_names({})[made.hosts[1]]
        with pytest.raises(EngineError, match=rf"^{name}: no user namespaces"):
            made.objects.check_hosts(Fragile(), set(made.hosts))


def test_a_process_that_ends(tmp_path: Path) -> None:
    with made_on_two_hosts() as made:
        node = reward(tmp_path)
        DividedNode(node, made.objects).run(rollouts=made.batch)
        ray.kill(made.objects.proxy_of(node, made.hosts[1]).process.actor)
        with pytest.raises(EngineError, match=r"the process of Reward on \S+ died"):
            DividedNode(node, made.objects).run(rollouts=made.batch)
