"""LoRA adapters in a model, by peft: with them, only the adapters are trained, copied and saved.

B starts at zero, so a new adapter does not change the model (Hu et al. 2021, arXiv 2106.09685, section 4.1). A layer
``q_proj`` becomes ``q_proj.base_layer``, with ``q_proj.lora_A.default`` [rank, inputs] and ``q_proj.lora_B.default``
[outputs, rank] beside it. peft's files name the same weights differently; those names are used for transfers.

The experts of a layer are weights [E, outputs, inputs]. Each expert has its A and B, together ``lora_A`` [E rank,
inputs] and ``lora_B`` [outputs, rank E]: E changes slowest in the first, and fastest in the second. peft nests a layer
for each such weight.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlflow.engines.base import EngineSpec
from rlflow.engines.vision.base import find_family
from rlflow.errors import RecipeError
from rlflow.resources.models.lora import Lora
from rlflow.system.compat.peft import set_adapters_disabled

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Value = TypeVar("Value")

_ADAPTER_NAME = ".default."
_FILE_PREFIX = "base_model.model."
_BASE_LAYER = ".base_layer"
_WEIGHTS_FILE = "adapter_model.safetensors"
# Layers that were experts' own in older versions of transformers, so that peft means the experts by them
# (peft/utils/transformers_weight_conversion.py).
_NAMES_OF_EXPERTS = {"gate_proj", "up_proj", "down_proj"}
# The module of a layer whose weights are those of all its experts.
_EXPERTS = "experts."


def add_adapters(model: "PreTrainedModel", spec: EngineSpec) -> None:
    """Add the adapters of ``spec.lora`` in float32, initialized by the seed, and freeze all other weights.

    Does nothing without ``spec.lora``. Raises RecipeError for target layers that the model does not have.
    """
    if spec.lora is None:
        return
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=spec.lora.rank,
        lora_alpha=spec.lora.alpha,
        use_rslora=spec.lora.rank_stabilized,
        target_modules=_target_modules(model, spec),
        target_parameters=_target_parameters(model, spec),
        exclude_modules=excluded_modules(model),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        inject_adapter_in_model(config, model)
    for name, weight in model.named_parameters():
        if is_adapter(name):
            weight.data = weight.data.float()
    model.eval()


def _target_modules(model: "PreTrainedModel", spec: EngineSpec) -> list[str]:
    import torch

    assert spec.lora is not None
    head, excluded = model.get_output_embeddings(), re.compile(excluded_modules(model) or "(?!)")
    linear = (
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module is not head and not excluded.fullmatch(name)
    )
    known = sorted({name.rpartition(".")[2] for name in linear} - _layers_of_mlps(model))
    if spec.lora.target_modules == "all-linear":
        return known
    unknown = [name for name in spec.lora.target_modules if name not in known]
    if unknown:
        raise RecipeError(
            f"models.{spec.model_name}",
            f"it has no linear layers '{', '.join(unknown)}', which lora.target_modules of a role names",
            known=["all-linear", *known],
            fix="use names from this list",
        )
    return list(spec.lora.target_modules)


def _layers_of_mlps(model: "PreTrainedModel") -> set[str]:
    """Return the names of linear layers beside experts, and of such as peft takes for experts; none without experts."""
    blocks = [module for module in model.modules() if hasattr(module, "experts")]
    names = {name.rpartition(".")[2] for block in blocks for name, _ in block.named_modules()}
    return names | _NAMES_OF_EXPERTS if blocks else set()


def _target_parameters(model: "PreTrainedModel", spec: EngineSpec) -> list[str] | None:
    """Return the names of experts' weights in their layers, if they get adapters."""
    assert spec.lora is not None
    if not spec.lora.experts:
        return None
    # Under ZeRO 3 a weight has its shape beside it.
    shapes = {name: getattr(weight, "ds_shape", weight.shape) for name, weight in model.named_parameters()}
    weights = (name for name, shape in shapes.items() if len(shape) == 3 and f".{_EXPERTS}" in name)
    found = sorted({_EXPERTS + name.rpartition(".")[2] for name in weights})
    if not found:
        raise RecipeError(
            f"models.{spec.model_name}",
            "it has no experts, for which lora.experts of a role asks for adapters",
            fix=f"roles.{spec.role}.lora.experts=false",
        )
    return found


def base_names(model: "PreTrainedModel") -> dict[str, str]:
    """Return the names of the weights beside adapters, by those that they have in files of the model or its decoder."""
    names: dict[str, str] = {}
    for name, _ in model.named_parameters():
        bare = transfer_name(name)
        if bare != name and not is_adapter(name):
            names |= dict.fromkeys((bare, bare.removeprefix(f"{model.base_model_prefix}.")), name)
    return names


def excluded_modules(model: "PreTrainedModel") -> str | None:
    """Return a pattern of the modules that get no adapters, for peft: those that encode images."""
    family = find_family(model.config.model_type)
    if family is None:
        return None
    return "|".join(f"{re.escape(prefix)}.*" for prefix in (family.tower_prefix, *family.projector_prefixes))


@contextmanager
def without_adapters(model: "PreTrainedModel") -> Iterator[None]:
    """Disable the adapters, so that the model computes what it did before it had any."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    set_adapters_disabled(layers, True)
    try:
        yield
    finally:
        set_adapters_disabled(layers, False)


def sent_weights(weights: Mapping[str, Value], lora: Lora | None) -> dict[str, Value]:
    """Return the weights that change for an engine: its adapters, or all weights of a model without adapters."""
    has_adapters = lora is not None and not lora.merge
    return {name: weight for name, weight in weights.items() if is_adapter(name) == has_adapters}


def synced_weights(model: "PreTrainedModel", weights: Mapping[str, Value], spec: EngineSpec) -> dict[str, Value]:
    """Return the weights that a sync transfers: those that change, without parts that both engines have."""
    family = find_family(model.config.model_type)
    return {
        name: weight
        for name, weight in sent_weights(weights, spec.lora).items()
        if family is None or family.part_of(name) in spec.synced_parts
    }


def is_adapter(name: str) -> bool:
    """Return whether the weight with this name in the model belongs to an adapter."""
    return ".lora_" in name


def learning_rate_factor(name: str, lora: Lora | None) -> float:
    """Return the multiple of the learning rate that the weight with this name in the model learns with."""
    return lora.b_learning_rate if lora is not None and ".lora_B." in name else 1.0


def transfer_name(name: str) -> str:
    """Return the name under which a weight is sent: peft's file name for adapters, else that without adapters."""
    if is_adapter(name):
        return _FILE_PREFIX + name.replace(_ADAPTER_NAME, ".")
    return name.replace(_BASE_LAYER, "")


class Merger:
    """Adds adapters to the weights that they stand beside, for an equivalent model without adapters."""

    def __init__(self, model: "PreTrainedModel", lora: Lora | None, adapters: "Mapping[str, Tensor]") -> None:
        """Take whole adapters, by their names in the model; without any, weights stay as they are."""
        self._lora, self._adapters = lora, adapters
        self._layers = _adapted_weights(model) if adapters else {}

    def merge(self, name: str, weight: "Tensor", first: int = 0) -> "Tensor":
        """Return the value of the weight with this name in the model, or of its rows or experts from ``first`` on.

        The sum is computed in float32, and returned in the weight's own dtype.
        """
        if (layer := self._layers.get(name)) is None:
            return weight
        assert self._lora is not None
        a, b = (
            self._adapters[f"{layer.name}.lora_{factor}{_ADAPTER_NAME}weight"].to(weight.device).float()
            for factor in "AB"
        )
        if layer.num_experts:
            rows = slice(first, first + len(weight))
            a = a.view(layer.num_experts, -1, a.shape[1])[rows]
            b = b.view(len(b), -1, layer.num_experts).permute(2, 0, 1)[rows]
        else:
            b = b[first : first + len(weight)]
        change = b @ a
        return (weight.float() + self._lora.scaling * (change.mT if layer.is_transposed else change)).to(weight.dtype)


@dataclass(frozen=True)
class _AdaptedWeight:
    """The adapted layer of a weight."""

    name: str
    num_experts: int = 0
    """Zero for a weight of one layer."""
    is_transposed: bool = False
    """Experts are [inputs, outputs]."""


def _adapted_weights(model: "PreTrainedModel") -> dict[str, _AdaptedWeight]:
    """Return the adapted layers by the names of their weights."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    layers = {}
    for name, module in model.named_modules():
        if isinstance(module, ParamWrapper):
            experts, inner = module.base_layer, f"{name}{_BASE_LAYER}"
            while isinstance(experts, ParamWrapper):
                experts, inner = experts.base_layer, f"{inner}{_BASE_LAYER}"
            layers[f"{inner}.{module.parameter_name}"] = _AdaptedWeight(
                name, module.num_experts, bool(getattr(experts, "is_transposed", False))
            )
        elif isinstance(module, LoraLayer):
            layers[f"{name}{_BASE_LAYER}.weight"] = _AdaptedWeight(name)
    return layers


def save_adapters(
    folder: Path,
    lora: Lora,
    adapters: "Mapping[str, Tensor]",
    base: str | None = None,
    model: "PreTrainedModel | None" = None,
) -> None:
    """Write adapters, keyed by their transfer names, in peft's format.

    ``base`` is the path of the base model. A folder is not recorded, because other machines do not have it. ``model``
    has the adapters; it is needed if its experts do, or if it encodes images.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    layers = {} if model is None else _adapted_weights(model)
    experts = {_EXPERTS + name.rpartition(".")[2] for name, layer in layers.items() if layer.num_experts}
    targets = sorted({name.split(".")[-3] for name in adapters if _EXPERTS not in name})
    folder.mkdir(exist_ok=True)
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilized,
        target_modules=targets,
        target_parameters=sorted(experts) or None,
        exclude_modules=None if model is None else excluded_modules(model),
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base is None or Path(base).is_dir() else base,
    ).save_pretrained(str(folder))
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in adapters.items()}, folder / _WEIGHTS_FILE)
