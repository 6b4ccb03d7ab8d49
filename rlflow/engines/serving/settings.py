"""What vLLM is told: its environment and its arguments."""

import os
from collections.abc import Sequence
from typing import Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.memory import forbid_expandable_segments
from rlflow.engines.serving.files import max_lora_rank
from rlflow.errors import RecipeError
from rlflow.resources.memory.phases import MAX_BATCHED_TOKENS

# Of vLLM's attention on the CPU.
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_BLOCK_TOKENS = 32


def set_environment(spec: EngineSpec) -> None:
    """For this process and those that vLLM starts. To be called before vLLM is imported."""
    settings = {
        # vLLM's engine runs in this process, which is there for it alone.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # The runner whose sampler WorkerExtension knows.
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    if spec.device == "cpu":
        settings["TORCH_COMPILE_DISABLE"] = "1"
        settings["VLLM_CPU_OMP_THREADS_BIND"] = _cores(spec)
    os.environ.update(settings)
    forbid_expandable_segments()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def engine_arguments(spec: EngineSpec, folder: str, config: Any, adapted: Sequence[str] = ()) -> dict[str, Any]:
    """Of vLLM's EngineArgs. ``config`` is the model's, of transformers; ``adapted`` are layers that have adapters."""
    layout = spec.layout
    num_ranks = layout.tensor_parallel_size * layout.pipeline_parallel_size
    max_model_len = spec.max_model_len or config.max_position_embeddings
    arguments: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": True,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.model.dtype,
        "seed": spec.seed % 2**32,
        "max_model_len": max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "distributed_executor_backend": "uni" if num_ranks == 1 else "mp",
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        # Sampling is as the recipe says, whatever the model's authors recommend.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "rlflow.engines.serving.vllm_worker.WorkerExtension",
    }
    if spec.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": max_lora_rank(spec, spec.lora),
            # It would make room for adapters of all layers, the output layer too.
            "lora_target_modules": list(adapted),
        }
    if spec.device == "cpu":
        return arguments | {
            "enforce_eager": True,
            "block_size": _CPU_BLOCK_TOKENS,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, 4096),
            "kv_cache_memory_bytes": _cpu_cache_bytes(spec, config, max_model_len),
        }
    if layout.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = layout.gpu_memory_utilization
    if spec.weight_backend is not None:
        arguments["weight_transfer_config"] = {"backend": spec.weight_backend}
    return arguments | {
        "enforce_eager": layout.eager is True,
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, spec.max_num_seqs),
        "enable_sleep_mode": layout.sleeps,
    }


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def check_model(spec: EngineSpec, config: Any) -> None:
    """Raises RecipeError for what vLLM has no kernels for here."""
    if spec.device == "cpu" and _head_dim(config) not in _CPU_HEAD_DIMS:
        raise RecipeError(
            f"models.{spec.model_name}",
            f"vLLM on the CPU has no attention for heads of {_head_dim(config)}",
            known=_CPU_HEAD_DIMS,
            fix=f"another head_dim, or roles.{spec.role}.engine: transformers",
        )
    tensor_parallel_size = spec.layout.tensor_parallel_size
    if config.num_attention_heads % tensor_parallel_size:
        raise RecipeError(
            f"roles.{spec.role}.tensor_parallel_size",
            f"{tensor_parallel_size} does not divide the {config.num_attention_heads} attention heads"
            f" of models.{spec.model_name}",
        )


def _cpu_cache_bytes(spec: EngineSpec, config: Any, max_model_len: int) -> int:
    """For all responses that are written at once, or an eighth of the machine's memory if that is less."""
    heads = max(1, int(config.num_key_value_heads) // spec.layout.tensor_parallel_size)
    bytes_of_value = 4 if spec.model.dtype == "float32" else 2
    of_token = 2 * int(config.num_hidden_layers) * heads * _head_dim(config) * bytes_of_value
    # One block more for each, since the last is rarely full, and one that vLLM keeps.
    of_sequence = of_token * _CPU_BLOCK_TOKENS * (-(-max_model_len // _CPU_BLOCK_TOKENS) + 1)
    limit: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    return max(2 * of_sequence, min((spec.max_num_seqs + 1) * of_sequence, limit))


def _cores(spec: EngineSpec) -> str:
    """Of each rank, in vLLM's notation. A single one is left free to move."""
    num_ranks = spec.layout.tensor_parallel_size * spec.layout.pipeline_parallel_size
    if num_ranks == 1:
        return "nobind"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_ranks:
        raise RecipeError(
            f"roles.{spec.role}.tensor_parallel_size",
            f"vLLM on the CPU needs a core for each of {num_ranks} ranks, and there are {len(cores)}",
        )
    share = len(cores) // num_ranks
    return "|".join(",".join(map(str, cores[rank * share :][:share])) for rank in range(num_ranks))
