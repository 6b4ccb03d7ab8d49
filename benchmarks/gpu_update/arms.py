"""The systems that are compared. Each takes one optimizer step of GRPO on the same rows.

Importing this file imports neither torch nor rlflow: a worker first decides which checkout rlflow comes from.
"""

import socket
import warnings
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from benchmarks.gpu_update.cases import CLIP_EPS, LEARNING_RATE, MAX_GRAD_NORM, Rows

if TYPE_CHECKING:
    from torch import Tensor, nn


class Arm(Protocol):
    """A system with a loaded model."""

    @property
    def module(self) -> "nn.Module":
        """Return the model of transformers, whose input embedding is called once for each pass."""

    def prepare(self, rows: Rows) -> Any:
        """Return the batch in host memory, as the system gets it from whatever computes advantages."""

    def update(self, batch: Any) -> tuple[float, float]:
        """Take one optimizer step; return the loss and the norm of the gradient before clipping."""


class Rlflow:
    """An engine of rlflow, by interfaces that its releases have in common."""

    def __init__(self, folder: Path, device: str, dtype: str, micro_batch_tokens: int, engine: str = "torch") -> None:
        from rlflow.engines.base import EngineSpec
        from rlflow.engines.registry import engine_kind
        from rlflow.nodes.kl import ratio
        from rlflow.nodes.policy_loss import PolicyLoss, clipped_surrogate
        from rlflow.recipe import Model, Optimizer
        from rlflow.resources.layout import Layout

        def surrogate(logprobs: "Tensor", columns: Any) -> Any:
            ratios = ratio(logprobs - columns["old_logprobs"])
            return clipped_surrogate(ratios, columns["advantages"], CLIP_EPS, None)

        self._loss = PolicyLoss(surrogate=surrogate, temperature=1.0)
        layout: dict[str, Any] = {"zero_stage": 1} if engine == "deepspeed" else {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        spec = EngineSpec(
            role="actor",
            model_name="policy",
            model=Model(path=str(folder), dtype=dtype),  # type: ignore[arg-type]
            capabilities=frozenset({"Trains", "Scores"}),
            device=device,
            seed=0,
            steps=100,
            optimizer=Optimizer(
                learning_rate=LEARNING_RATE, weight_decay=0.0, max_grad_norm=MAX_GRAD_NORM, warmup_steps=0
            ),
            layout=Layout(micro_batch_tokens=micro_batch_tokens, **layout),
            address=f"127.0.0.1:{port}",
        )
        self._engine: Any = engine_kind(engine).engine(spec)

    @property
    def module(self) -> "nn.Module":
        model: nn.Module = self._engine._model
        return model

    def prepare(self, rows: Rows) -> Any:
        from rlflow.batch import Minibatch, Packed

        lengths = [len(response) for response in rows.responses]
        count = len(lengths)
        weight = 1 / rows.response_tokens
        return Minibatch(
            keys=np.array([[0, row // rows.group, row % rows.group] for row in range(count)], np.int64),
            prompt_ids=Packed.from_rows(rows.prompts, np.int32),
            response_ids=Packed.from_rows(rows.responses, np.int32),
            step=0,
            columns={
                "old_logprobs": Packed.from_rows(rows.old_logprobs, np.float32),
                "advantages": Packed.from_rows(
                    [np.full(length, value) for length, value in zip(lengths, rows.advantages, strict=True)], np.float32
                ),
            },
            weights=Packed.from_rows([np.full(length, weight) for length in lengths], np.float32),
        )

    def update(self, batch: Any) -> tuple[float, float]:
        metrics = self._engine.update(batch, self._loss).values
        return metrics["loss"], metrics["grad_norm"]


class Trl:
    """TRL's GRPOTrainer: its own loss and backward pass, with float32 weights under bfloat16 autocast, as by default.

    It gets more than it does by itself: no recomputation, micro-batches of as many rows as fit, padded only to their
    own longest row (TRL pads to the longest of the whole batch), and a batch that is padded before the clock starts.
    """

    def __init__(self, folder: Path, device: str, dtype: str, micro_batch_tokens: int, liger: bool) -> None:
        import pyarrow
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from trl import GRPOConfig, GRPOTrainer

        warnings.simplefilter("ignore", FutureWarning)
        self._max_tokens = 2 * micro_batch_tokens
        self._device = torch.device(device)
        self._trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa"),
            processing_class=AutoTokenizer.from_pretrained(folder),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(
                output_dir=mkdtemp(),
                per_device_train_batch_size=2,
                num_generations=2,
                gradient_accumulation_steps=1,
                steps_per_generation=1,
                beta=0.0,
                epsilon=CLIP_EPS,
                loss_type="dapo",  # the mean over all tokens of the batch
                use_cpu=self._device.type == "cpu",
                bf16=dtype == "bfloat16",
                gradient_checkpointing=False,
                use_liger_kernel=liger,
                report_to="none",
                save_strategy="no",
            ),
            # With a fingerprint, its content is not pickled.
            train_dataset=Dataset(pyarrow.table({"prompt": ["a", "a"]}), fingerprint="gpu_update"),
        )
        self._trainer.current_gradient_accumulation_steps = 1
        self._model: Any = self._trainer.model.to(self._device).train()
        if liger:
            # The trainer does this when training starts.
            from transformers.integrations.liger import apply_liger_kernel

            apply_liger_kernel(self._model, self._trainer.args.liger_kernel_config)
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )

    @property
    def module(self) -> "nn.Module":
        model: nn.Module = self._model
        return model

    def prepare(self, rows: Rows) -> "list[dict[str, Tensor]]":
        """Return the padded micro-batches, each with the same number of rows, as in TRL."""
        import torch
        from torch.nn.utils.rnn import pad_sequence

        size = max(1, self._max_tokens // max(rows.lengths))
        batches = []
        for start in range(0, len(rows.prompts), size):
            chosen = slice(start, start + size)
            prompts, responses = (
                [torch.from_numpy(ids) for ids in part[chosen]] for part in (rows.prompts, rows.responses)
            )
            old = [torch.from_numpy(values) for values in rows.old_logprobs[chosen]]
            batches.append(
                {
                    "prompt_ids": torch.stack(prompts),
                    "prompt_mask": torch.ones_like(torch.stack(prompts)),
                    "completion_ids": pad_sequence(responses, batch_first=True),
                    "completion_mask": pad_sequence([torch.ones_like(ids) for ids in responses], batch_first=True),
                    "old_per_token_logps": pad_sequence(old, batch_first=True),
                    "advantages": torch.from_numpy(rows.advantages[chosen]),
                    "num_items_in_batch": torch.tensor(rows.response_tokens),
                }
            )
        return batches

    def update(self, batch: "list[dict[str, Tensor]]") -> tuple[float, float]:
        import torch

        self._optimizer.zero_grad(set_to_none=True)
        total = torch.zeros((), device=self._device)
        for inputs in batch:
            moved = {name: value.to(self._device) for name, value in inputs.items()}
            loss = self._trainer.compute_loss(self._model, moved)
            self._trainer.accelerator.backward(loss)
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        return float(total), float(norm)


PACKAGES = {
    "composite": ["torch", "transformers"],
    "rlflow": ["torch", "transformers", "rlflow.engines.torch"],
    "before": ["torch", "transformers", "rlflow.engines.torch"],
    "deepspeed": ["torch", "transformers", "deepspeed", "rlflow.engines.deepspeed"],
    "trl": ["torch", "transformers", "datasets", "trl.trainer.grpo_trainer"],
    "trl+liger": ["torch", "transformers", "datasets", "liger_kernel", "trl.trainer.grpo_trainer"],
}
"""The modules that each arm imports. An arm whose packages are missing has no times."""


def build(arm: str, folder: Path, device: str, dtype: str, micro_batch_tokens: int, compiled: bool) -> Arm:
    """Load the model into one of the systems. ``compiled`` concerns the composite alone."""
    if arm == "composite":
        from benchmarks.gpu_update.composite import Composite

        return Composite(folder, device, dtype, micro_batch_tokens, compiled)
    if arm.startswith("trl"):
        return Trl(folder, device, dtype, micro_batch_tokens, liger=arm == "trl+liger")
    return Rlflow(folder, device, dtype, micro_batch_tokens, "deepspeed" if arm == "deepspeed" else "torch")
