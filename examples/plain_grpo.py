"""GRPO as one plain loop: what ``rlflow recipe=grpo_tiny`` does, without a graph, a planner or a runtime.

    python examples/plain_grpo.py

A model of 0.8 M parameters adds two numbers, mostly wrongly. In every step it answers 128 sums, 8 times each. A right
answer earns a reward of 1. Training makes answers likelier that earn more than the mean of their group, which is the 8
answers to one sum, and makes the others less likely.

Three engines of rlflow hold a copy of the model: ``rollout`` generates, ``actor`` is trained, and ``reference`` keeps
the initial weights. All else is in this file. It takes about two minutes on a CPU, in which the share of held-out sums
that are right rises from about 0.4 to 0.9. A test compares its numbers with those of ``rlflow``.

Shapes: G responses to each prompt (a group), B responses in a step, T tokens in all of them. A column such as the
logprobs of a step is packed: one array [T], in which the rows of different lengths follow one another.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import rlflow
from rlflow.batch import Minibatch, Prompts, Repeated, Rollouts
from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.base import EngineSpec, Entropy, Follows, Generates, Sampling, Scores, Trains
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.recipe import Data, Model, Optimizer
from rlflow.resources.layout import Layout

Reward = Callable[[Sequence[str], Sequence[Mapping[str, Any]]], list[float]]
"""A function from B responses, and the rows of the data set that they answer, to B numbers."""
OPTIMIZER = Optimizer(learning_rate=5e-4, schedule="linear", warmup_steps=10, betas=(0.9, 0.98))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The numbers of a run: those of ``recipes/grpo_tiny.yaml``, with fewer steps."""

    steps: int = 100
    batch_size: int = 128
    group_size: int = 8
    max_tokens: int = 5
    num_minibatches: int = 2
    clip_eps: float = 0.2
    kl_coef: float = 0.001
    optimizer: Optimizer = OPTIMIZER
    seed: int = 0


class Rollout(Generates, Follows, Protocol):
    """An engine that generates, and takes over the weights of a trained one."""


def train(
    actor: Trains, rollout: Rollout, reference: Scores, data: DataSource, reward: Reward, settings: Settings
) -> Iterator[dict[str, float]]:
    """Make the steps of GRPO, and yield the metrics of each."""
    sampling = Sampling(max_tokens=settings.max_tokens, group_size=settings.group_size)
    loss = ClippedLoss(settings.clip_eps, settings.kl_coef)
    rollout.load_weights(actor.weights(), version=0)
    for step in range(settings.steps):
        rollouts = rollout.generate(data.prompts(step), sampling)
        rewards = np.array(reward(rollouts.texts, rollouts.rows))
        advantages = group_advantages(rewards, settings.group_size)
        # An update computes the gradients in passes that fit in memory, clips their norm, and makes a step of AdamW.
        updates = [
            actor.update(minibatch, loss).values
            for minibatch in minibatches(rollouts, advantages, reference, settings, step)
        ]
        rollout.load_weights(actor.weights(), version=step + 1)
        means = {name: float(np.mean([update[name] for update in updates])) for name in ("loss", "kl", "grad_norm")}
        yield {"reward": float(rewards.mean()), **means}


def group_advantages(rewards: NDArray[np.float64], group_size: int) -> NDArray[np.float64]:
    """Return each reward minus its group's mean, over the group's standard deviation [B].

    Responses are in the order of their prompts, so a group is ``group_size`` neighbors.
    """
    groups = rewards.reshape(-1, group_size)
    centered = groups - groups.mean(axis=1, keepdims=True)
    advantages: NDArray[np.float64] = centered / (groups.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    return advantages.ravel()


def minibatches(
    rollouts: Rollouts, advantages: NDArray[np.float64], reference: Scores, settings: Settings, step: int
) -> Iterator[Minibatch]:
    """Yield the minibatches of a step, with the columns that the loss reads."""
    lengths = rollouts.response_ids.lengths
    columns = {
        "old_logprobs": rollouts.logprobs,
        "reference": reference.logprobs(rollouts, rollouts.temperature).values,
        # A number for each response, repeated for its tokens.
        "advantages": Repeated(advantages.astype(np.float32), lengths),
    }
    for rows in np.array_split(np.arange(len(rollouts)), settings.num_minibatches):
        # The loss of a minibatch is the sum of weight times loss over its tokens: with these weights, their mean.
        weight = np.full(len(rows), 1 / lengths[rows].sum(), np.float32)
        yield Minibatch(
            **vars(rollouts.as_sequences().take(rows)),
            step=step,  # the schedule of the learning rate reads it
            columns={name: column.take(rows) for name, column in columns.items()},
            weights=Repeated(weight, lengths[rows]),
        )


@dataclass(frozen=True)
class ClippedLoss:
    """The loss of each token: PPO's clipped surrogate, and the KL divergence from the reference by the estimator k3."""

    clip_eps: float
    kl_coef: float
    temperature: float = 1.0
    entropy: Entropy = "unused"

    def __call__(self, logprobs: Tensor, columns: Mapping[str, Tensor]) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the loss [T] and metrics [T] from the model's logprobs [T] and the columns [T]."""
        ratio = (logprobs - columns["old_logprobs"]).exp()
        clipped = ratio.clamp(1 - self.clip_eps, 1 + self.clip_eps)
        gain = torch.minimum(ratio * columns["advantages"], clipped * columns["advantages"])
        difference = columns["reference"] - logprobs
        kl = difference.exp() - 1 - difference
        return self.kl_coef * kl - gain, {"kl": kl}


def exact(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return 1 for each response that equals its row's answer, and 0 for others."""
    return [float(text == row["answer"]) for text, row in zip(texts, rows, strict=True)]


def evaluate(rollout: Generates, prompts: Prompts, reward: Reward, settings: Settings) -> float:
    """Return the mean reward of the likeliest responses to held-out prompts."""
    rollouts = rollout.generate(prompts, Sampling(max_tokens=settings.max_tokens, temperature=0.0))
    return float(np.mean(reward(rollouts.texts, rollouts.rows)))


def build_engines(model: Model, settings: Settings) -> tuple[TorchEngine, TransformersEngine, TransformersEngine]:
    """Return the engines of actor, rollout and reference, each with the model's weights."""

    def spec(role: str, capability: str) -> EngineSpec:
        return EngineSpec(
            role=role,
            model_name="policy",
            model=model,
            capabilities=frozenset({capability}),
            device="cpu",
            seed=settings.seed,
            steps=settings.steps,
            optimizer=settings.optimizer,
            layout=Layout(micro_batch_tokens=2048),
        )

    actor = TorchEngine(spec("actor", "Trains"))
    return actor, TransformersEngine(spec("rollout", "Generates")), TransformersEngine(spec("reference", "Scores"))


def open_data(model: Model, settings: Settings) -> DataSource:
    """Return all sums of two numbers of two digits, tokenized and shuffled; 500 sums are held out."""
    data = Data(
        source="rlflow.data.arithmetic:additions",
        options={"digits": 2},
        eval_split="test",
        batch_size=settings.batch_size,
        max_prompt_tokens=8,
    )
    held_out = {"": (data, load_rows(data, "eval_split")[:500])}
    tokenizer, rows = load_tokenizer("policy", model), load_rows(data, "split")
    return open_training_data(data, tokenizer, rows, settings.seed, held_out=held_out)


def train_beginner(folder: Path) -> Path:
    """Return the model to start from, which the recipe ``beginner_tiny`` trains in about 20 seconds."""
    if not (folder / "model").exists():
        rlflow.run(rlflow.compile(rlflow.load(["recipe=beginner_tiny"]), "local"), folder)
    return folder / "model" / "actor"


def main() -> None:
    """Train, and print the reward of each step."""
    settings = Settings()
    model = Model(path=str(train_beginner(Path("outputs/beginner_tiny"))), dtype="float32")
    data = open_data(model, settings)
    actor, rollout, reference = build_engines(model, settings)
    print(f"held-out reward before  {evaluate(rollout, data.held_out_prompts(), exact, settings):.3f}")
    for step, metrics in enumerate(train(actor, rollout, reference, data, exact, settings), 1):
        print(f"step {step:3}  " + "  ".join(f"{name} {value:.4f}" for name, value in metrics.items()), flush=True)
    print(f"held-out reward after   {evaluate(rollout, data.held_out_prompts(), exact, settings):.3f}")


if __name__ == "__main__":
    main()
