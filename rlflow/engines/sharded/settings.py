"""The settings of DeepSpeed: its environment, its configuration, and the memory that it takes with them."""

import logging
import os
import warnings
from typing import Any

from rlflow.engines.base import LOGITS_AT_ONCE, EngineSpec
from rlflow.engines.sharded.process_group import join_process_group
from rlflow.errors import RecipeError
from rlflow.resources.layout import OFFLOAD_STAGES
from rlflow.resources.memory.state import TrainingMemory

TRAINING_MEMORY = TrainingMemory(
    gradients=4,
    step=4,
    step_parameters=1e9,
    live_parameters=1e9,
    bucket_elements=2e8,
    reduce_bytes=(0, 0, 8, 4),
    offloads_gradients_from=3,
    logits=4,
    logits_at_once=LOGITS_AT_ONCE,
)
"""DeepSpeed's defaults (sub_group_size, stage3_max_live_parameters) with gradients summed and reduced in fp32.

Stage 1 reduces gradients in place. Stage 2 holds them in bf16, as a bf16 copy and in fp32; stage 3 as an fp32 copy.
With the optimizer on the host, stage 2 still sums gradients on the GPU.
"""


def init_deepspeed(spec: EngineSpec) -> None:
    """Join the role's process group, and initialize DeepSpeed on it."""
    import torch

    host, _, port = spec.address.rpartition(":")
    on_gpu = torch.device(spec.device).type == "cuda"
    # DeepSpeed reads some of these even if it is given the rank. Each worker sees only its own GPU.
    os.environ.update(
        MASTER_ADDR=host,
        MASTER_PORT=port,
        RANK=str(spec.rank),
        WORLD_SIZE=str(spec.world_size),
        LOCAL_RANK=str(torch.device(spec.device).index or 0),
        DS_ACCELERATOR="cuda" if on_gpu else "cpu",
    )
    # DeepSpeed calls functions by their deprecated names, thousands of times per step.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    import deepspeed

    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Otherwise DeepSpeed compiles this extension on first use, although nothing here needs it.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    join_process_group(spec)
    deepspeed.init_distributed("nccl" if on_gpu else "gloo", auto_mpi_discovery=False, verbose=False)


def deepspeed_config(spec: EngineSpec, *, trains: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Raises RecipeError for an offload that the ZeRO stage does not support.

    As far as DeepSpeed knows, a micro-batch has one sample: the engine itself scales the losses and marks the last one.
    """
    stage = spec.layout.zero_stage or 0
    offload = spec.layout.offload or "none"
    needed = OFFLOAD_STAGES[offload] if trains or offload == "weights" else 0
    if stage < needed:
        raise RecipeError(
            f"roles.{spec.role}.offload",
            f"'{offload}' is not supported with ZeRO stage {stage}",
            fix=f"zero_stage {needed}" + (" or more" if needed < 3 else ""),
        )
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": int(TRAINING_MEMORY.bucket_elements)}
    if offload != "none" and trains:
        zero["offload_optimizer"] = {"device": "cpu"}
    if offload == "weights":
        zero["offload_param"] = {"device": "cpu"}
    in_bf16 = spec.model.dtype == "bfloat16"
    in_fp32_without_zero = spec.model.dtype == "float32" and stage == 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": in_bf16, "immediate_grad_update": True},
        # By default DeepSpeed uses the weights' dtype for both, in which small gradients vanish beside large sums.
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        # With a plain optimizer the engine clips the gradients itself, because that also yields their norm.
        "gradient_clipping": 0.0 if in_fp32_without_zero else spec.optimizer.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
