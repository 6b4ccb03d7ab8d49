"""Losses and their gradients against TRL's, on the same tensors."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Logprobs, Packed, Repeated, RolloutAdvantages, Rollouts
from rlflow.engines.torch import TorchEngine
from rlflow.nodes.policy_gates import SapoUpdate
from rlflow.nodes.policy_loss import Correction
from rlflow.nodes.policy_update import PolicyGradient, PolicyUpdate
from rlflow.nodes.policy_variants import CispoUpdate, GmpoUpdate, GspoUpdate, ReinforceUpdate
from rlflow.recipe import Model, Optimizer
from tests.helpers import rollouts, sequences, spec

PROMPTS, RESPONSES, KL = [4, 2, 3], [[3, 5], [1, 4], [6, 2]], 0.04


def padded(rows: Any, pad: float, left: bool, dtype: torch.dtype) -> torch.Tensor:
    longest = max(len(row) for row in rows)
    fill = [[pad] * (longest - len(row)) for row in rows]
    return torch.tensor([[*f, *row] if left else [*row, *f] for f, row in zip(fill, rows, strict=True)], dtype=dtype)


# Our node and TRL's options. "bnpo" is TRL's name for: every token of the batch counts the same.
CASES: dict[str, tuple[PolicyGradient, dict[str, Any]]] = {
    "token": (PolicyUpdate(), {"loss_type": "bnpo"}),
    "clip-higher": (PolicyUpdate(clip_eps=0.1, clip_eps_high=0.15), {"epsilon": 0.1, "epsilon_high": 0.15}),
    # TRL calls it delta, and applies it to all advantages. The other bound is tighter for positive ones.
    "dual clip": (PolicyUpdate(clip_eps=0.1, dual_clip=1.2), {"epsilon": 0.1, "delta": 1.2}),
    "sequence": (PolicyUpdate(aggregation="sequence"), {"loss_type": "grpo"}),
    "dr_grpo": (
        PolicyUpdate(aggregation="constant", constant_length=9),
        {"loss_type": "dr_grpo", "max_completion_length": 9},
    ),
    "gspo": (
        GspoUpdate(clip_eps=0.05, clip_eps_high=0.07, aggregation="sequence"),
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 0.07},
    ),
    # TRL's bound is that of the ratio itself.
    "cispo": (CispoUpdate(clip_eps_high=0.1), {"loss_type": "cispo", "epsilon_high": 1.1}),
    "sapo": (SapoUpdate(), {"loss_type": "sapo"}),
    "gmpo": (GmpoUpdate(clip_eps=0.1, clip_eps_high=0.15), {"epsilon": 0.1, "epsilon_high": 0.15}),
    "unbiased kl": (PolicyUpdate(unbiased_kl=True), {"use_bias_correction_kl": True}),
    "off-policy mask": (PolicyUpdate(off_policy_mask=0.001), {"off_policy_mask_threshold": 0.001}),
    "entropy": (PolicyUpdate(entropy_coef=0.3), {"entropy_coef": 0.3}),
    "correction": (PolicyUpdate(correction=Correction(max_ratio=1.1)), {}),
    "correction of sequences": (
        GspoUpdate(
            clip_eps=0.05,
            aggregation="token",
            correction=Correction(level="sequence", outside="mask", max_ratio=1.2),
        ),
        {"importance_sampling_level": "sequence", "epsilon": 0.05, "epsilon_high": 4e-4},
    ),
}


def trls(
    folder: Path, given: Rollouts, columns: Any, advantages: Any, options: Any, trainer_of: str = "GRPO"
) -> tuple[float, dict[str, Any]]:
    """Return TRL's loss and its gradient."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    library: Any = import_module("trl.experimental.gmpo") if trainer_of == "GMPO" else trl
    trainer = getattr(library, f"{trainer_of}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=getattr(library, f"{trainer_of}Config")(
            **options,
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=6,
            num_generations=2,
            beta=KL,
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
        "num_items_in_batch": torch.tensor(len(given.response_ids.values)),
    }
    if "importance_sampling_ratio" in columns:
        # TRL uses this ratio only with vLLM, from which it samples nothing here.
        trainer.use_vllm = True
        trainer.vllm_importance_sampling_correction = True
        ratios = [columns["importance_sampling_ratio"][row].tolist() for row in rows]
        inputs["importance_sampling_ratio"] = padded(ratios, 0, False, torch.float32)
    inputs["old_logps"] = inputs["old_per_token_logps"].sum(1)
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return float(loss.detach()), {name: weight.grad for name, weight in trainer.model.named_parameters()}


def weights_of_trl(correction: Correction, apart: Packed) -> Any:
    """Return the weights of TRL's modes token_truncate and sequence_mask."""
    if correction.outside == "bound":
        return np.minimum(np.exp(apart.values), correction.max_ratio)
    ratios = [np.full(len(apart[row]), np.exp(apart[row].sum())) for row in range(len(apart))]
    return np.concatenate([np.where(row > correction.max_ratio, 0, row) for row in ratios])


def engine_of(folder: Path) -> TorchEngine:
    """Return an engine whose model is also in ``folder``. Its optimizer steps are nearly zero."""
    TorchEngine(spec()).export(folder / "model")
    model = Model(path=str(folder / "model"), dtype="float32")
    return TorchEngine(spec(model=model, optimizer=Optimizer(learning_rate=1e-9, max_grad_norm=1e9)))


def compare(engine: TorchEngine, gradient: dict[str, Any]) -> None:
    for name, weight in engine._model.named_parameters():
        assert weight.grad is not None
        assert float((weight.grad - gradient[name]).abs().max()) <= 1e-6, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_losses_are_trls(case: str, tmp_path: Path) -> None:
    node, options = CASES[case]
    engine = engine_of(tmp_path)
    given = rollouts(sequences(PROMPTS, RESPONSES))
    draw = np.random.default_rng(0)
    size = len(given.response_ids.values)
    own = engine.logprobs(given, 1.0).values.values
    old, reference = (own + draw.normal(0, 0.2, size).astype(np.float32) for _ in range(2))
    advantages = draw.normal(size=len(given)).astype(np.float32)
    columns = {"old_logprobs": given.response_ids.like(old), "reference": given.response_ids.like(reference)}
    if node.off_policy_mask is not None:
        # The responses that the policy has left have negative advantages.
        advantages = -advantages
        given = replace(given, logprobs=columns["old_logprobs"])
    if node.correction is not None:
        apart = given.response_ids.like(draw.normal(0, 0.1, size).astype(np.float32))
        given = replace(given, logprobs=given.response_ids.like(old - apart.values))
        columns["importance_sampling_ratio"] = given.response_ids.like(weights_of_trl(node.correction, apart))
    ours = replace(node, kl_coef=KL).run(
        engine,
        given,
        RolloutAdvantages(values=Repeated(advantages, given.response_ids.lengths)),
        reference=Logprobs(values=columns["reference"]),
        old_logprobs=Logprobs(values=columns["old_logprobs"]),
    )
    options = {"epsilon": 0.2, "loss_type": "bnpo", "use_bias_correction_kl": False, **options}
    loss, gradient = trls(tmp_path, given, columns, advantages, options, "GMPO" if case == "gmpo" else "GRPO")
    assert ours.values["loss"] == pytest.approx(loss, abs=1e-6)
    assert ours.values.get("clip_fraction", 1) > 0, "the case must clip to say something"
    assert 0 < ours.values.get("off_policy_masked", 0.5) < 1
    assert node.correction is None or 0 < ours.values["corrected_fraction"] < 1
    compare(engine, gradient)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_gradient_of_rloo_is_trls(tmp_path: Path) -> None:
    """Whose ratio is that of whole responses, and 1 before the first step: its gradient is that of the logprob."""
    engine = engine_of(tmp_path)
    given = rollouts(sequences(PROMPTS, RESPONSES))
    own = engine.logprobs(given, 1.0).values
    advantages = np.random.default_rng(0).normal(size=len(given)).astype(np.float32)
    node = ReinforceUpdate(aggregation="constant", constant_length=1)
    node.run(engine, given, RolloutAdvantages(values=Repeated(advantages, given.response_ids.lengths)))
    _, gradient = trls(tmp_path, given, {"old_logprobs": own, "reference": own}, advantages, {}, "RLOO")
    compare(engine, gradient)
