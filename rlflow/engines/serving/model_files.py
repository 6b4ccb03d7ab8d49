"""The files of the model that vLLM serves, and the weights that it must be given."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import EngineSpec
from rlflow.engines.causal_lm.adapters import add_adapters, copied_name, is_adapter, trained
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer, loading_error, save_model
from rlflow.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor


@contextmanager
def model_files(spec: EngineSpec) -> Iterator[str]:
    """A folder, or a name on the hub. That of a new model is there only inside."""
    import torch

    if spec.model.path is not None:
        yield spec.model.path
        return
    with TemporaryDirectory(prefix="rlflow-model-") as folder:
        dtype = getattr(torch, spec.model.dtype)
        model = load_model(spec.model_name, spec.model, device="cpu", dtype=dtype, seed=spec.seed)
        save_model(model, load_tokenizer(spec.model_name, spec.model), Path(folder))
        yield folder


@dataclass(frozen=True)
class Expected:
    """The weights of a model that it follows, by the names of its files; or the adapters, by those of peft's."""

    shapes: dict[str, tuple[int, ...]]
    required: frozenset[str]
    """Without those that are tied to others."""

    @classmethod
    def of(cls, config: Any, spec: EngineSpec) -> "Expected":
        """``config`` is the model's, of transformers. Raises RecipeError for adapters of layers that it has not."""
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=spec.model.trust_remote_code)
            add_adapters(model, spec)
        copied = {name: tuple(tensor.shape) for name, tensor in trained(model.state_dict(), spec.lora).items()}
        required = trained(dict(model.named_parameters()), spec.lora)
        shapes = {copied_name(name): shape for name, shape in copied.items()}
        return cls(shapes, frozenset(map(copied_name, required)))

    @property
    def adapted(self) -> list[str]:
        """The names of layers that have adapters: ``q_proj``."""
        return sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in self.shapes if is_adapter(name)})

    def checked(self, role: str, weights: "Iterable[tuple[str, Tensor]]") -> "Iterator[tuple[str, Tensor]]":
        """The same weights. Raises EngineError at one that does not fit, and at the end if some are missing."""
        missing = set(self.required)
        for name, tensor in weights:
            if self.shapes.get(name) != tuple(tensor.shape):
                raise EngineError(f"role {role}: the weight '{name}' does not fit the model.")
            missing.discard(name)
            yield name, tensor
        if missing:
            raise EngineError(f"role {role}: the weights lack '{min(missing)}'.")


def load_config(name: str, folder: str, *, trust_remote_code: bool = False) -> Any:
    """The model's ``config.json``, of transformers. Raises RecipeError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # the libraries below raise errors of many kinds for a damaged file
        raise loading_error(name, folder, error) from None


def load_end_ids(folder: str, config: Any) -> list[int | list[int] | None]:
    """As the model's authors give them."""
    from transformers import GenerationConfig

    try:
        return [GenerationConfig.from_pretrained(folder).eos_token_id]
    except OSError:
        return [GenerationConfig.from_model_config(config).eos_token_id]
