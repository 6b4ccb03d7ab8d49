"""Models and tokenizers of transformers: loaded from a folder or from the hub, or new with random weights."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rlflow.engines.base import EngineSpec, Head, choose_head
from rlflow.engines.causal_lm.kernels import choose_attention
from rlflow.engines.causal_lm.model_files import check_folder, loading_from
from rlflow.engines.causal_lm.new_configs import new_config
from rlflow.engines.causal_lm.new_tokenizers import new_tokenizer
from rlflow.engines.vision.base import VisionFamily, find_family
from rlflow.errors import RecipeError
from rlflow.recipe import Model

if TYPE_CHECKING:
    from torch import Tensor, dtype
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Shards(Protocol):
    """The way in which the ranks of a role share the weights of a model."""

    def cut(self, model: Any) -> None:
        """Shard a model, whose weights may be without values."""

    def loading(self) -> AbstractContextManager[dict[str, Any]]:
        """Make ``from_pretrained`` cut a model before it reads the weights; yields arguments for it."""

    def fill(self, model: Any, missing: Collection[str]) -> Collection[str]:
        """Give new weights their values, as far as a checkpoint lacks them; return their names."""


# Configuration keys of models that change their logits after the output layer.
_CHANGES_OF_LOGITS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
# The classes of transformers that have each head.
_AUTO_CLASSES: Mapping[Head, str] = {
    "vocabulary": "AutoModelForCausalLM",
    "value": "AutoModelForTokenClassification",
    "reward": "AutoModelForSequenceClassification",
}
# The names of a value head's and a reward head's weights in transformers.
_HEAD_WEIGHTS = {"score.weight", "score.bias"}
_OTHER_MODEL = "another model, or a role that only generates, with engine: vllm"
_FIX_HEADS: dict[Head, str] = {
    "vocabulary": "use a model for causal language modeling, with all its weights",
    "value": "for values without training, use a token classification model with one label, as value_update exports it",
    "reward": "for rewards, use a sequence classification model with one label, as reward_model_update exports it",
}
# The names of the number of experts in configurations of transformers.
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
# The largest file of an exported model's weights. What fails on the way to or from the hub is repeated by file.
_LARGEST_FILE = "5GB"


def load_tokenizer(name: str, model: Model) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of ``models.<name>``. Raises RecipeError."""
    tokenizer = new_tokenizer(model) if model.random_weights else _saved(name, model)
    tokenizer.chat_template = model.chat_template or tokenizer.chat_template
    return tokenizer


def _saved(name: str, model: Model) -> "PreTrainedTokenizerBase":
    assert model.path is not None
    check_folder(name, model)
    # Imported late, because it takes seconds: it imports the models of transformers, and torch.
    from transformers import AutoTokenizer

    with loading_from(name, model.path):
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            model.path, trust_remote_code=model.trust_remote_code
        )
        return loaded


def load_model(
    spec: EngineSpec, *, dtype: "dtype", device: str | None = None, shards: "Shards | None" = None
) -> "PreTrainedModel":
    """Load or create the model of a role, in evaluation mode, by default on the role's device. Raises RecipeError.

    The role's seed initializes random weights and a new value or reward head. A new head is accepted only for a role
    that is trained; a model with another role must bring its own. So must a language model, unless its output layer is
    that of the embeddings. With ``shards`` each rank has its shards of the weights, and reads only these.
    """
    check_folder(spec.model_name, spec.model)
    import torch
    from transformers.utils import logging

    # Progress bars would interfere with the run's own display.
    logging.disable_progress_bar()
    head = choose_head(spec.capabilities)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        built = _build_model(spec, head, dtype, shards)
    _check_supported(spec.model_name, head, built.config)
    # With dropout, the trained policy would differ from the one that generated the responses.
    for module in built.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    if head == "reward":
        _return_all_rewards(built)
    return built.eval().to(device or spec.device)


def _build_model(spec: EngineSpec, head: Head, dtype: "dtype", shards: "Shards | None") -> Any:
    """Load the model of a role from its path, or create it with random weights."""
    import transformers

    from rlflow.engines.causal_lm.attention import FLASH_NAME, NAME

    name, options = spec.model_name, spec.model
    kernel = choose_attention(spec)
    attention: Any = FLASH_NAME if kernel == "flash_attention_2" else NAME
    extra: dict[str, Any] = {} if head == "vocabulary" else {"num_labels": 1}
    if options.path is None:
        config = new_config(options, load_tokenizer(name, options), **extra)
    else:
        with loading_from(name, options.path):
            config = transformers.AutoConfig.from_pretrained(options.path, trust_remote_code=options.trust_remote_code)
    auto = getattr(transformers, _AUTO_CLASSES[head])
    if find_family(config.model_type) is not None:
        if head != "vocabulary":
            fact = f"a {head} head is not supported on models of the type '{config.model_type}', which see images"
            raise RecipeError(f"models.{name}", fact, fix="a model that reads text alone")
        auto = transformers.AutoModelForImageTextToText
        # The tokens of an image attend to each other both ways in the tower.
        attention = {"text_config": attention, "vision_config": kernel, "": attention}
    if options.path is None:
        built = auto.from_config(config, dtype=dtype, attn_implementation=attention)
        if shards is not None:
            shards.cut(built)
        return built
    # transformers warns that a value or reward head is new, which is expected.
    with (
        loading_from(name, options.path),
        nullcontext() if head == "vocabulary" else _without_warnings(),
        nullcontext({}) if shards is None else shards.loading() as sharding,
    ):
        built, loaded = auto.from_pretrained(
            options.path,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            use_safetensors=True,  # other files of weights are pickles
            trust_remote_code=options.trust_remote_code,
            **sharding,
            **extra,
        )
    if shards is not None:
        loaded["missing_keys"] -= shards.fill(built, loaded["missing_keys"])
    new = _HEAD_WEIGHTS if "Trains" in spec.capabilities else set()
    _check_complete(name, options.path, head, set(loaded["missing_keys"]) - new)
    return built


def _check_supported(name: str, head: Head, config: Any) -> None:
    """Raise RecipeError for layers other than full attention, and for logits that change after the output layer."""
    config = config.get_text_config()
    if layers := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        fact = f"layers of {', '.join(sorted(layers))} are not supported"
        raise RecipeError(f"models.{name}.path", fact, fix=_OTHER_MODEL)
    for key in _CHANGES_OF_LOGITS if head == "vocabulary" else ():
        if (value := getattr(config, key, None)) not in (None, 1):
            fact = f"logits that the model changes after its output layer ({key} {value}) are not supported"
            raise RecipeError(f"models.{name}.path", fact, fix=_OTHER_MODEL)


def save_model(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    folder: Path,
    weights: "dict[str, Tensor] | None" = None,
    family: VisionFamily | None = None,
) -> None:
    """Write ``model`` and ``tokenizer`` as transformers does; ``weights`` replace those of the model.

    The ``family`` of a vision-language model writes its image processor.

    The weights of a large model are in several files, with an index beside them.
    """
    # transformers imports DeepSpeed here, where that is installed, and DeepSpeed warns on CPUs that it found no GPU.
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if model.device.type == "cuda" else "cpu")
    model.save_pretrained(folder, state_dict=weights, max_shard_size=_LARGEST_FILE)
    tokenizer.save_pretrained(folder)
    if family is not None:
        family.image_processor.save_pretrained(folder)


def count_experts(config: Any) -> int:
    """Return how many experts each sparse layer of a model has, 0 for a model without experts."""
    config = config.get_text_config()
    return next((int(number) for name in _NUM_EXPERTS if (number := getattr(config, name, None))), 0)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Suppress transformers' warnings."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _check_complete(name: str, path: str, head: Head, missing: Collection[str]) -> None:
    """Raise RecipeError if the checkpoint lacks weights, which would be random."""
    if missing:
        kind = "language" if head == "vocabulary" else head
        some = ", ".join(sorted(missing)[:3])
        count = "1 weight is" if len(missing) == 1 else f"{len(missing)} weights are"
        raise RecipeError(
            f"models.{name}.path",
            f"'{path}' is no {kind} model: {count} missing from the checkpoint ({some})",
            fix=_FIX_HEADS[head],
        )


def _return_all_rewards(model: "PreTrainedModel") -> None:
    """Make a sequence classification model return the reward at every token.

    By default it returns the last token's alone, but a stream holds many sequences.
    """
    from transformers.modeling_outputs import TokenClassifierOutput

    def forward(**inputs: Any) -> Any:
        hidden = getattr(model, model.base_model_prefix)(**inputs).last_hidden_state
        return TokenClassifierOutput(logits=model.score(hidden))

    model.forward = forward


def merge_end_ids(*end_ids: int | list[int] | None) -> list[int]:
    """Combine the end tokens of the generation configuration and the tokenizer; a chat model has several."""
    lists = [ids if isinstance(ids, list) else [ids] for ids in end_ids if ids is not None]
    return sorted({id_ for ids in lists for id_ in ids})
