"""Private names of Hydra. Only ``recipe/`` imports this file, and with it Hydra."""

import traceback
from collections.abc import Mapping

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigSource

__all__ = ["FileConfigSource", "ImportlibResourcesConfigSource"]


def replace_sources(sources: Mapping[str, type[ConfigSource]]) -> None:
    """Read configuration files of some schemes, such as ``file``, through other classes than Hydra's own.

    Hydra registers new schemes as plugins, but refuses a second class for a scheme.
    """
    Plugins.instance()  # registers Hydra's own sources
    SourcesRegistry.instance().types |= sources


def header_of(text: str) -> dict[str, str | None]:
    """Return the header of a configuration file, such as its package, from the file's first characters.

    Every source of configuration files returns it, and only Hydra's base class can read it. Raises ValueError.
    """
    header: dict[str, str | None] = ConfigSource._get_header_dict(text)
    return header


def nested_defaults(error: RecursionError) -> list[str]:
    """Return the files whose defaults Hydra was reading when it recursed too deeply, in order.

    Hydra does not notice that defaults include each other, and its own error names no file.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    nodes = [frame.f_locals["root"].node for frame in frames if frame.f_code.co_name == "_create_defaults_tree_impl"]
    return [node.get_config_path() for node in nodes if not node.is_virtual()]
