"""How Hydra reads configuration files: each is vetted before Hydra acts on anything in it.

Hydra calls the functions that ``hydra.callbacks`` and ``hydra.launcher`` name by ``_target_``, and writes to the folder
that ``hydra.run.dir`` names, even for a dry run. A recipe may come from anyone, so only the command line may set these.
"""

import builtins
import re
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.core_plugins.importlib_resources_config_source import ImportlibResourcesConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from rlflow.errors import FileError, RecipeError
from rlflow.yaml_files import parse_yaml, read_text

_HEADER = 512  # as many characters as Hydra reads for the header of a file
_HYDRA, _TARGET = "hydra", "_target_"


class RecipeFiles(FileConfigSource):
    """A folder of configuration files, vetted as they are read."""

    front_door: ClassVar[Path]
    """The one file that is not vetted: it chooses Hydra's logging."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        is_vetted = path != self.front_door
        return _load(self, config_path, read_text(path), shown(path), is_vetted=is_vetted)


class PackagedRecipes(ImportlibResourcesConfigSource):
    """Configuration files inside an installed package (``pkg://``), vetted unless they are Hydra's own."""

    def load_config(self, config_path: str) -> ConfigResult:
        if self.path == "hydra.conf":
            return super().load_config(config_path)
        from importlib import resources

        resource = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        return _load(self, config_path, resource.read_text(encoding="utf-8"), str(resource))


class GivenRecipes(ConfigSource):
    """Recipes given by a path: ``recipe/<absolute path>`` is that file, as if it lay among the recipes."""

    @staticmethod
    def scheme() -> str:
        return "recipe-file"

    def load_config(self, config_path: str) -> ConfigResult:
        path = self._path(config_path)
        # Its folders are no groups of Hydra's.
        result = _load(self, f"recipe/{path.name}", read_text(path), shown(path))
        result.header["package"] = result.header["package"] or "_global_"
        return result

    def is_config(self, config_path: str) -> bool:
        # Hydra puts a slash between the group and the path, which begins with one itself.
        return config_path.startswith("recipe//") and self._path(config_path).is_file()

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "recipe")

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> "builtins.list[str]":
        return []

    @staticmethod
    def _path(config_path: str) -> Path:
        return Path(config_path.removeprefix("recipe/"))


def register(front_door: Path) -> None:
    """Make Hydra read every configuration file through this module. ``front_door`` is rlflow's own ``config.yaml``."""
    RecipeFiles.front_door = front_door.resolve()
    Plugins.instance()  # registers Hydra's own sources, which are replaced here
    SourcesRegistry.instance().types |= {"file": RecipeFiles, "pkg": PackagedRecipes}


def circle_error(error: RecursionError) -> RecipeError:
    """Return the error for defaults that lead back to themselves, with the files in the order that Hydra took."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    nodes = [frame.f_locals["root"].node for frame in frames if frame.f_code.co_name == "_create_defaults_tree_impl"]
    names = [node.get_config_path() for node in nodes if not node.is_virtual()]
    again = next((at for at, name in enumerate(names) if name in names[:at]), None)
    if again is None:
        return RecipeError("recipe", "is nested too deeply", fix="use fewer levels")
    circle = names[names.index(names[again]) : again + 1]
    return RecipeError("recipe", f"defaults go in a circle: {' -> '.join(circle)}", fix="remove one of these entries")


def _load(source: ConfigSource, config_path: str, text: str, file: str, *, is_vetted: bool = True) -> ConfigResult:
    try:
        header = ConfigSource._get_header_dict(text[:_HEADER])
    except ValueError as error:
        raise FileError(f"{file}:1", str(error).rstrip("."), fix="write '# @package _global_'") from None
    config = parse_yaml(text, file)
    if is_vetted:
        _vet(config, config_path, header["package"] or "", file)
    return ConfigResult(config=config, path=source.full_path(), provider=source.provider, header=header)


def _vet(config: DictConfig, config_path: str, package: str, file: str) -> None:
    """Raise FileError for what would change Hydra's own configuration or have Hydra call a function."""
    if _HYDRA in config_path.split("/"):
        raise _of_hydra(file, f"the file belongs to Hydra's group '{config_path.rpartition('/')[0] or _HYDRA}'")
    if _HYDRA in package.split("."):
        raise _of_hydra(file, f"its '@package {package}' puts the file into Hydra's own configuration")
    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    for key in map(str, content):
        if key.split(".")[0] == _HYDRA:
            raise _of_hydra(file, f"sets '{key}', which belongs to Hydra")
    defaults = content.get("defaults")
    for entry in defaults if isinstance(defaults, list) else []:
        if _names_hydra(entry):
            raise _of_hydra(file, f"its defaults have {entry!r}, which belongs to Hydra")
    for place in _targets(content, ""):
        raise FileError(
            file,
            f"'{place}' would have Hydra call a function",
            fix="remove it; name your own code as package.module:name (docs/extending.md)",
        )


def _of_hydra(file: str, fact: str) -> FileError:
    fix = "remove it; Hydra's options are typed on the command line, as hydra.run.dir=FOLDER"
    return FileError(file, fact, fix=fix)


def _names_hydra(entry: Any) -> bool:
    """Return True for an entry of a defaults list in, from or for Hydra's own configuration."""
    if not isinstance(entry, dict):
        return _HYDRA in _segments(str(entry))
    return any(_HYDRA in _segments(str(group)) or _HYDRA in _folders(option) for group, option in entry.items())


def _segments(name: str) -> list[str]:
    return re.split(r"[\s/.@:]+", name)


def _folders(option: Any) -> list[str]:
    """Return the folders in the name of an option, or in those of a list of options."""
    options = option if isinstance(option, list) else [option]
    return [segment for each in options for segment in _segments(str(each).rpartition("/")[0])]


def _targets(value: Any, place: str) -> Iterator[str]:
    """Yield the places of all ``_target_`` keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            where = f"{place}.{key}" if place else str(key)
            if str(key).rpartition(".")[2] == _TARGET:
                yield where
            yield from _targets(inner, where)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _targets(inner, f"{place}.{index}")


def shown(path: Path) -> str:
    """Return the path from the working directory where it is below that, and the whole path elsewhere."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
