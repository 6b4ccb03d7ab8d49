"""Compare the speed of GRPO in TRL's GRPOTrainer and in rlflow, on a CPU, one step each in turn.

``python -m benchmarks.grpo_vs_trl [--json FILE]``

Both train the same model (2.6 M parameters, float32, random weights) on 16 prompts x 8 samples with KL to the reference
and one update per step. There are two cases: responses that end by chance (long-tailed, at most 256 tokens), and
responses that all have 32 tokens, because the model cannot generate the end token.
"""

import argparse
import contextlib
import io
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, TrainerCallback

import rlflow
from benchmarks.reporting import Goal, finish
from rlflow.compiler.models import models_in_use
from rlflow.compiler.plan import Plan
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.runtime.local import LocalRuntime
from rlflow.runtime.step import train_step
from rlflow.runtime.training import Training

PROMPTS, GROUP, KL = 16, 8, 0.04
CHARACTERS = [chr(code) for code in range(33, 117) if chr(code) != "_"]
# A larger difference of mean token counts would compare different work.
TOLERANCE = 0.03


@dataclass(frozen=True)
class Case:
    name: str
    max_tokens: int
    ends: bool
    """True if the model can generate the end token."""
    warmup: int
    steps: int
    most_steps: int
    """The limit of additional steps while the mean token counts differ by more than the tolerance."""


LONG_TAIL = Case("long_tail", 256, ends=True, warmup=1, steps=4, most_steps=14)
FULL_LENGTH = Case("full_length", 32, ends=False, warmup=3, steps=15, most_steps=15)


@dataclass
class Series:
    seconds: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    """Mean response length of each step."""

    def after(self, warmup: int) -> "Series":
        return Series(self.seconds[warmup:], self.tokens[warmup:])

    @property
    def samples_per_second(self) -> float:
        return PROMPTS * GROUP / statistics.median(self.seconds)

    @property
    def mean_tokens(self) -> float:
        return statistics.mean(self.tokens)


def prompt_texts() -> list[str]:
    """Return prompts of 8 to 16 random characters, always the same."""
    draw = np.random.default_rng(0)
    return ["".join(draw.choice(CHARACTERS, int(draw.integers(8, 17)))) for _ in range(PROMPTS)]


def rows(split: str) -> list[dict[str, str]]:
    """Return the rows of the recipe's data set."""
    return [{"prompt": text} for text in prompt_texts()]


def distinct_characters(texts: Sequence[str], rows: Sequence[Any]) -> list[float]:
    """Return the number of distinct characters: a cheap reward that differs between responses."""
    return [float(len(set(text))) for text in texts]


def make_model(folder: Path, case: Case) -> None:
    """Save a Qwen3 of 2.6 M parameters. If responses must not end, the end token is outside its vocabulary."""
    vocabulary = {character: index for index, character in enumerate(["_", *CHARACTERS])}
    size = len(vocabulary)
    end = "_" if case.ends else "<end>"
    tokenizer = Tokenizer(WordLevel(vocabulary | {end: vocabulary.get(end, size)}, unk_token="_"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end, pad_token="_", padding_side="left")
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=256,
        intermediate_size=576,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=size,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)


def plan_of(folder: Path, case: Case) -> Plan:
    """Return the plan of grpo_tiny with the benchmark's data and sizes, and the model in ``folder``."""
    recipe = rlflow.load(
        [
            "recipe=grpo_tiny",
            "models.policy.recipe=null",
            f"models.policy.path={folder}",
            "~data.options",
            "~data.columns",
            "data.source='benchmarks.grpo_vs_trl:rows'",
            f"data.batch_size={PROMPTS}",
            "data.max_prompt_tokens=16",
            "evaluation=null",
            f"graph.rollouts.group_size={GROUP}",
            f"graph.rollouts.max_tokens={case.max_tokens}",
            "graph.rewards.function='benchmarks.grpo_vs_trl:distinct_characters'",
            f"graph.update.kl_coef={KL}",
            "graph.update.num_minibatches=1",
            "roles.actor.optimizer.learning_rate=1e-6",
            "roles.actor.optimizer.warmup_steps=0",
        ]
    )
    return rlflow.compile(recipe)


def plans(folder: Path) -> Iterator[Plan]:
    """Yield the plans of both cases. Their models are made in ``folder``."""
    for case in (FULL_LENGTH, LONG_TAIL):
        make_model(folder / case.name, case)
        yield plan_of(folder / case.name, case)


class Rlflow:
    """A run of rlflow, a step at a time. ``folder`` has the model, and gets the files of the run."""

    def __init__(self, folder: Path, case: Case) -> None:
        plan = plan_of(folder, case)
        recipe = plan.recipe
        models = models_in_use(recipe)
        tokenizer = load_tokenizer("policy", models["policy"])
        data = open_training_data(recipe.data, tokenizer, load_rows(recipe.data, "split"), recipe.seed)
        self.series = Series()
        self._running = LocalRuntime().start(plan, models, folder / "run")
        self._training = Training.of(plan, self._running.__enter__(), data)

    def step(self) -> None:
        began = time.perf_counter()
        metrics = train_step(self._training, len(self.series.seconds))
        self.series.seconds.append(time.perf_counter() - began)
        self.series.tokens.append(metrics["rollouts/length_mean"])


def run_case(case: Case) -> tuple[Series, Series]:
    """Return TRL's and rlflow's steps without the warm-up."""
    from trl import GRPOConfig, GRPOTrainer

    trl = Series()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, case)
        ours = Rlflow(folder, case)

        def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
            trl.tokens.append(statistics.mean(len(ids) for ids in completion_ids))
            return distinct_characters(completions, [])

        class InTurn(TrainerCallback):  # type: ignore[misc]
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                self.began = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                trl.seconds.append(time.perf_counter() - self.began)
                ours.step()
                control.should_training_stop = is_enough(case, trl, ours.series)

        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=PreTrainedTokenizerFast.from_pretrained(folder),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=str(folder / "trl"),
                per_device_train_batch_size=PROMPTS * GROUP,
                num_generations=GROUP,
                gradient_accumulation_steps=1,
                max_completion_length=case.max_tokens,
                beta=KL,
                learning_rate=1e-6,
                max_steps=case.warmup + case.most_steps,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(rows("train")),
            callbacks=[InTurn()],
        )
        with contextlib.redirect_stdout(io.StringIO()):  # TRL prints figures of its own
            trainer.train()
    return trl.after(case.warmup), ours.series.after(case.warmup)


def is_enough(case: Case, trl: Series, ours: Series) -> bool:
    """Return whether there are enough steps for a median and for equal work; the ratio of speeds has no influence."""
    count = len(trl.seconds) - case.warmup
    if count < case.steps:
        return False
    return count >= case.most_steps or have_equal_tokens(trl.after(case.warmup), ours.after(case.warmup))


def have_equal_tokens(trl: Series, ours: Series) -> bool:
    return abs(ours.mean_tokens / trl.mean_tokens - 1) <= TOLERANCE


def matrix_flops() -> float:
    """Return this machine's peak operations per second, from matrix products of 2048 x 2048."""
    left, right = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(5):
        began = time.perf_counter()
        left @ right
        times.append(time.perf_counter() - began)
    return float(2 * 2048**3 / min(times))


def step_flops(mean_tokens: float, parameters: int) -> float:
    """Return the operations that a step needs at least.

    Generating and scoring take 2 per parameter and token, training 6; a prompt counts once per group.
    """
    prompt = statistics.mean(len(text) for text in prompt_texts())
    return PROMPTS * GROUP * (2 + 2 + 6) * parameters * (prompt / GROUP + mean_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    peak = matrix_flops()
    table = Table("case", "system", "steps", "s/step", "samples/s", "mean tokens", "share of matrix peak")
    ratios, equal = {}, True
    for case in (FULL_LENGTH, LONG_TAIL):
        trl, ours = run_case(case)
        equal &= have_equal_tokens(trl, ours)
        ratios[case.name] = ours.samples_per_second / trl.samples_per_second
        for system, series in (("TRL", trl), ("rlflow", ours)):
            seconds = statistics.median(series.seconds)
            share = step_flops(series.mean_tokens, 2_600_000) / seconds / peak
            table.add_row(
                case.name,
                system,
                str(len(series.seconds)),
                f"{seconds:.2f}",
                f"{series.samples_per_second:.1f}",
                f"{series.mean_tokens:.1f}",
                f"{share:.0%}",
            )
    Console(width=100).print(table)
    print(f"matrix peak: {peak / 1e9:.0f} GFLOP/s")
    figures = {
        "samples_per_second_ratio_long_tail": ratios["long_tail"],
        "samples_per_second_ratio_full_length": ratios["full_length"],
        "equal_tokens": equal,
    }
    goals = {
        "samples_per_second_ratio_long_tail": Goal("at least 3", ratios["long_tail"] >= 3),
        "samples_per_second_ratio_full_length": Goal("at least 1", ratios["full_length"] >= 1),
        "equal_tokens": Goal("true", equal),
    }
    return finish("grpo_vs_trl", figures, goals, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
