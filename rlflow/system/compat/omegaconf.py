"""Private names of OmegaConf."""

from typing import Any


def yaml_loader(text: str) -> Any:
    """Return OmegaConf's YAML loader for a text.

    OmegaConf itself offers only functions that read a whole file, without the lines that error messages need.
    """
    from omegaconf._utils import get_yaml_loader

    return get_yaml_loader()(text)
