"""GRPO as a plain loop, examples/plain_grpo.py, gives the figures of rlflow.

It does so with rlflow's engines, and with an engine that is written out too: without cache, packing or passes.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlflow
from examples import plain_grpo
from examples.plain_grpo import Settings, build_engines, exact, open_data, train
from rlflow.batch import Logprobs, Metrics, Minibatch, Packed, Prompts, Repeated, Rollouts, Sequences
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.base import Sampling, TokenLoss, sample_seed
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer
from rlflow.recipe import Model, Optimizer
from tests.conftest import CONFIG_DIR, ROOT
from tests.helpers import spec

pytestmark = pytest.mark.slow

OPTIMIZER = Optimizer(learning_rate=1e-2, betas=(0.9, 0.98))
SETTINGS = Settings(
    steps=3, batch_size=3, group_size=4, max_tokens=4, num_minibatches=2, kl_coef=0.1, optimizer=OPTIMIZER
)
OVERRIDES = [
    "recipe=real",
    "steps=3",
    "evaluation=null",
    "graph.update.kl_coef=0.1",
    "graph.update.num_minibatches=2",
    f"graph.rewards.function='{__name__}:length'",
    "roles.actor.optimizer.betas=[0.9,0.98]",
]


def length(texts: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(len(text)) for text in texts]


class PlainEngine:
    """Generates, scores and trains one sequence at a time."""

    def __init__(self, model: Model) -> None:
        self.model: Any = load_model(spec(model=model), dtype=torch.float32)
        self.model.config._attn_implementation = "eager"
        self.tokenizer = load_tokenizer("policy", model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=OPTIMIZER.learning_rate, betas=OPTIMIZER.betas, weight_decay=0.0
        )

    def generate(self, prompts: Prompts, sampling: Sampling) -> Rollouts:
        samples = prompts.repeat(sampling.group_size)
        with torch.no_grad():
            responses = [self.sample(samples, row, sampling.max_tokens) for row in range(len(samples))]
        ids = Packed.from_rows(responses, np.int32)
        sequences = Sequences(keys=samples.keys, prompt_ids=samples.ids, response_ids=ids)
        return Rollouts(
            **vars(sequences),
            logprobs=self.logprobs(sequences, 1.0).values,
            versions=Repeated(np.zeros(len(samples), np.int32), ids.lengths),
            finished=np.array([self.tokenizer.eos_token_id in response for response in responses]),
            temperature=1.0,
            texts=[self.tokenizer.decode(response, skip_special_tokens=True) for response in responses],
            rows=samples.rows,
        )

    def sample(self, samples: Prompts, row: int, limit: int) -> list[int]:
        draws = np.random.Generator(np.random.Philox(key=sample_seed(0, samples.keys[row]))).random(limit)
        prompt, response = samples.ids[row].tolist(), list[int]()
        while len(response) < limit and self.tokenizer.eos_token_id not in response:
            chances = self.model(torch.tensor([prompt + response])).logits[0, -1].log_softmax(-1).double().exp()
            response.append(int((chances.cumsum(-1) <= draws[len(response)] * chances.sum()).sum()))
        return response

    def logprobs(self, sequences: Sequences, temperature: float) -> Logprobs:
        with torch.no_grad():
            rows = [self.scores(sequences, row).numpy() for row in range(len(sequences))]
        return Logprobs(values=Packed.from_rows(rows, np.float32))

    def scores(self, sequences: Sequences, row: int) -> torch.Tensor:
        prompt, response = sequences.prompt_ids[row].tolist(), sequences.response_ids[row].tolist()
        scores = self.model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
        return torch.stack([scores[len(prompt) - 1 + at, token] for at, token in enumerate(response)])

    def update(self, minibatch: Minibatch, loss: TokenLoss) -> Metrics:
        sums = {"loss": torch.zeros(()), "kl": torch.zeros(())}
        for row in range(len(minibatch)):
            columns = {name: torch.tensor(column[row]) for name, column in minibatch.columns.items()}
            losses, metrics = loss(self.scores(minibatch, row), columns)
            for name, values in (("loss", losses), ("kl", metrics["kl"])):
                sums[name] = sums[name] + (values * torch.tensor(minibatch.weights[row])).sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(sums["loss"])
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return Metrics(values={name: float(total.detach()) for name, total in (sums | {"grad_norm": norm}).items()})

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.model.state_dict().items()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        self.model.load_state_dict(dict(weights))

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    restore = export = save


def assert_same(plain: Sequence[Mapping[str, float]], history: Sequence[Mapping[str, float]]) -> None:
    """Compare the metrics of a plain loop with the lines of ``metrics.jsonl``."""
    names = {"reward": "rewards/mean", "loss": "update/loss", "kl": "update/kl", "grad_norm": "update/grad_norm"}
    assert len(plain) == len(history) > 0
    for step, line in zip(plain, history, strict=True):
        for ours, theirs in names.items():
            assert step[ours] == pytest.approx(line[theirs], rel=1e-4, abs=1e-6), (line["step"], ours)
    assert plain[-1]["kl"] > 0


def test_with_a_plain_engine_it_gives_the_figures_of_the_compiled_graph(tmp_path: Path) -> None:
    recipe = rlflow.load(OVERRIDES, CONFIG_DIR)
    model = recipe.models["policy"]
    rows = load_rows(recipe.data, "split")
    data = open_training_data(recipe.data, load_tokenizer("policy", model), rows, recipe.seed)
    actor, rollout, reference = (PlainEngine(model) for _ in range(3))
    steps = list(train(actor, rollout, reference, data, length, SETTINGS))
    report = rlflow.run(rlflow.compile(recipe, "local"), tmp_path / "run", observers=())
    assert_same(steps, report.history())
    exported = load_model(spec(model=Model(path=report.models["actor"])), dtype=torch.float32).state_dict()
    for name, value in actor.weights():
        assert (value - exported[name]).abs().max() < 1e-4, name


class Counter(rlflow.Observer):
    """Counts the steps of a run."""

    count = 0

    def stepped(self, step: int, metrics: Mapping[str, float]) -> None:
        self.count = step


def test_with_rlflows_engines_it_makes_the_steps_of_grpo_tiny(tmp_path: Path) -> None:
    beginner = rlflow.load(["recipe=beginner_tiny", "steps=25", "evaluation=null"])
    path = rlflow.run(rlflow.compile(beginner, "local"), tmp_path / "beginner", observers=()).models["actor"]
    settings, model = Settings(steps=12), Model(path=path, dtype="float32")
    actor, rollout, reference = build_engines(model, settings)
    steps = list(islice(train(actor, rollout, reference, open_data(model, settings), exact, settings), 2))
    changes = ["steps=12", "evaluation=null", f"models.policy.path='{path}'", "models.policy.recipe=null"]
    plan, counter = rlflow.compile(rlflow.load(["recipe=grpo_tiny", *changes]), "local"), Counter()
    report = rlflow.run(plan, tmp_path / "run", observers=[counter], stop=lambda: counter.count == 2)
    assert_same(steps, report.history())
    assert steps[0]["reward"] == report.history()[0]["rewards/mean"] > 0


@pytest.mark.soak
def test_it_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    plain_grpo.main()
    rewards = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "held-out" in line]
    assert rewards[-1] > rewards[-2] + 0.2


def test_it_is_short() -> None:
    assert len((ROOT / "examples" / "plain_grpo.py").read_text().splitlines()) <= 200
