"""The loss against TRL's, on the same tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Advantages, Logprobs
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.update import PolicyUpdate
from rlflow.recipe import Model, Optimizer
from tests.helpers import rollouts, sequences, spec

PROMPTS, RESPONSES, KL, EPS = [4, 2, 3], [[3, 5], [1, 4], [6, 2]], 0.04, 0.2


def padded(rows: Any, pad: float, left: bool, dtype: torch.dtype) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    fill = [[pad] * (longest - len(row)) for row in rows]
    return torch.tensor([[*f, *row] if left else [*row, *f] for f, row in zip(fill, rows, strict=True)], dtype=dtype)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_loss_is_trls(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    TorchEngine(spec()).export(tmp_path / "model")
    engine = TorchEngine(
        spec(model=Model(path=str(tmp_path / "model"), dtype="float32"), optimizer=Optimizer(learning_rate=1e-9))
    )
    given = rollouts(sequences(PROMPTS, RESPONSES))
    draw = np.random.default_rng(0)
    size = len(given.response_ids.values)
    own = engine.logprobs(given, 1.0).values.values
    old, reference = (own + draw.normal(0, 0.2, size).astype(np.float32) for _ in range(2))
    advantages = draw.normal(size=len(given)).astype(np.float32)
    columns = {"old_logprobs": given.response_ids.like(old), "reference": given.response_ids.like(reference)}
    ours = PolicyUpdate(clip_eps=EPS, kl_coef=KL).run(
        engine,
        given,
        Advantages(values=advantages),
        reference=Logprobs(values=columns["reference"]),
        old_logprobs=Logprobs(values=columns["old_logprobs"]),
    )

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(tmp_path / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(tmp_path / "trl"),
            per_device_train_batch_size=6,
            num_generations=2,
            beta=KL,
            epsilon=EPS,
            use_bias_correction_kl=False,
            loss_type="bnpo",  # TRL's name for: every token of the batch counts the same
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * 6),
    )
    rows = range(len(given))
    prompt_rows, response_rows = (
        [packed[row].tolist() for row in rows] for packed in (given.prompt_ids, given.response_ids)
    )
    inputs = {
        "prompt_ids": padded(prompt_rows, 0, True, torch.int64),
        "prompt_mask": padded([[1] * len(row) for row in prompt_rows], 0, True, torch.int64),
        "completion_ids": padded(response_rows, 0, False, torch.int64),
        "completion_mask": padded([[1] * len(row) for row in response_rows], 0, False, torch.int64),
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": padded([columns["old_logprobs"][row].tolist() for row in rows], 0, False, torch.float32),
        "ref_per_token_logps": padded([columns["reference"][row].tolist() for row in rows], 0, False, torch.float32),
        "num_items_in_batch": torch.tensor(size),
    }
    trainer.current_gradient_accumulation_steps = 1
    theirs = float(trainer._compute_loss(trainer.model, inputs).detach())
    assert ours.values["loss"] == pytest.approx(theirs, abs=1e-6)
    assert ours.values["clip_fraction"] > 0, "the case must clip to say something"
