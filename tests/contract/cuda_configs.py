"""A process in which vLLM takes this machine for one with H100s: it reads the recipes' engine arguments, as on a GPU.

``python -m tests.contract.cuda_configs RECIPE...`` prints a line of JSON for each role whose engine is vLLM, one for an
engine with more sequences, and one for an engine whose GPUs have experts of their own. A process of its own, since
vLLM's modules keep the platform that they find when they are imported.
"""

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import rlflow
from rlflow.compiler.plan import Plan
from rlflow.engines.base import EngineSpec
from rlflow.engines.serving.settings import check_model, engine_arguments, set_environment
from rlflow.engines.serving.weights import ExpectedWeights
from rlflow.errors import PlacementError
from rlflow.runtime.engine_specs import check_engines, spec_of
from tests.helpers import load

GPUS = 8
# Each recipe runs on a host, on two hosts, and on two hosts with the engines apart from the trainer.
VARIANTS = (("1x8", ""), ("2x8", ""), ("2x8", "roles.rollout.colocate=[]"))
# The name of a plan's engine with more sequences than any plan here has.
MANY = "1000 sequences"
EXPERTS = "experts in parallel"
_COMPILED = ("vllm._C_stable_libtorch", "vllm.vllm_flash_attn")


class _Compiled(ModuleType):
    """A module that is compiled for GPUs and missing in the build for CPUs. Its functions are never called here."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Mock()


def become_a_gpu_machine() -> None:
    """Give vLLM a platform of eight H100s. Comes before the first import of what asks for the platform."""
    for name in _COMPILED:
        sys.modules[name] = _Compiled(name)
    from vllm import platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class H100(CudaPlatformBase):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 81559 * 2**20

        @classmethod
        def is_fully_connected(cls, physical_device_ids: list[int]) -> bool:
            return True

        @classmethod
        def device_count(cls) -> int:
            return GPUS

        def is_cumem_allocator_available(self) -> bool:
            return True

    platforms._current_platform = H100()
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    _LazyRegisteredModel._save_modelinfo_to_cache = save_to_cache
    # GPUs have Triton.
    from vllm.config import vllm as config

    config.HAS_TRITON = True


def save_to_cache(model: Any, info: Any, module_hash: str) -> None:
    """Write what vLLM found out about a model's class, in a process that takes ten seconds, into vLLM's cache.

    vLLM's own function does the same, and imports kernels of a GPU for it.
    """
    file = model._get_cache_dir() / model._get_cache_filename()
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"hash": module_hash, "modelinfo": asdict(info)}))
    part.replace(file)


def plans(recipe: str, *pins: str) -> Iterator[Plan]:
    """Give the recipe's plan on each cluster that has room for it."""
    for cluster, override in VARIANTS:
        with suppress(PlacementError):
            yield rlflow.compile(load(f"recipe={recipe}", *filter(None, [override]), *pins), cluster)


def config_of(plan: Plan, role: str, plan_spec: EngineSpec, folder: str) -> Any:
    """Write the model's ``config.json`` of the card's figures, and return vLLM's own configuration of its engine."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from vllm.engine.arg_utils import EngineArgs

    from tests.unit.resources.models.test_architecture import config_fields

    architecture = plan_spec.model.architecture
    assert architecture is not None, f"the card of models.{plan_spec.model_name} has figures"
    config = AutoConfig.for_model(**config_fields(architecture))
    config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    config = AutoConfig.from_pretrained(folder)
    check_model(plan_spec, config)
    arguments = engine_arguments(plan_spec, folder, config, ExpectedWeights.of(config, plan_spec).adapted_layers)
    return EngineArgs(**arguments).create_engine_config()


def told(plan: Plan, recipe: str, role: str, **changes: Any) -> dict[str, Any]:
    """Return vLLM's settings for a role beside those of the plan, or vLLM's error."""
    spec = replace(spec_of(plan, role, plan.recipe.models[plan.recipe.roles[role].model], device="cuda:0"), **changes)
    set_environment(spec)
    line: dict[str, Any] = {"recipe": recipe, "cluster": plan.cluster.shape, "role": role}
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = config_of(plan, role, spec, folder)
        except Exception:  # whatever vLLM raises is what the test shows
            return line | {"error": traceback.format_exc(limit=-3)}
    layout, graphs = plan.roles[role].layout, config.compilation_config.cudagraph_capture_sizes
    return line | {
        "planned": {
            "ranks": [layout.tensor_parallel_size, layout.pipeline_parallel_size],
            "whole experts": layout.expert_parallel_size > 1,
            "sleeps": layout.sleeps,
            "utilization": layout.gpu_memory_utilization,
            "eager": layout.eager is True,
            "backend": spec.gpu_transport,
            "tokens": spec.max_model_len,
            "sequences": spec.max_num_seqs,
            "largest graph": 0 if layout.eager else spec.max_num_seqs,
            "second runner": True,
            "lora": spec.lora is not None,
            "dtype": f"torch.{spec.model.dtype}",
        },
        "found": {
            "ranks": [config.parallel_config.tensor_parallel_size, config.parallel_config.pipeline_parallel_size],
            "whole experts": config.parallel_config.enable_expert_parallel,
            "sleeps": config.model_config.enable_sleep_mode,
            "utilization": config.cache_config.gpu_memory_utilization,
            "eager": config.model_config.enforce_eager,
            "backend": config.weight_transfer_config and config.weight_transfer_config.backend,
            "tokens": config.model_config.max_model_len,
            "sequences": config.scheduler_config.max_num_seqs,
            "largest graph": max((size for size in graphs if size <= spec.max_num_seqs), default=0),
            "second runner": config.use_v2_model_runner,
            "lora": config.lora_config is not None,
            "dtype": str(config.model_config.dtype),
        },
        "asynchronous": bool(config.scheduler_config.async_scheduling),
        "device": config.device_config.device_type,
    }


def main() -> None:
    """Print a line of JSON for each role whose engine is vLLM, of each recipe and cluster."""
    become_a_gpu_machine()
    for recipe in sys.argv[1:]:
        for plan in plans(recipe):
            check_engines(plan)
            for role, written in plan.recipe.roles.items():
                if written.engine == "vllm":
                    print(json.dumps(told(plan, recipe, role)), flush=True)
    plan = next(plans(sys.argv[1]))
    print(json.dumps(told(plan, MANY, "rollout", max_num_seqs=1000)), flush=True)
    plan = next(plans("gspo_30b_a3b", "roles.rollout.expert_parallel_size=4"))
    print(json.dumps(told(plan, EXPERTS, "rollout")), flush=True)
    # Libraries may leave threads that do not end.
    os._exit(0)


if __name__ == "__main__":
    main()
