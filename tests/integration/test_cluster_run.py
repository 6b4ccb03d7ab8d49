"""The command line on simulated hosts, with the engines of a cluster."""

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.glossary import unexplained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POLICY = ["actor", "reference", "rollout"]
# A model that needs no other run to be made, and a reward in which its responses differ.
NEW_MODEL = (
    "~models.policy.recipe",
    "+models.policy.random_weights=true",
    "+models.policy.characters='0123456789+='",
    "+models.policy.architecture={model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,"
    " num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32, vocab_size: 13, max_position_embeddings: 64}",
    "~graph.rewards.function",
    "graph.rewards.functions={length: {options: {max_characters: 4, buffer: 4}}}",
    "data.batch_size=16",
    "evaluation.num_prompts=20",
)


@pytest.mark.parametrize(
    ("recipe", "roles", "steps", "overrides"),
    [
        ("grpo_tiny_cluster", POLICY, 2, (*NEW_MODEL, "roles.actor.optimizer.warmup_steps=2")),
        pytest.param("grpo_tiny_cluster", POLICY, 10, (), marks=pytest.mark.soak),
        pytest.param("ppo_tiny_cluster", ["critic", *POLICY], 16, (), marks=pytest.mark.soak),
    ],
)
def test_the_tiny_recipe_runs_on_two_hosts(
    recipe: str, roles: list[str], steps: int, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    """A recipe without overrides gains at least 0.1 in a few steps."""
    pins = [f"roles.{role}.gpus=2" for role in roles]
    options = ["cluster=2x1@cpu", f"steps={steps}", f"evaluation.every={steps}", "profile=[2]"]
    settings = [f"recipe={recipe}", *options, *pins, *overrides]
    done = subprocess.run(
        [sys.executable, "-m", "rlflow", *settings],
        cwd=tmp_path,
        env={**os.environ, "RLFLOW_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "2 of 2 CPUs on simulated hosts" in done.stdout
    told = re.search(r"eval_before (-?[\d.]+), eval_after (-?[\d.]+)", done.stdout)
    assert told is not None
    before, after = map(float, told.groups())
    assert overrides or after >= before + 0.1
    (folder,) = tmp_path.glob("outputs/*/*")
    placement = json.loads((folder / "placement.json").read_text())
    assert placement["simulated"] is True
    assert sorted(placement["roles"]) == sorted(roles)
    for workers in placement["roles"].values():
        assert [worker[0]["planned"]["host"] for worker in workers] == ["host-0", "host-1"]
        assert all(worker[0]["planned"]["host"] == worker[0]["bound"]["host"] for worker in workers)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    differences = [line["update/sampler_difference"] for line in lines if "update/sampler_difference" in line]
    # Both compute in float32, and only the orders of their sums differ.
    assert len(differences) == steps
    assert max(differences) < 1e-4
    assert all(line["update/grad_norm"] > 0 for line in lines if "update/grad_norm" in line)
    assert unexplained(lines) == set()
    profiles = sorted((folder / "profiles").glob("step-*/*"))
    assert [str(path.relative_to(folder / "profiles")) for path in profiles] == [
        f"step-2/{role}-{rank}.pt.trace.json.gz" for role in sorted(roles) for rank in (0, 1)
    ]
    for path in profiles:
        names = [event["name"] for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]]
        is_trained = path.name.startswith(("actor", "critic"))
        assert names.count("Optimizer.step#AdamW.step") == 2 * is_trained, "a step has two minibatches"
        assert ("aten::mm" if is_trained else "aten::embedding") in names
