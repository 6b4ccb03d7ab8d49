"""The settings that vLLM starts with: the model's files, environment variables, and arguments of its engine."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.model_files import loading_from
from rlflow.engines.causal_lm.pretrained import count_experts, load_model, load_tokenizer, save_model
from rlflow.engines.memory import forbid_expandable_segments
from rlflow.engines.vision.base import find_family
from rlflow.engines.vision.passes import create_vision
from rlflow.errors import RecipeError
from rlflow.resources.memory.phases import MAX_BATCHED_TOKENS
from rlflow.resources.models.lora import reserved_rank

# The head sizes and the block size of vLLM's attention on the CPU.
_CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_CPU_BLOCK_TOKENS = 32
# The largest batch that vLLM records a CUDA graph for by default; it launches the kernels of larger ones one by one.
_MAX_DEFAULT_GRAPH = 512


def set_environment(spec: EngineSpec) -> None:
    """Set the environment of this process and of those that vLLM starts. Call it before importing vLLM."""
    settings = {
        # vLLM's engine runs in this process, which has no other purpose.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # Only the second model runner draws from seeds in one kernel. It needs Triton, so WorkerExtension replaces
        # the sampler of the first one on CPUs.
        "VLLM_USE_V2_MODEL_RUNNER": "0" if spec.device == "cpu" else "1",
    }
    if spec.device == "cpu":
        settings["TORCH_COMPILE_DISABLE"] = "1"
        settings["VLLM_CPU_OMP_THREADS_BIND"] = _cores(spec)
    os.environ.update(settings)
    forbid_expandable_segments()
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@contextmanager
def model_files(spec: EngineSpec) -> Iterator[str]:
    """Provide the model as a folder or a name on the hub; a folder with random weights is deleted on exit."""
    import torch

    if spec.model.path is not None:
        yield spec.model.path
        return
    with TemporaryDirectory(prefix="rlflow-model-") as folder:
        model = load_model(spec, dtype=getattr(torch, spec.model.dtype), device="cpu")
        tokenizer = load_tokenizer(spec.model_name, spec.model)
        vision = create_vision(spec, model.config, tokenizer)
        save_model(model, tokenizer, Path(folder), family=None if vision is None else vision.family)
        yield folder


def load_config(name: str, folder: str, *, trust_remote_code: bool = False) -> Any:
    """Load the model's ``config.json`` by transformers. Raises RecipeError."""
    from transformers import AutoConfig

    with loading_from(name, folder):
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)


def load_end_ids(folder: str, config: Any) -> int | list[int] | None:
    """Return the end tokens of the model's generation configuration."""
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(folder)
    except OSError:
        generation = GenerationConfig.from_model_config(config)
    end_ids: int | list[int] | None = generation.eos_token_id
    return end_ids


def check_model(spec: EngineSpec, config: Any) -> None:
    """Raise RecipeError for a model that vLLM has no kernels for on this device, or cannot split as asked."""
    config = config.get_text_config()
    if spec.device == "cpu" and _head_dim(config) not in _CPU_HEAD_DIMS:
        raise RecipeError(
            f"models.{spec.model_name}",
            f"vLLM on the CPU has no attention kernel for head_dim {_head_dim(config)}",
            known=_CPU_HEAD_DIMS,
            fix=f"another head_dim, or roles.{spec.role}.engine: transformers",
        )
    tensor_parallel_size = spec.layout.tensor_parallel_size
    if config.num_attention_heads % tensor_parallel_size:
        raise RecipeError(
            f"roles.{spec.role}.tensor_parallel_size",
            f"{tensor_parallel_size} does not divide the {config.num_attention_heads} attention heads"
            f" of models.{spec.model_name}",
            fix="a size that divides them",
        )


def engine_arguments(spec: EngineSpec, folder: str, config: Any, adapted_layers: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of vLLM's EngineArgs; ``config`` is transformers' configuration of the model."""
    layout, family, config = spec.layout, find_family(config.model_type), config.get_text_config()
    max_model_len = spec.max_model_len or config.max_position_embeddings
    arguments: dict[str, Any] = {
        "model": folder,
        "skip_tokenizer_init": family is None,
        "trust_remote_code": spec.model.trust_remote_code,
        "dtype": spec.model.dtype,
        "seed": spec.seed % 2**32,
        "max_model_len": max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "tensor_parallel_size": layout.tensor_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "enable_expert_parallel": layout.expert_parallel_size > 1,
        "distributed_executor_backend": "uni" if layout.model_parallel_size == 1 else "mp",
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        # The recipe decides how to sample, not the model's recommended generation configuration.
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "rlflow.engines.serving.vllm_worker.WorkerExtension",
        # On CPUs vLLM cannot do it, and WorkerExtension does.
        "enable_return_routed_experts": spec.device != "cpu" and spec.routing_replay and count_experts(config) > 0,
    }
    if family is not None:
        arguments |= {
            # rlflow processes images, so vLLM must neither normalize them again nor look for the library of its hashes.
            "mm_device_do_normalize": False,
            "mm_processor_cache_gb": 0,
            "mm_hasher_algorithm": "sha256",
            "skip_mm_profiling": spec.device == "cpu",
            "limit_mm_per_prompt": {"video": 0} if family.reads_videos else {},
        }
    if spec.lora is not None:
        arguments |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": reserved_rank(spec.lora),
            # By default vLLM reserves memory for adapters of all layers, including the output layer.
            "lora_target_modules": list(adapted_layers),
        }
    if layout.hosts_per_engine > 1:
        address, _, port = spec.address.rpartition(":")
        arguments |= {
            "nnodes": layout.hosts_per_engine,
            "node_rank": spec.host_rank,
            "master_addr": address,
            "master_port": int(port),
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
    if spec.gpu_transport is not None:
        arguments["weight_transfer_config"] = {"backend": spec.gpu_transport}
    if spec.max_num_seqs > _MAX_DEFAULT_GRAPH:
        arguments["cudagraph_capture_sizes"] = _graph_sizes(spec.max_num_seqs)
    return arguments | {
        "enforce_eager": layout.eager is True,
        "max_num_batched_tokens": max(MAX_BATCHED_TOKENS, spec.max_num_seqs),
        "enable_sleep_mode": layout.sleeps,
    }


def _graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to record CUDA graphs for: vLLM's own up to 512, and few more up to ``max_num_seqs``."""
    default = [1, 2, 4, *range(8, 256, 8), *range(256, _MAX_DEFAULT_GRAPH, 16)]
    return [*default, *range(_MAX_DEFAULT_GRAPH, max_num_seqs, 32), max_num_seqs]


def _cpu_cache_bytes(spec: EngineSpec, config: Any, max_model_len: int) -> int:
    """Return the size of a KV cache for all responses at a time, but at most an eighth of the machine's memory."""
    heads = max(1, int(config.num_key_value_heads) // spec.layout.tensor_parallel_size)
    value_bytes = 4 if spec.model.dtype == "float32" else 2
    token_bytes = 2 * int(config.num_hidden_layers) * heads * _head_dim(config) * value_bytes
    # One more block per sequence, because the last one is rarely full; and one that vLLM keeps for itself.
    sequence_bytes = token_bytes * _CPU_BLOCK_TOKENS * (-(-max_model_len // _CPU_BLOCK_TOKENS) + 1)
    limit: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
    return max(2 * sequence_bytes, min((spec.max_num_seqs + 1) * sequence_bytes, limit))


def _cores(spec: EngineSpec) -> str:
    """Return the CPU cores of each rank on this host, in vLLM's notation. A single rank is not bound to cores."""
    num_ranks = spec.layout.group_size
    if num_ranks == 1:
        return "nobind"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < num_ranks:
        raise RecipeError(
            f"roles.{spec.role}.tensor_parallel_size",
            f"vLLM on the CPU needs a core for each of {num_ranks} ranks, but there are {len(cores)} cores",
            fix="a smaller size",
        )
    share = len(cores) // num_ranks
    return "|".join(",".join(map(str, cores[rank * share :][:share])) for rank in range(num_ranks))


def _head_dim(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
