"""LoRA adapters in a model, by peft: with them, only the adapters are trained, copied and saved.

B starts at zero, so a new adapter does not change the model (Hu et al. 2021, arXiv 2106.09685, section 4.1). A layer
``q_proj`` becomes ``q_proj.base_layer``, with ``q_proj.lora_A.default`` [rank, inputs] and ``q_proj.lora_B.default``
[outputs, rank] beside it. peft's files name the same weights differently; those names are used for transfers.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
_BASE_LAYER = ".base_layer."
_WEIGHTS_FILE = "adapter_model.safetensors"


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
    known = sorted({name.rpartition(".")[2] for name in linear})
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


def base_names(model: "PreTrainedModel") -> dict[str, str]:
    """Return the names of the weights beside adapters, by those that they have in files of the model or its decoder."""
    names: dict[str, str] = {}
    for name, _ in model.named_parameters():
        bare = name.replace(_BASE_LAYER, ".")
        if bare != name:
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


def trained_weights(weights: Mapping[str, Value], lora: Lora | None) -> dict[str, Value]:
    """Return the weights that are trained: the adapters, or all weights of a model without adapters."""
    return {name: weight for name, weight in weights.items() if lora is None or is_adapter(name)}


def synced_weights(model: "PreTrainedModel", weights: Mapping[str, Value], spec: EngineSpec) -> dict[str, Value]:
    """Return the weights that a sync transfers: those that are trained, without parts that both engines have."""
    family = find_family(model.config.model_type)
    return {
        name: weight
        for name, weight in trained_weights(weights, spec.lora).items()
        if family is None or family.part_of(name) in spec.synced_parts
    }


def is_adapter(name: str) -> bool:
    """Return whether the weight with this name in the model belongs to an adapter."""
    return ".lora_" in name


def learning_rate_factor(name: str, lora: Lora | None) -> float:
    """Return the multiple of the learning rate that the weight with this name in the model learns with."""
    return lora.b_learning_rate if lora is not None and ".lora_B." in name else 1.0


def transfer_name(name: str) -> str:
    """Return the name under which a weight is sent to other engines: peft's file name for adapters, else ``name``."""
    return _FILE_PREFIX + name.replace(_ADAPTER_NAME, ".") if is_adapter(name) else name


def merge_adapter(
    name: str, weight: "Tensor", adapters: "Mapping[str, Tensor]", lora: Lora | None
) -> "tuple[str, Tensor]":
    """Return the name and value that a base weight has in an equivalent model without adapters.

    ``adapters`` are keyed by their names in the model. The sum is computed in float32, and returned in the weight's
    own dtype.
    """
    layer, is_base, kind = name.partition(_BASE_LAYER)
    if not is_base or kind != "weight":
        return f"{layer}.{kind}" if is_base else name, weight
    assert lora is not None
    a, b = (adapters[f"{layer}.lora_{factor}{_ADAPTER_NAME}weight"].to(weight.device).float() for factor in "AB")
    return f"{layer}.{kind}", (weight.float() + lora.scaling * (b @ a)).to(weight.dtype)


def save_adapters(
    folder: Path, lora: Lora, adapters: "Mapping[str, Tensor]", base: str | None, excluded: str | None = None
) -> None:
    """Write adapters, keyed by their transfer names, in peft's format. ``excluded``: see ``excluded_modules``.

    ``base`` is the path of the base model. A folder is not recorded, because other machines do not have it.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    targets = sorted({name.split(".")[-3] for name in adapters})
    folder.mkdir(exist_ok=True)
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        use_rslora=lora.rank_stabilized,
        target_modules=targets,
        exclude_modules=excluded,
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base is None or Path(base).is_dir() else base,
    ).save_pretrained(str(folder))
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in adapters.items()}, folder / _WEIGHTS_FILE)
