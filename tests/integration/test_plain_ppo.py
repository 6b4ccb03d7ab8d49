"""PPO written out: a plain loop with a policy and a critic must give the same figures as the compiled graph."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.compiler.models import models_in_use
from rlflow.data.loading import load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.base import sample_seed
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training
from tests.helpers import spec
from tests.integration.test_critic import plan_of

STEPS, LIMIT, EPS, VALUE_EPS, KL, GAMMA, LAM, RATE, BETAS = 3, 5, 0.2, 0.1, 0.3, 0.9, 0.8, 1e-2, (0.9, 0.98)
OVERRIDES = [
    f"graph.rewards.function='{__name__}:length'",
    f"graph.advantages={{node: gae_advantage, kl_coef: {KL}, gamma: {GAMMA}, lam: {LAM}}}",
    f"graph.value_update.clip_eps={VALUE_EPS}",
    *(
        f"roles.{role}.optimizer={{learning_rate: {RATE}, schedule: constant, warmup_steps: 0, betas: [0.9, 0.98]}}"
        for role in ("actor", "critic")
    ),
]


def length(texts: Any, rows: Any) -> list[float]:
    return [len(text) / 4 for text in texts]


def plain_loop(data: DataSource, policy: Any, critic: Any, reference: Any, tokenizer: Any) -> list[dict[str, float]]:
    """Train on one sequence at a time, without cache or packing."""

    def logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
        scores = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        return torch.stack([scores[len(prompt) - 1 + at, token] for at, token in enumerate(response)])

    def values(prompt: list[int], response: list[int]) -> torch.Tensor:
        told: torch.Tensor = critic(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1, 0]
        return told

    def sample(prompt: list[int], key: list[int]) -> list[int]:
        draws = np.random.Generator(np.random.Philox(key=sample_seed(0, np.array(key)))).random(LIMIT)
        response: list[int] = []
        while len(response) < LIMIT and tokenizer.eos_token_id not in response:
            chances = policy(torch.tensor([prompt + response])).logits[0, -1].log_softmax(-1).double().exp()
            response.append(int((chances.cumsum(-1) <= draws[len(response)] * chances.sum()).sum()))
        return response

    def estimated(gained: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        ahead, advantages = torch.zeros(()), []
        for at in reversed(range(len(gained))):
            following = expected[at + 1] if at + 1 < len(gained) else 0.0
            ahead = gained[at] + GAMMA * following - expected[at] + GAMMA * LAM * ahead
            advantages.append(ahead)
        return torch.stack(advantages[::-1])

    optimizers = [torch.optim.AdamW(m.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0) for m in (policy, critic)]
    history = []
    for step in range(STEPS):
        batch = data.prompts(step)
        samples = []
        with torch.no_grad():
            for index in range(len(batch)):
                prompt = batch.ids[index].tolist()
                response = sample(prompt, [step, index, 0])
                old, expected = logprobs(policy, prompt, response), values(prompt, response)
                gained = -KL * (old - logprobs(reference, prompt, response))
                gained[-1] += length([tokenizer.decode(response, skip_special_tokens=True)], None)[0]
                advantages = estimated(gained, expected)
                samples.append((prompt, response, old, expected, advantages + expected, advantages))
        every = torch.cat([advantages for *_, advantages in samples])
        losses, errors = [], []
        for half in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
            tokens = sum(len(response) for _, response, *_ in half)
            loss, error = torch.zeros(()), torch.zeros(())
            for prompt, response, old, expected, returns, raw in half:
                advantages = (raw - every.mean()) / every.std(correction=0)
                ratio = (logprobs(policy, prompt, response) - old).exp()
                surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - EPS, 1 + EPS) * advantages)
                loss = loss - surrogate.sum() / tokens
                value = values(prompt, response)
                bounded = torch.maximum(torch.minimum(value, expected + VALUE_EPS), expected - VALUE_EPS)
                squares = torch.maximum((value - returns) ** 2, (bounded - returns) ** 2)
                error = error + squares.sum() / 2 / tokens
            for model, optimizer, total in zip((policy, critic), optimizers, (loss, error), strict=True):
                optimizer.zero_grad()
                torch.autograd.backward(total)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            losses.append(float(loss.detach()))
            errors.append(float(error.detach()))
        history.append({"update": float(np.mean(losses)), "value_update": float(np.mean(errors))})
    return history


@pytest.mark.slow
def test_the_compiled_graph_gives_the_same_figures(tmp_path: Path) -> None:
    plan = plan_of(*OVERRIDES)
    models = models_in_use(plan.recipe)
    tokenizer = load_tokenizer("policy", models["policy"])
    rows = load_rows(plan.recipe.data, "split")
    data = open_training_data(plan.recipe.data, tokenizer, rows, plan.recipe.seed)
    policy, reference, critic = (
        load_model(spec(model=models["policy"], capabilities=["Trains", capability]), dtype=torch.float32)
        for capability in ("Scores", "Scores", "Values")
    )
    for model in (policy, reference, critic):
        model.config._attn_implementation = "eager"
    expected = plain_loop(data, policy, critic, reference, tokenizer)
    with LocalRuntime().start(plan, models, tmp_path) as engines:
        engines["rollout"].load_weights(engines["actor"].weights(), 0)
        training = Training.of(plan, engines, data)
        steps = [train_step(training, step) for step in range(STEPS)]
        for role, theirs in (("actor", policy), ("critic", critic)):
            for name, value in engines[role].weights():
                assert (value - theirs.state_dict()[name]).abs().max() < 1e-4, (role, name)
    for ours, loop in zip(steps, expected, strict=True):
        for node, loss in loop.items():
            assert ours[f"{node}/loss"] == pytest.approx(loss, abs=1e-6)
    assert steps[-1]["value_update/clip_fraction"] > 0
