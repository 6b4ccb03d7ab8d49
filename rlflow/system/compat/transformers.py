"""Private names of transformers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


def zero3_loaders() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the functions by which ``from_pretrained`` reads a file, and loads its entries into a ZeRO-3 model."""
    from transformers import modeling_utils

    return modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model


@contextmanager
def zero3_loaded_by(read: Callable[..., Any], load: Callable[..., Any]) -> Iterator[None]:
    """Make ``from_pretrained`` read files and load ZeRO-3 models by other functions.

    transformers itself reads all files on every rank, before it loads any weight.
    """
    from transformers import modeling_utils

    before = zero3_loaders()
    modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model = read, load
    try:
        yield
    finally:
        modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model = before


@contextmanager
def cut_when_loaded(cut: Callable[[Any], None], rename: Callable[[Any], dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Make ``from_pretrained``, with the arguments that this yields, call ``cut`` on a model before it reads weights.

    Of a weight that is a DTensor then, each rank reads its shard. transformers itself knows meshes of its own alone.
    ``rename`` returns what names in a file become, from the model after it is cut.
    """
    from transformers import modeling_utils
    from transformers.core_model_loading import WeightConverter, WeightRenaming
    from transformers.distributed import DistributedConfig
    from transformers.distributed.mixin import DistributedMixin

    class Renaming(WeightRenaming):  # type: ignore[misc]
        """A renaming by a table, which transformers does not undo in files that it writes."""

        def __init__(self, names: dict[str, str]) -> None:
            super().__init__("^$", "^$")
            self.names = names

        def rename_source_key(self, source_key: str) -> tuple[str, None]:
            return self.names.get(source_key, source_key), None

    conversions: list[Any] = []

    def prepare(config: Any, device_map: Any = None) -> tuple[Any, Any, None]:
        return config, device_map, None

    def convert(*arguments: Any, **options: Any) -> list[Any]:
        conversions[:] = find_conversions(*arguments, **options)
        return conversions

    def distribute(model: Any, config: Any, mesh_manager: None) -> Any:
        del model.config.distributed_config
        cut(model)
        names = rename(model)
        for conversion in conversions:
            if isinstance(conversion, WeightConverter):  # it has the last word about a name
                conversion.target_patterns[:] = [_renamed(target, names) for target in conversion.target_patterns]
        conversions.append(Renaming(names))
        return model

    find_conversions = modeling_utils.get_model_conversion_mapping
    replaced = [
        (DistributedMixin, "prepare_distribute_model", staticmethod(prepare)),
        (DistributedMixin, "maybe_distribute_model", staticmethod(distribute)),
        (modeling_utils, "get_model_conversion_mapping", convert),
    ]
    before = [vars(owner)[name] for owner, name, _ in replaced]
    for owner, name, function in replaced:
        setattr(owner, name, function)
    try:
        yield {"distributed_config": DistributedConfig()}
    finally:
        for (owner, name, _), function in zip(replaced, before, strict=True):
            setattr(owner, name, function)


def _renamed(end: str, names: Mapping[str, str]) -> str:
    """Return what the end of a name becomes, by a table of whole names."""
    renamed = (new.removeprefix(old.removesuffix(end)) for old, new in names.items() if old.endswith(end))
    return next(renamed, end)


def keep_values(module: Any) -> None:
    """Make ``from_pretrained`` leave a module's weights as they are if the checkpoint lacks them."""
    module._is_hf_initialized = True


def initialize_head(model: Any, head: Any) -> None:
    """Give a new head random values, as the model's class does."""
    model._init_weights(head)
