"""Check what rlflow says about recipes that do not fit: ``python -m benchmarks.fixes [--json FILE] [--seed 0]``.

Recipes are drawn at random until 200 of them do not fit: algorithms, models, clusters, pins, lengths and batches. Each
alternative of each *Fix* is applied as it is printed, and the recipe is compiled again. Each stated reason is compared
with plans: pins that conflict must fail together and fit when any one of them is open, and with the memory that a role
is said to need, but not with 5% or one GiB less, the recipe must fit.
"""

import argparse
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.errors import PlacementError, UserError
from rlflow.recipe import Recipe
from rlflow.recipe.compose import load_cluster
from rlflow.resources.cluster import Cluster, Host

# Recipes, each with its roles and the nodes that generate.
RECIPES = {
    "grpo_7b": (("actor", "reference", "rollout"), True),
    "ppo_7b": (("actor", "critic", "reference", "rollout"), True),
    "grpo_lora_32b": (("actor", "rollout"), True),
    "dpo_7b": (("actor", "reference"), False),
    "rm_7b": (("reward",), False),
}
MODELS = ("qwen2_5_0_5b", "qwen3_4b", "qwen2_5_7b", "gemma3_12b", "qwen2_5_32b", "llama3_1_70b", "qwen3_30b_a3b")
KINDS = ("h100_80gb", "a100_40gb", "rtx_4090", "l40s", "h200", "v100_16gb")
SHAPES = ("1x1", "1x2", "1x4", "1x8", "2x8", "1x7+1x8", "4x8", "2x4", "7x8+1x7")
PINS: dict[str, tuple[object, ...]] = {
    "gpus": (1, 2, 3, 4, 6, 8, 12, 24, 64),
    "colocate": ("[]", "[{other}]"),
    "label": ("fast", "h100_80gb"),
    "tensor_parallel_size": (1, 2, 4, 5, 8, 12, 16),
    "pipeline_parallel_size": (1, 2, 40),
    "sequence_parallel_size": (1, 2, 4, 8, 16),
    "data_parallel_size": (1, 2, 3, 5, 16),
    "zero_stage": (0, 1, 2, 3),
    "offload": ("none", "optimizer", "weights"),
    "micro_batch_tokens": (512, 4096, 65536),
    "gradient_checkpointing": ("true", "false"),
    "gpu_memory_utilization": (0.2, 0.5, 0.9, 0.97),
}


@dataclass(frozen=True)
class Case:
    """A recipe and a cluster that may not fit together."""

    base: tuple[str, ...]
    pins: tuple[str, ...]
    cluster: Cluster

    @property
    def recipe(self) -> Recipe:
        """Return the recipe with its pins."""
        return loaded(*self.base, *self.pins)


@cache
def loaded(*overrides: str) -> Recipe:
    return rlflow.load(overrides)


def draw_case(draw: random.Random) -> Case:
    name = draw.choice(sorted(RECIPES))
    roles, generates = RECIPES[name]
    base = [f"recipe={name}", f"data.batch_size={draw.choice((8, 64, 1024))}"]
    if draw.random() < 0.7:
        base.append(f"model@models.policy={draw.choice(MODELS)}")
    if generates:
        base += [f"graph.rollouts.max_tokens={draw.choice((512, 4096, 16000, 30000))}"]
    elif draw.random() < 0.5:
        base.append(f"expect.response_tokens=[{draw.choice((400, 4000, 30000))}]")
    pins: dict[str, str] = {}
    for _ in range(draw.choice((0, 0, 1, 1, 2, 3, 4))):
        role, field = draw.choice(roles), draw.choice(sorted(PINS))
        value = str(draw.choice(PINS[field])).format(other=draw.choice(roles))
        pins[f"roles.{role}.{field}"] = value
    return Case(tuple(base), tuple(f"{key}={value}" for key, value in pins.items()), _draw_cluster(draw))


def _draw_cluster(draw: random.Random) -> Cluster:
    """Return a shape, or hosts of which some are labelled, reserved, partly taken, or have little memory."""
    cluster = load_cluster(f"{draw.choice(SHAPES)}@{draw.choice(KINDS)}")
    if draw.random() < 0.7:
        return cluster
    hosts = []
    for index, host in enumerate(cluster.hosts):
        free = tuple(gpu for gpu in range(host.gpus) if draw.random() < 0.8) or (0,)
        hosts.append(
            replace(
                host,
                name=f"node{index}",
                free=draw.choice((None, free)),
                reserved=index > 0 and draw.random() < 0.2,
                labels=draw.choice(((), ("fast",))),
                memory_gib=draw.choice((None, 64.0, 512.0)),
            )
        )
    return replace(cluster, hosts=tuple(hosts))


def infeasible_cases(count: int, seed: int) -> Iterator[tuple[Case, PlacementError]]:
    """Yield random recipes that do not fit, with the errors that say so."""
    draw = random.Random(seed)
    while count:
        case = draw_case(draw)
        error = planning_error(case.recipe, case.cluster)
        if isinstance(error, PlacementError):
            count -= 1
            yield case, error


def planning_error(recipe: Recipe, cluster: Cluster) -> UserError | None:
    """Return why the recipe has no plan, or None if it has one."""
    try:
        rlflow.compile(recipe, cluster)
    except UserError as error:
        return error
    return None


def broken_fixes(case: Case, error: PlacementError) -> list[str]:
    """Return the printed alternatives that do not give a plan; a missing fix counts as one."""
    if not error.notes["Fix"]:
        return ["(no fix)"]
    broken = []
    for alternative in error.notes["Fix"].split(", or "):
        try:
            again = planning_error(*applied(case, alternative))
        except UserError as unreadable:
            again = unreadable
        if again is not None:
            broken.append(f"{alternative} ({again.path}: {again.fact})")
    return broken


def applied(case: Case, fix: str) -> tuple[Recipe, Cluster]:
    """Return the recipe and the cluster with a fix, which is overrides or describes hosts."""
    overrides = fix = fix.removesuffix(" (tight)")
    cluster = case.cluster
    if more := re.search(r"(?: and )?(\d+) more hosts? like (\S+) with all \d+ GPUs free$", fix):
        overrides = fix[: more.start()]
        like = next(host for host in cluster.hosts if host.name == more[2])
        extra = tuple(replace(like, name=f"extra{n}", free=None) for n in range(int(more[1])))
        cluster = replace(cluster, hosts=(*cluster.hosts, *extra))
    elif large := re.search(r"(?: and )?(\d+) hosts? of 8 GPUs with (\d+) GiB each$", fix):
        overrides = fix[: large.start()]
        kind = max(cluster.hosts, key=lambda host: host.gpus).gpu
        hosts = tuple(Host(name=f"host-{n}", gpus=8, gpu=kind) for n in range(int(large[1])))
        cluster = Cluster(hosts=hosts, gpus={kind: replace(cluster.gpus[kind], memory_gib=float(large[2]))})
    words = overrides.split()
    if shapes := [word.removeprefix("cluster=") for word in words if word.startswith("cluster=")]:
        cluster = load_cluster(shapes[0])
    return loaded(*case.base, *case.pins, *(word for word in words if not word.startswith("cluster="))), cluster


def is_true(case: Case, error: PlacementError) -> bool:
    """Return whether the stated reason holds."""
    if error.path.endswith(".dtype"):
        return all("bfloat16" not in (gpu.peak_tflops or ()) for gpu in case.cluster.gpus.values())
    stated, others = _named_pins(case, error), re.search(r"conflict on|does not fit|nothing fits", error.fact)
    if not others:
        # A rule that a single role breaks: without the values that the error names, planning gets further.
        rest = [pin for pin in case.pins if pin not in stated]
        again = planning_error(loaded(*case.base, *rest), case.cluster)
        return again is None or (again.path, again.fact) != (error.path, error.fact)
    recipe = loaded(*case.base, *stated)
    if planning_error(recipe, case.cluster) is None:
        return False
    for pin in stated:
        rest = [other for other in stated if other != pin]
        if planning_error(loaded(*case.base, *rest), case.cluster) is not None:
            return False
    if needs := re.search(r"needs (GPUs|hosts) with at least (\d+) GiB", error.fact):
        gib = float(needs[2])
        enough, less = (_with_memory(case.cluster, needs[1], each) for each in (gib, gib - max(1.0, 0.05 * gib)))
        return planning_error(recipe, enough) is None and planning_error(recipe, less) is not None
    return True


def _named_pins(case: Case, error: PlacementError) -> list[str]:
    """Return the pins that an error names: in its path, or in its fact."""
    named = [pin for pin in case.pins if pin.partition("=")[0] == error.path or pin.partition("=")[0] in error.fact]
    if "conflict on" in error.fact or named or "nothing fits" in error.fact:
        return named
    words = error.fact.replace("-parallel group", "_parallel_size")
    return [pin for pin in case.pins if pin.startswith(f"{error.path}.") and pin.split(".")[2].split("=")[0] in words]


def _with_memory(cluster: Cluster, what: str, gib: float) -> Cluster:
    """Return the cluster with at least so much memory on each GPU, or on each host."""
    if what == "GPUs":
        gpus = {kind: replace(gpu, memory_gib=max(gib, gpu.memory_gib or gib)) for kind, gpu in cluster.gpus.items()}
        return replace(cluster, gpus=gpus)
    return replace(cluster, hosts=tuple(replace(h, memory_gib=max(gib, h.memory_gib or gib)) for h in cluster.hosts))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--recipes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    working, false = 0, 0
    for count, (case, error) in enumerate(infeasible_cases(given.recipes, given.seed), 1):
        broken, holds = broken_fixes(case, error), is_true(case, error)
        working, false = working + (not broken), false + (not holds)
        if broken or not holds:
            print(" ".join((*case.base, *case.pins)), case.cluster.shape)
            print(f"  {error}".replace("\n", "\n  "))
            print("".join(f"    does not work: {each}\n" for each in broken) + "    false\n" * (not holds), end="")
        if count % 20 == 0:
            print(f"{count} recipes: the fixes of {working} work, {false} false reasons", flush=True)
    figures = {"recipes": given.recipes, "fixes_that_work": working, "false_blockers": false}
    goals = {
        "recipes": Goal("for information", True),
        "fixes_that_work": Goal(f"all {given.recipes}", working == given.recipes),
        "false_blockers": Goal("0", false == 0),
    }
    return finish("fixes", figures, goals, given.json)


if __name__ == "__main__":
    raise SystemExit(main())
