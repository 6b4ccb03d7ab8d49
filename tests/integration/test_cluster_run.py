"""The command line on simulated hosts, with the engines of a cluster: to its end, and stopped by SIGTERM."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.glossary import unexplained

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POLICY = ["actor", "reference", "rollout"]
LENGTH = "length: {options: {max_characters: 4, buffer: 4}}"
# A model that needs no other run to be made, and a reward in which its responses differ.
NEW_MODEL = (
    "~models.policy.recipe",
    "+models.policy.random_weights=true",
    "+models.policy.characters='0123456789+='",
    "+models.policy.architecture={model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 2,"
    " num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32, vocab_size: 13, max_position_embeddings: 64}",
    "~graph.rewards.function",
    f"graph.rewards.functions={{{LENGTH}}}",
    "data.batch_size=16",
    "evaluation.num_prompts=20",
)


# A run notices after about 7 s that its Ray has ended, so a shorter step would still be in time for a checkpoint.
SLOW_REWARD = """
import time
from pathlib import Path

def slow(texts, rows):
    try:
        Path({wanted!r}).unlink()
    except FileNotFoundError:
        return [0.0] * len(texts)
    Path({begun!r}).touch()
    time.sleep(9)
    return [0.0] * len(texts)
"""


def words(recipe: str, roles: Sequence[str], steps: int, *overrides: str) -> list[str]:
    pins = [f"roles.{role}.gpus=2" for role in roles]
    options = ["cluster=2x1@cpu", f"steps={steps}", f"evaluation.every={steps}", "profile=[2]", "hydra.run.dir=run"]
    return [sys.executable, "-m", "rlflow", f"recipe={recipe}", *options, *pins, *overrides]


def check_files(folder: Path, roles: Sequence[str], steps: int) -> None:
    """Compare what the run has written with its plan."""
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


def test_sigterm_to_the_whole_group_leaves_a_checkpoint(tmp_path: Path) -> None:
    """The signal comes within the second step, which lasts long enough to notice if it ended Ray too."""
    wanted, begun = tmp_path / "wanted", tmp_path / "begun"
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD.format(wanted=str(wanted), begun=str(begun)))
    slow = "slow: {function: 'slow_reward:slow', timeout_s: 60}"
    rewards = f"graph.rewards.functions={{{LENGTH}, {slow}}}"
    overrides = (*NEW_MODEL, rewards, "roles.actor.optimizer.warmup_steps=2", "checkpoints.every=100")
    with (
        (tmp_path / "errors").open("w") as errors,
        subprocess.Popen(
            words("grpo_tiny_cluster", POLICY, 9, *overrides),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        assert process.stdout is not None
        out = ""
        for line in process.stdout:
            out += line
            if line.startswith("step     1"):
                wanted.touch()
                while process.poll() is None and not begun.exists():
                    time.sleep(0.01)
                os.killpg(process.pid, signal.SIGTERM)
                break
        out += process.stdout.read()
        assert process.wait(timeout=60) == 143, out + (tmp_path / "errors").read_text()
    assert (tmp_path / "errors").read_text() == ""
    assert "2 of 2 CPUs on simulated hosts" in out
    assert "stopping after this step" in out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert (report["status"], report["steps"]) == ("stopped", 2)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-000002"]
    check_files(tmp_path / "run", POLICY, steps=2)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("recipe", "roles", "steps"),
    [("grpo_tiny_cluster", POLICY, 10), ("ppo_tiny_cluster", ["critic", *POLICY], 16)],
)
def test_the_tiny_recipe_learns_on_two_hosts(recipe: str, roles: list[str], steps: int, tmp_path: Path) -> None:
    """It gains at least 0.1 in a few steps."""
    done = subprocess.run(
        words(recipe, roles, steps),
        cwd=tmp_path,
        env={**os.environ, "RLFLOW_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    told = re.search(r"eval_before (-?[\d.]+), eval_after (-?[\d.]+)", done.stdout)
    assert told is not None
    before, after = map(float, told.groups())
    assert after >= before + 0.1
    check_files(tmp_path / "run", roles, steps)
