"""The choice of a role's attention kernel, and of deterministic operations."""

import os

from rlflow.engines.base import EngineSpec
from rlflow.errors import RecipeError
from rlflow.extras import installed
from rlflow.resources.layout import Attention, Auto

FLASH = "flash-attn"


def check_attention(role: str, requested: Attention | Auto) -> None:
    """Raise RecipeError if flash-attn is requested but not installed. The planner checks the GPU and the model."""
    if requested == "flash_attention_2" and not has_flash_attn():
        raise RecipeError(
            f"roles.{role}.attention",
            f"'flash_attention_2' needs {FLASH} 2, which is not installed",
            fix=f"pip install '{FLASH}<3' --no-build-isolation, or roles.{role}.attention=auto",
        )


def has_flash_attn() -> bool:
    """Return whether flash-attn 2 is installed, the version whose functions are called."""
    distribution = installed(FLASH)
    return distribution is not None and distribution[1].startswith("2.")


def choose_attention(spec: EngineSpec) -> Attention:
    """Return the requested kernel; for ``auto``, flash-attn if it is installed and supports the GPU and the dtype.

    Raises RecipeError if flash-attn is requested and does not run here.
    """
    import torch

    from rlflow.engines.causal_lm.attention import supports_flash

    check_attention(spec.role, spec.attention)
    supported = spec.model.dtype == "bfloat16" and supports_flash(torch.device(spec.device))
    if spec.attention == "flash_attention_2" and not supported:
        raise RecipeError(
            f"roles.{spec.role}.attention",
            f"'flash_attention_2' has no kernel for {spec.model.dtype} on '{spec.device}'",
            fix=f"roles.{spec.role}.attention=auto",
        )
    if spec.attention == "auto":
        return "flash_attention_2" if supported and has_flash_attn() else "sdpa"
    return spec.attention


def apply_determinism(spec: EngineSpec) -> None:
    """Make this process use deterministic operations if the role asks for them; else do nothing.

    torch raises an error for an operation that has no deterministic version.
    """
    if not spec.deterministic:
        return
    import torch

    # cuBLAS reads this before its first matrix product.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # With warn_only, torch's own flash attention would stay nondeterministic.
    torch.use_deterministic_algorithms(True)
    # Filling all new memory serves to find uninitialized reads, and is slow.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
