"""The losses of pairs and their gradients against TRL's, on the same tensors."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Logprobs, Packed
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.preference import DpoUpdate, RewardModelUpdate
from rlflow.recipe import Model, Optimizer
from tests.helpers import pairs, spec
from tests.integration.test_trl_loss import compare, padded

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

GIVEN = pairs(3)
# TRL's order: all chosen responses, then all rejected ones.
ORDER = [0, 2, 4, 1, 3, 5]
ARGUMENTS: dict[str, Any] = {
    "per_device_train_batch_size": 3,
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "report_to": "none",
}


def engine_of(folder: Path, head: str) -> TorchEngine:
    """Return an engine with the model that TRL is given."""
    # The largest norm leaves gradients as they are.
    options: dict[str, Any] = {"capabilities": ["Trains", head], "optimizer": Optimizer(max_grad_norm=1e9)}
    TorchEngine(spec(**options)).export(folder / "model")
    return TorchEngine(spec(model=Model(path=str(folder / "model"), dtype="float32"), **options))


def inputs_of_trl() -> dict[str, torch.Tensor]:
    """Return the inputs that TRL makes, padded on the right."""
    prompts, responses = ([ids[row].tolist() for row in ORDER] for ids in (GIVEN.prompt_ids, GIVEN.response_ids))
    rows = list(zip(prompts, responses, strict=True))
    masks = {
        "attention_mask": [[1] * len(prompt + response) for prompt, response in rows],
        "completion_mask": [[0] * len(prompt) + [1] * len(response) for prompt, response in rows],
    }
    ids = padded([prompt + response for prompt, response in rows], 0, False, torch.int64)
    return {"input_ids": ids, **{name: padded(mask, 0, False, torch.int64) for name, mask in masks.items()}}


def sums(column: Packed) -> torch.Tensor:
    """Return the sums [6] over each response, in the order of TRL."""
    return torch.tensor(np.array([column[row].sum() for row in ORDER]))


def test_dpo(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    engine = engine_of(tmp_path, "Scores")
    own = engine.logprobs(GIVEN, 1.0).values
    apart = np.random.default_rng(0).normal(0, 0.5, len(own.values)).astype(np.float32)
    reference = own.like(own.values + apart)
    ours = DpoUpdate(beta=0.3).run(engine, GIVEN, Logprobs(values=reference)).values

    path = tmp_path / "model"
    trainer = DPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(path),
        args=DPOConfig(**ARGUMENTS, output_dir=str(tmp_path / "trl"), beta=0.3),
        train_dataset=Dataset.from_list([{"prompt": "1", "chosen": "2", "rejected": "3"}] * 3),
    )
    trainer.precompute_ref_logps = True
    chosen, rejected = sums(reference).chunk(2)
    given = {**inputs_of_trl(), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss = trainer._compute_loss(trainer.model, given, return_outputs=False)
    loss.backward()
    assert ours["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    assert 0 < ours["accuracy"] < 1
    compare(engine, {name: weight.grad for name, weight in trainer.model.named_parameters()})


def test_reward_model(tmp_path: Path) -> None:
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    engine = engine_of(tmp_path, "Evaluates")
    ours = RewardModelUpdate().run(engine, GIVEN).values
    path = tmp_path / "model"
    model = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)
    # No response has it.
    model.config.pad_token_id = 0
    trainer = RewardTrainer(
        model=model,
        processing_class=AutoTokenizer.from_pretrained(path),
        args=RewardConfig(**ARGUMENTS, output_dir=str(tmp_path / "trl")),
        train_dataset=Dataset.from_list([{"chosen": "1+1=2", "rejected": "1+1=3"}] * 3),
    )
    given = inputs_of_trl()
    del given["completion_mask"]
    loss = trainer.compute_loss(trainer.model, given)
    loss.backward()
    assert ours["loss"] == pytest.approx(float(loss.detach()), abs=1e-6)
    compare(engine, {name: weight.grad for name, weight in trainer.model.named_parameters()})
