"""The calls of rlflow's source to the libraries below it, found in the source itself.

A call is found by the names that a file imports and by the annotations of parameters. ``OBJECTS`` and ``RETURNS`` list
the types of other objects.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tests.conftest import ROOT

LIBRARIES = ("vllm", "deepspeed", "transformers", "peft", "ray")
_LLM_ENGINE = "vllm.LLMEngine"
_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_MODEL, _TOKENIZER = "transformers.PreTrainedModel", "transformers.PreTrainedTokenizerBase"
_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"
_ZERO = "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer"
_ZERO3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
_DEEPSPEED = "deepspeed.runtime.engine.DeepSpeedEngine"
_PYNVML = "vllm.third_party.pynvml"

OBJECTS: Mapping[str, Mapping[str, str]] = {
    "engines": {
        "self._tokenizer": _TOKENIZER,
        "self.tokenizer": _TOKENIZER,
        "tokenizer": _TOKENIZER,
        "self._model": _MODEL,
        "model": _MODEL,
        "built": _MODEL,
    },
    "data": {"tokenizer": _TOKENIZER, "self._tokenizer": _TOKENIZER},
    "environments/exchange.py": {"self._tokenizer": _TOKENIZER},
    "engines/vllm.py": {"engine": _LLM_ENGINE},
    "engines/serving/batching.py": {
        "engine": _LLM_ENGINE,
        "engine.output_processor": "vllm.v1.engine.output_processor.OutputProcessor",
    },
    "engines/serving/activity.py": {
        "scheduler": _SCHEDULER,
        "self._scheduler": _SCHEDULER,
        "by_number": f"{_PYNVML}.nvmlDeviceGetHandleByIndex",
        "by_name": f"{_PYNVML}.nvmlDeviceGetHandleByUUID",
        "self._nvml": _PYNVML,
    },
    "engines/serving/vllm_worker.py": {
        "self.model_runner": "vllm.v1.worker.gpu_model_runner.GPUModelRunner",
        "self.model_runner.get_model()": "vllm.model_executor.models.qwen2.Qwen2ForCausalLM",
        "model": "vllm.model_executor.models.qwen2.Qwen2ForCausalLM",
        "vision_model": "vllm.model_executor.models.idefics3.Idefics3ForConditionalGeneration",
        "sample": "vllm.v1.worker.gpu.sample.sampler.Sampler._sample_random",
    },
    "system/compat/vllm.py": {
        "scheduler": _SCHEDULER,
        "state": "vllm.v1.engine.output_processor.RequestState",
        "model": "vllm.model_executor.models.qwen2.Qwen2ForCausalLM",
    },
    "engines/deepspeed.py": {"self._engine": _DEEPSPEED},
    "engines/sharded/trained_state.py": {"zero": _ZERO, "zero3": _ZERO3, "fragment": "deepspeed.utils.tensor_fragment"},
    "system/compat/deepspeed.py": {"zero": _ZERO, "zero3": _ZERO3},
    "runtime/ray/cluster/hosts.py": {"ray_state": "ray._raylet.GlobalStateAccessor"},
}
"""The library's class behind an expression, in a folder or a file of rlflow."""

CLASSES: Mapping[str, Mapping[str, str]] = {
    "engines/causal_lm/pretrained.py": {"auto": "transformers.AutoModelForCausalLM"},
}
"""The library's class that an expression is."""

_CALL_WORKERS = ("engines/vllm.py", "runtime/weights/gpu.py")
"""Files that call methods of vLLM's workers by name."""

RETURNS: Mapping[str, str | None] = {
    "ray.get_runtime_context": "ray.runtime_context.RuntimeContext",
    "ray.util.placement_group": "ray.util.placement_group.PlacementGroup",
    "ray._private.state.state._connect_and_get_accessor": "ray._raylet.GlobalStateAccessor",
    "vllm.model_executor.model_loader.reload.layerwise.get_layerwise_info": (
        "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo"
    ),
    "ray.cluster_utils.Cluster": "ray.cluster_utils.Cluster",
    "peft.LoraConfig": "peft.LoraConfig",
    "vllm.distributed.weight_transfer.ipc_engine.IPCTrainerWeightTransferEngine.trainer_init": (
        "vllm.distributed.weight_transfer.ipc_engine.IPCTrainerWeightTransferEngine"
    ),
}
"""The class of what a call returns. Not of other calls: what they return has no methods of the library."""


@dataclass(frozen=True, order=True)
class Call:
    """A call as it is written."""

    path: str
    positional: int = 0
    keywords: tuple[str, ...] = ()
    open_ended: bool = False
    """It passes ``*arguments`` or ``**named``, which the source does not tell."""
    bound: bool = False
    """It is a method of an object, and not of a class or a module."""

    def __str__(self) -> str:
        """Return its line in the list: ``_`` is an argument without a name, ``...`` is what only a run knows."""
        names = [f"{name}=" for name in self.keywords]
        return f"{self.path}({', '.join([*['_'] * self.positional, *names, *['...'] * self.open_ended])})"


@dataclass(frozen=True)
class _Known:
    path: str
    is_object: bool = False


def calls_of(source: str, where: str) -> Iterator[Call]:
    """Find all calls of the libraries in the source of a file, ``where`` below rlflow."""
    tree = ast.parse(source)
    yield from _Scan(tree, where).calls()


def references_of(source: str, where: str) -> Iterator[str]:
    """Find all names of the libraries in the source of a file, called or not."""
    yield from _Scan(ast.parse(source), where).references()


def files() -> Iterator[tuple[str, str]]:
    """Give the source of each file of rlflow, and its place below rlflow."""
    folder = ROOT / "rlflow"
    for path in sorted(folder.rglob("*.py")):
        yield path.read_text(), path.relative_to(folder).as_posix()


class _Scan:
    """The names that a file gives to what is the libraries', function by function."""

    def __init__(self, tree: ast.Module, where: str) -> None:
        self._tree = tree
        self._calls_workers = where in _CALL_WORKERS
        names = {text: _Known(path) for text, path in CLASSES.get(where, {}).items()}
        for folder, objects in OBJECTS.items():
            if where == folder or where.startswith(f"{folder}/"):
                names |= {text: _Known(path, is_object=True) for text, path in objects.items()}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= dict(_imported(node))
        self._names = names
        self._imports_ray = any(isinstance(node, ast.Name) and node.id == "import_ray" for node in ast.walk(tree))

    def calls(self) -> Iterator[Call]:
        for node, names in self._nodes():
            if not isinstance(node, ast.Call):
                continue
            if (function := _known(node.func, names)) is not None:
                yield _as_written(node, function)
            elif self._calls_workers and (remote := _remote(node)) is not None:
                yield remote

    def references(self) -> Iterator[str]:
        for node, names in self._nodes():
            if isinstance(node, ast.Name | ast.Attribute) and (known := _known(node, names)) is not None:
                yield known.path

    def _nodes(self) -> Iterator[tuple[ast.AST, Mapping[str, _Known]]]:
        """Give each node with the names that hold where it is. None of a file that names nothing of the libraries."""
        if not self._names and not self._calls_workers and not self._imports_ray:
            return
        waiting: list[tuple[ast.AST, dict[str, _Known]]] = [(self._tree, self._names)]
        while waiting:
            node, names = waiting.pop()
            if isinstance(node, ast.FunctionDef | ast.Lambda | ast.Module):
                names = names.copy()
                arguments = [] if isinstance(node, ast.Module) else [*node.args.args, *node.args.kwonlyargs]
                for argument in arguments:
                    _annotate(argument, names)
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Assign) and len(inner.targets) == 1:
                        _assign(inner.targets[0], inner.value, names)
                    elif isinstance(inner, ast.withitem) and inner.optional_vars is not None:
                        _assign(inner.optional_vars, inner.context_expr, names)
            yield node, names
            waiting += [(child, names) for child in ast.iter_child_nodes(node)]


def _imported(node: ast.Import | ast.ImportFrom) -> Iterator[tuple[str, _Known]]:
    for alias in node.names:
        name = alias.asname or alias.name.split(".")[0]
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            path = f"{node.module}.{alias.name}"
        else:
            path = alias.name if alias.asname else name
        if path.split(".")[0] in LIBRARIES:
            yield name, _Known(path)


def _annotate(argument: ast.arg, names: dict[str, _Known]) -> None:
    if argument.annotation is None:
        return
    text = ast.unparse(argument.annotation).strip("'\"")
    if (known := names.get(text)) is not None and text[0].isupper():
        names[argument.arg] = _Known(known.path, is_object=True)
    elif text not in ("Any", "Module"):
        names.pop(argument.arg, None)


def _assign(target: ast.expr, value: ast.expr, names: dict[str, _Known]) -> None:
    known = _known(value, names)
    if known is not None and isinstance(target, ast.Name | ast.Attribute):
        names[ast.unparse(target)] = known


def _known(node: ast.expr, names: Mapping[str, _Known]) -> _Known | None:
    """Return what the libraries call the value of an expression, if they know it."""
    if not isinstance(node, ast.Name | ast.Attribute | ast.Call):
        return None
    if (known := names.get(ast.unparse(node))) is not None:
        return known
    if isinstance(node, ast.Attribute) and (known := _known(node.value, names)) is not None:
        return replace(known, path=f"{known.path}.{node.attr}")
    if isinstance(node, ast.Call):
        if ast.unparse(node.func) == "import_ray":
            return _Known("ray")
        function = _known(node.func, names)
        returned = RETURNS.get(function.path) if function else None
        return _Known(returned, is_object=True) if returned else None
    return None


def _as_written(node: ast.Call, function: _Known) -> Call:
    keywords = tuple(sorted(each.arg for each in node.keywords if each.arg is not None))
    starred = sum(isinstance(each, ast.Starred) for each in node.args)
    is_open = bool(starred) or any(each.arg is None for each in node.keywords)
    return Call(function.path, len(node.args) - starred, keywords, is_open, function.is_object)


def _remote(node: ast.Call) -> Call | None:
    """Return the call of a method of vLLM's workers by its name, if it is one: by ``_on_ranks``, or a receiver."""
    function = ast.unparse(node.func)
    if function == "_on_ranks" and isinstance(node.args[1], ast.Constant):
        name, given, keys = str(node.args[1].value), len(node.args) - 2, []
    elif function == "self._call" and isinstance(node.args[0], ast.Constant):
        dictionaries = [each for each in ast.walk(node.args[1]) if isinstance(each, ast.Dict)]
        keys = [str(key.value) for each in dictionaries for key in each.keys if isinstance(key, ast.Constant)]
        name, given = str(node.args[0].value), 0
    else:
        return None
    return None if name in _of_rlflow() else Call(f"{_WORKER}.{name}", given, tuple(keys), bound=True)


def _of_rlflow() -> set[str]:
    """Return the methods that rlflow adds to vLLM's workers."""
    tree = ast.parse(Path(ROOT / "rlflow/engines/serving/vllm_worker.py").read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
