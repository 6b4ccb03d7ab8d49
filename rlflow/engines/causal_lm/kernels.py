"""Which kernel attention runs by, and whether sums have the same bits every time."""

import os

from rlflow.engines.base import EngineSpec
from rlflow.errors import RecipeError
from rlflow.extras import installed
from rlflow.resources.layout import Attention, Auto

FLASH = "flash-attn"


def check_attention(role: str, wanted: Attention | Auto) -> None:
    """Raises RecipeError where flash-attn is asked for and not installed. That GPU and model have it is planned."""
    if wanted == "flash_attention_2" and not has_flash_attn():
        raise RecipeError(
            f"roles.{role}.attention",
            f"'flash_attention_2' needs {FLASH} 2, which is not installed",
            fix=f"pip install '{FLASH}<3' --no-build-isolation, or roles.{role}.attention=auto",
        )


def has_flash_attn() -> bool:
    """In the version whose functions are called."""
    found = installed(FLASH)
    return found is not None and found[1].startswith("2.")


def set_determinism(spec: EngineSpec) -> None:
    """Have this process use deterministic operations where the role asks for them, flash attention's backward pass
    included. torch raises an error for an operation that has none."""
    if not spec.deterministic:
        return
    import torch

    # cuBLAS reads it before its first product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Only warning of the others would leave torch's own flash attention as it is.
    torch.use_deterministic_algorithms(True)
    # Filling all new memory is for finding reads of it, and slow.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def attention_of(spec: EngineSpec) -> Attention:
    """flash-attn where it is asked for, or where it is installed and the GPU and the model's type have it.

    Raises RecipeError where it is asked for and cannot be.
    """
    import torch

    from rlflow.engines.causal_lm.attention import has_flash

    check_attention(spec.role, spec.attention)
    has = spec.model.dtype == "bfloat16" and has_flash(torch.device(spec.device))
    if spec.attention == "flash_attention_2" and not has:
        raise RecipeError(
            f"roles.{spec.role}.attention",
            f"'flash_attention_2' has no kernel for {spec.model.dtype} on '{spec.device}'",
            fix=f"roles.{spec.role}.attention=auto",
        )
    if spec.attention == "auto":
        return "flash_attention_2" if has and has_flash_attn() else "sdpa"
    return spec.attention
