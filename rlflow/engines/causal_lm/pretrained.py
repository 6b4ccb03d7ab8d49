"""Finding weights that are NaN or infinite before anything is made of them.

A model and its tokenizer, from a folder, from the hub, or new.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlflow.engines.base import Head
from rlflow.errors import EngineError, RecipeError, first_line
from rlflow.recipe import Model
from rlflow.resources.layout import Attention

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def check_finite(role: str, weights: "Iterable[tuple[str, Tensor]]", when: str) -> None:
    """Raise EngineError for the first weight that is not finite, by its name; ``when`` follows it in the message.

    Each weight is read once, nothing is copied, and a GPU is waited for once.
    """
    import torch

    extremes: dict[str, Tensor] = {}
    for name, weight in weights:
        if weight.numel() and weight.is_floating_point():
            # Both are NaN where any value is.
            extremes[name] = torch.stack(torch.aminmax(weight.detach()))
    if not extremes:
        return
    finite = torch.stack([pair.float() for pair in extremes.values()]).isfinite().all(dim=1).tolist()
    if broken := [name for name, is_finite in zip(extremes, finite, strict=True) if not is_finite]:
        others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
        raise EngineError(
            f"role {role}: {broken[0]}{others} of {len(finite)} weights {when} not finite, and are not used.\n"
            f"  Fix: if training broke them, a lower roles.{role}.optimizer.learning_rate, with a new run."
        )


END_TOKEN = "<|end|>"
# What a configuration calls them.
_CHANGES_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# What transformers calls those of the two others.
_HEAD_WEIGHTS = {"score.weight", "score.bias"}
# Types of which models with new weights can be had.
NEW_MODELS = {"llama", "qwen2", "qwen3"}


def load_tokenizer(name: str, model: Model) -> "PreTrainedTokenizerBase":
    """Raises RecipeError when ``models.<name>`` names none that can be loaded."""
    from transformers import AutoTokenizer

    if model.characters is not None:
        return _character_tokenizer(model.characters)
    assert model.path is not None
    load = partial(AutoTokenizer.from_pretrained, trust_remote_code=model.trust_remote_code)
    return _from(name, model.path, load)


def load_model(
    name: str,
    model: Model,
    *,
    device: str,
    dtype: "dtype",
    seed: int,
    attention: Attention = "sdpa",
    head: Head = "vocabulary",
    trains: bool = True,
) -> "PreTrainedModel":
    """In evaluation mode. ``seed`` draws new weights and a new value head, and a new reward head where the model
    ``trains``: one that only evaluates has learned it before. Raises RecipeError."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )
    from transformers.utils import logging

    from rlflow.engines.causal_lm.attention import FLASH_NAME, NAME

    chosen = FLASH_NAME if attention == "flash_attention_2" else NAME
    # Its bars would break into the run's own display.
    logging.disable_progress_bar()
    auto = {
        "vocabulary": AutoModelForCausalLM,
        "value": AutoModelForTokenClassification,
        "reward": AutoModelForSequenceClassification,
    }[head]
    extra: dict[str, Any] = {} if head == "vocabulary" else {"num_labels": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if model.path is not None:
            load = lambda path: auto.from_pretrained(  # noqa: E731
                path,
                dtype=dtype,
                attn_implementation=chosen,
                output_loading_info=True,
                trust_remote_code=model.trust_remote_code,
                **extra,
            )
            # That a head is new, and not from the file, is no news.
            with nullcontext() if head == "vocabulary" else _quietly():
                built, loaded = _from(name, model.path, load)
            if head != "vocabulary":
                new = set() if head == "reward" and not trains else _HEAD_WEIGHTS
                _check_complete(name, model.path, head, set(loaded["missing_keys"]) - new)
        else:
            tokenizer = load_tokenizer(name, model)
            config = AutoConfig.for_model(**_config_fields(name, model), eos_token_id=tokenizer.eos_token_id, **extra)
            built = auto.from_config(config, dtype=dtype, attn_implementation=chosen)
    layers = set(getattr(built.config, "layer_types", None) or ())
    if layers - {"full_attention"}:
        raise RecipeError(
            f"models.{name}.path", f"layers of {', '.join(sorted(layers - {'full_attention'}))} are not supported"
        )
    for key in _CHANGES_OF_LOGITS if head == "vocabulary" else ():
        if (value := getattr(built.config, key, None)) not in (None, 1):
            raise RecipeError(
                f"models.{name}.path",
                f"logits that the model changes after its output layer ({key} {value}) are not supported",
            )
    # Dropout would make the policy that trains another than the one that wrote.
    for module in built.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if head == "reward":
        _says_all_rewards(built)
    return built.eval().to(device)


def save_model(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    weights: "dict[str, Tensor] | None" = None,
) -> None:
    """Write ``model`` and ``tokenizer`` as transformers does; ``weights`` replace those of the model."""
    # transformers imports DeepSpeed here, where that is installed, and DeepSpeed warns on CPUs that it found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if model.device.type == "cuda" else "cpu")
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


@contextmanager
def _quietly() -> Iterator[None]:
    """Without warnings of transformers."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_complete(name: str, path: str, head: Head, missing: Collection[str]) -> None:
    """Raises RecipeError for weights that would be drawn at random."""
    if missing:
        some = ", ".join(sorted(missing)[:3])
        raise RecipeError(
            f"models.{name}.path",
            f"'{path}' is no {head} model: of its weights {len(missing)} are not there, as {some}",
            fix="for rewards a sequence classification model with one label, as reward_model_update makes them",
        )


def _says_all_rewards(model: "PreTrainedModel") -> None:
    """Sequence classification gives the logits of the last token of a row; a stream of many sequences needs all."""
    from transformers.modeling_outputs import TokenClassifierOutput

    def forward(**inputs: Any) -> Any:
        hidden = getattr(model, model.base_model_prefix)(**inputs).last_hidden_state
        return TokenClassifierOutput(logits=model.score(hidden))

    model.forward = forward


def end_ids(*given: int | list[int] | None) -> list[int]:
    """Those of the generation's configuration and the tokenizer's own; a chat model has several."""
    lists = [ids if isinstance(ids, list) else [ids] for ids in given if ids is not None]
    return sorted({id_ for ids in lists for id_ in ids})


def _config_fields(name: str, model: Model) -> dict[str, Any]:
    """Of a new model: its architecture, in the form of a ``config.json``. Raises RecipeError for types not built."""
    assert model.architecture is not None
    if model.architecture.model_type not in NEW_MODELS:
        raise RecipeError(
            f"models.{name}.architecture.model_type",
            f"new models of the type '{model.architecture.model_type}' are not built",
            known=sorted(NEW_MODELS),
        )
    # What stands at its default is left out: most of it is of other types.
    values = vars(model.architecture)
    figures = {
        field.name: values[field.name] for field in fields(model.architecture) if values[field.name] != field.default
    }
    figures.pop("rope_theta", None)
    return figures | {"rope_parameters": {"rope_type": "default", "rope_theta": values["rope_theta"]}}


def _from(name: str, path: str, load: Callable[[str], Any]) -> Any:
    where = f"models.{name}.path"
    if path.startswith((".", "/", "~")) and not Path(path).is_dir():
        raise RecipeError(where, f"'{path}' is not a folder", fix="give the folder that save_pretrained wrote")
    try:
        return load(path)
    except Exception as error:  # the libraries below raise errors of many kinds for a damaged file
        raise loading_error(name, path, error) from None


def loading_error(name: str, path: str, error: Exception) -> RecipeError:
    """Return the error for a model, tokenizer or configuration at ``path`` that transformers could not load."""
    where = f"models.{name}.path"
    if "trust_remote_code" in str(error):
        return RecipeError(
            where,
            f"'{path}' can only be loaded by running the Python files in it, which are not rlflow's",
            fix=f"read them, and if you trust them set models.{name}.trust_remote_code=true",
        )
    return RecipeError(
        where,
        f"'{path}' cannot be loaded ({first_line(error)})",
        fix="give a folder with a model, or a name on the hub",
    )


def _character_tokenizer(characters: str) -> "PreTrainedTokenizerBase":
    """A token for each character, and one for the end, which also pads. Other characters are refused."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([END_TOKEN, *dict.fromkeys(characters)])}
    words = Tokenizer(WordLevel(vocabulary))
    words.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    words.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END_TOKEN, pad_token=END_TOKEN)
