"""Low-rank adapters in a model, by peft: the only weights that are trained, copied and saved.

B is nought at the beginning, so that the model is what it was (Hu et al. 2021, arXiv 2106.09685, section 4.1). A layer
``q_proj`` becomes ``q_proj.base_layer``, with ``q_proj.lora_A.default`` [rank, inputs] and ``q_proj.lora_B.default``
[outputs, rank] beside it; peft's files have names of their own for them.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlflow.engines.base import EngineSpec
from rlflow.errors import RecipeError
from rlflow.resources.models.lora import Lora

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

Value = TypeVar("Value")

_NAME = ".default."
_IN_FILES = "base_model.model."
_BASE = ".base_layer."
_WEIGHTS_FILE = "adapter_model.safetensors"


def add_adapters(model: "PreTrainedModel", spec: EngineSpec) -> None:
    """Those of ``spec.lora``, in float32, drawn by the seed; nothing else has gradients from now on.

    Does nothing without. Raises RecipeError for layers that the model does not have.
    """
    if spec.lora is None:
        return
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(r=spec.lora.rank, lora_alpha=spec.lora.alpha, target_modules=_targets(model, spec))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        inject_adapter_in_model(config, model)
    for name, weight in model.named_parameters():
        if is_adapter(name):
            weight.data = weight.data.float()
    model.eval()


@contextmanager
def without_adapters(model: "PreTrainedModel") -> Iterator[None]:
    """Inside, the model is what it was before it had any."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    # peft's own switch makes adapters need no gradients for a while, on which DeepSpeed hangs what collects them.
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def trained(weights: Mapping[str, Value], lora: Lora | None) -> dict[str, Value]:
    """Of a model's weights, by their names in it: adapters alone, where there are some."""
    return {name: weight for name, weight in weights.items() if lora is None or is_adapter(name)}


def is_adapter(name: str) -> bool:
    """By the name that it has in the model."""
    return ".lora_" in name


def copied_name(name: str) -> str:
    """By which a weight goes to other engines: an adapter's in peft's files, another's in the model."""
    return _IN_FILES + name.replace(_NAME, ".") if is_adapter(name) else name


def merged(name: str, weight: "Tensor", adapters: "Mapping[str, Tensor]", lora: Lora | None) -> "tuple[str, Tensor]":
    """Name and value of a weight that is no adapter in a model without any that computes the same; ``adapters`` by
    their names in the model. Added up in float32, given in the weight's own type."""
    layer, inside, kind = name.partition(_BASE)
    if not inside or kind != "weight":
        return f"{layer}.{kind}" if inside else name, weight
    assert lora is not None
    a, b = (adapters[f"{layer}.lora_{factor}{_NAME}weight"].to(weight.device).float() for factor in "AB")
    return f"{layer}.{kind}", (weight.float() + lora.scaling * (b @ a)).to(weight.dtype)


def write_adapters(folder: Path, lora: Lora, adapters: "Mapping[str, Tensor]", base: str | None) -> None:
    """``adapters`` by the names of peft's files, in peft's form; ``base`` is the path of the model they are for."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    targets = sorted({name.split(".")[-3] for name in adapters})
    folder.mkdir(exist_ok=True)
    LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=targets,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    ).save_pretrained(str(folder))
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in adapters.items()}, folder / _WEIGHTS_FILE)


def _targets(model: "PreTrainedModel", spec: EngineSpec) -> list[str]:
    import torch

    assert spec.lora is not None
    head = model.get_output_embeddings()
    linear = (
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and module is not head
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
            fix="some of those known",
        )
    return list(spec.lora.target_modules)
