"""GRPO written out: 60 lines without rlflow's graph, engines, packing or losses must give the same figures."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlflow
from rlflow.compiler.lower import models_in_use
from rlflow.data.source import DataSource, load_rows, open_training_data
from rlflow.engines.base import sample_seed
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.step import train_step
from tests.conftest import CONFIG_DIR

STEPS, GROUP, LIMIT, EPS, KL, RATE, BETAS = 3, 4, 4, 0.2, 0.1, 1e-2, (0.9, 0.98)
OVERRIDES = [
    "recipe=real",
    f"graph.update.kl_coef={KL}",
    "graph.update.num_minibatches=2",
    f"graph.rewards.function='{__name__}:length'",
    f"roles.actor.optimizer.learning_rate={RATE}",
    "roles.actor.optimizer.betas=[0.9,0.98]",
]


def length(texts: Any, rows: Any) -> list[float]:
    return [float(len(text)) for text in texts]


def plain_loop(data: DataSource, policy: Any, reference: Any, tokenizer: Any) -> list[dict[str, float]]:
    """Train on one sequence at a time, without cache or packing."""

    def logprobs(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
        scores = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        return torch.stack([scores[len(prompt) - 1 + at, token] for at, token in enumerate(response)])

    def sample(prompt: list[int], key: list[int]) -> list[int]:
        draws = np.random.Generator(np.random.Philox(key=sample_seed(0, np.array(key)))).random(LIMIT)
        response: list[int] = []
        while len(response) < LIMIT and tokenizer.eos_token_id not in response:
            chances = policy(torch.tensor([prompt + response])).logits[0, -1].log_softmax(-1).double().exp()
            response.append(int((chances.cumsum(-1) <= draws[len(response)] * chances.sum()).sum()))
        return response

    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE, betas=BETAS, weight_decay=0.0)
    history = []
    for step in range(STEPS):
        batch = data.prompts(step)
        samples = []
        with torch.no_grad():
            for index in range(len(batch)):
                prompt = batch.ids[index].tolist()
                group = [sample(prompt, [step, index, n]) for n in range(GROUP)]
                texts = [tokenizer.decode(response, skip_special_tokens=True) for response in group]
                rewards = torch.tensor(length(texts, None))
                advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
                for response, advantage in zip(group, advantages, strict=True):
                    old, ref = logprobs(policy, prompt, response), logprobs(reference, prompt, response)
                    samples.append((prompt, response, advantage, old, ref, float(len(texts[0]))))
        losses, kls = [], []
        for half in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
            tokens = sum(len(response) for _, response, *_ in half)
            loss, kl_sum = torch.zeros(()), 0.0
            for prompt, response, advantage, old, ref, _ in half:
                new = logprobs(policy, prompt, response)
                ratio = (new - old).exp()
                surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - EPS, 1 + EPS) * advantage)
                kl = (ref - new).exp() - (ref - new) - 1
                loss = loss + (-surrogate + KL * kl).sum() / tokens
                kl_sum += float(kl.detach().sum()) / tokens
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            kls.append(kl_sum)
        history.append({"loss": float(np.mean(losses)), "kl": float(np.mean(kls))})
    return history


@pytest.mark.slow
def test_the_compiled_graph_gives_the_same_figures(tmp_path: Path) -> None:
    recipe = rlflow.load(OVERRIDES, CONFIG_DIR)
    plan, models = rlflow.compile(recipe), models_in_use(recipe)
    tokenizer = load_tokenizer("policy", models["policy"])
    data = open_training_data(recipe.data, tokenizer, load_rows(recipe.data, "split"), recipe.seed)
    policy, reference = (
        load_model("policy", models["policy"], device="cpu", dtype=torch.float32, seed=0) for _ in range(2)
    )
    for model in (policy, reference):
        model.config._attn_implementation = "eager"
    expected = plain_loop(data, policy, reference, tokenizer)
    with LocalRuntime().start(plan, models, tmp_path) as engines:
        engines["rollout"].load_weights(engines["actor"].weights(), 0)
        steps = [train_step(plan, engines, data, step) for step in range(STEPS)]
        for name, value in engines["actor"].weights():
            assert (value - policy.state_dict()[name]).abs().max() < 1e-4, name
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours["update/loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["update/kl"] == pytest.approx(theirs["kl"], abs=1e-6)
    assert steps[-1]["update/kl"] > 0
