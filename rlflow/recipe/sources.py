"""Checks configuration files before Hydra uses them.

Hydra calls the functions that ``hydra.callbacks`` and ``hydra.launcher`` name by ``_target_``, and writes to the folder
``hydra.run.dir``, even for a dry run. A recipe may come from anyone, so only the command line may set these.
"""

import builtins
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf

from rlflow.errors import FileError, RecipeError
from rlflow.recipe.yaml_files import parse_yaml, read_text
from rlflow.system.compat import hydra

_HEADER = 512  # as many characters as Hydra reads for the header of a file
_HYDRA, _TARGET = "hydra", "_target_"
# Options of the command line that read or continue what other files hold.
_COMMAND_LINE_ONLY = {"plan", "resume", "calibration"}


# The next two have the names of Hydra's own classes. A launcher's process takes over the sources of the process that
# started it, and then looks for plugins: Hydra refuses a class of another name for the same kind of source.
class FileConfigSource(hydra.FileConfigSource):
    """A folder of configuration files, which are checked when they are read."""

    trusted_file: ClassVar[Path]
    """rlflow's own ``config.yaml``, which is not checked because it configures Hydra's logging."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path)).resolve()
        is_checked = path != self.trusted_file
        return _load(self, config_path, read_text(path), display_path(path), is_checked=is_checked)


class ImportlibResourcesConfigSource(hydra.ImportlibResourcesConfigSource):
    """Configuration files in an installed package (``pkg://``), which are checked unless they are Hydra's own."""

    def load_config(self, config_path: str) -> ConfigResult:
        if self.path == "hydra.conf":
            return super().load_config(config_path)
        from importlib import resources

        resource = resources.files(self.path).joinpath(self._normalize_file_name(config_path))
        return _load(self, config_path, resource.read_text(encoding="utf-8"), str(resource))


class RecipeFileSource(ConfigSource):
    """Recipes given by a path: ``recipe/<absolute path>`` is an option of the group ``recipe``."""

    @staticmethod
    def scheme() -> str:
        return "recipe-file"

    def load_config(self, config_path: str) -> ConfigResult:
        path = self._path(config_path)
        # Only the file's name: its folders are not Hydra groups.
        result = _load(self, f"recipe/{path.name}", read_text(path), display_path(path))
        result.header["package"] = result.header["package"] or "_global_"
        if not result.config:
            fix = "name a recipe to start from: defaults: [grpo_tiny, _self_]"
            raise FileError(display_path(path), "the file has no keys", fix=fix)
        return result

    def is_config(self, config_path: str) -> bool:
        # Two slashes: one between group and path, and the first one of the absolute path.
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


def register() -> None:
    """Make Hydra read every configuration file through this module."""
    hydra.replace_sources({"file": FileConfigSource, "pkg": ImportlibResourcesConfigSource})


def circular_defaults_error(error: RecursionError) -> RecipeError:
    """Return the error for defaults that include each other, with the files in the order that Hydra read them."""
    names = hydra.nested_defaults(error)
    repeated = next((index for index, name in enumerate(names) if name in names[:index]), None)
    if repeated is None:
        return RecipeError("recipe", "is nested too deeply", fix="use fewer levels")
    circle = names[names.index(names[repeated]) : repeated + 1]
    return RecipeError(
        "recipe", f"defaults include each other: {' -> '.join(circle)}", fix="remove one of these entries"
    )


def _load(source: ConfigSource, config_path: str, text: str, file: str, *, is_checked: bool = True) -> ConfigResult:
    try:
        header = hydra.header_of(text[:_HEADER])
    except ValueError as error:
        raise FileError(f"{file}:1", str(error).rstrip("."), fix="write '# @package _global_'") from None
    config = parse_yaml(text, file)
    if is_checked:
        _check_content(config, config_path, header["package"] or "", file)
    return ConfigResult(config=config, path=source.full_path(), provider=source.provider, header=header)


def _check_content(config: DictConfig, config_path: str, package: str, file: str) -> None:
    """Raise FileError for content that would configure Hydra or make Hydra call a function."""
    if _HYDRA in config_path.split("/"):
        raise _hydra_error(file, f"the file belongs to Hydra's group '{config_path.rpartition('/')[0] or _HYDRA}'")
    if _HYDRA in package.split("."):
        raise _hydra_error(file, f"its '@package {package}' puts the file into Hydra's own configuration")
    content = OmegaConf.to_container(config, resolve=False)
    assert isinstance(content, dict)
    for key in map(str, content):
        if key.split(".")[0] == _HYDRA:
            raise _hydra_error(file, f"sets '{key}', which belongs to Hydra")
        if key in _COMMAND_LINE_ONLY and package in ("", "_global_"):
            fact = f"sets '{key}', which only the command line may set"
            raise FileError(file, fact, fix=f"remove it; write {key}=... on the command line")
    _check_defaults(content, file)
    for entry in content.get("defaults", []):
        if _refers_to_hydra(entry):
            raise _hydra_error(file, f"its defaults have {entry!r}, which belongs to Hydra")
        if name := next((name for name in _names(entry) if _leads_out(name)), None):
            fact = f"its defaults have '{name}', which may lead out of the folders of configuration files"
            raise FileError(file, fact, fix="name files of these folders, as /data: gsm8k")
    for path in _targets(content, ""):
        raise FileError(
            file,
            f"'{path}' would make Hydra call a function",
            fix="remove it; name your own code as package.module:name (docs/extending.md)",
        )


def _check_defaults(content: dict[Any, Any], file: str) -> None:
    """Raise FileError for a defaults list that Hydra cannot read, or whose files would replace what this file sets."""
    if "default" in content:
        raise FileError(file, "sets 'default', which no configuration has", fix="did you mean 'defaults'?")
    defaults = content.get("defaults", [])
    if not isinstance(defaults, list):
        fact = f"expected a list of files under 'defaults', got {defaults!r}"
        raise FileError(file, fact, fix="write defaults: [NAME, _self_]")
    if wrong := [entry for entry in defaults if not isinstance(entry, str | dict)]:
        fact = f"its defaults have {wrong[0]!r}, which is no name of a file"
        raise FileError(file, fact, fix="write names, as grpo_tiny or /data: gsm8k")
    later = defaults[defaults.index("_self_") + 1 :] if "_self_" in defaults else []
    overruled = [entry for entry in later if not _is_override(entry)]
    if content.keys() - {"defaults"} and overruled:
        fact = f"its defaults have {overruled[0]!r} after _self_, so its keys replace those of this file"
        raise FileError(file, fact, fix="put _self_ last")


def _is_override(entry: Any) -> bool:
    """Return whether an entry only chooses another option for an earlier entry."""
    return isinstance(entry, dict) and all(str(key).startswith("override ") for key in entry)


def _hydra_error(file: str, fact: str) -> FileError:
    fix = "remove it; set Hydra's options on the command line, such as hydra.run.dir=FOLDER"
    return FileError(file, fact, fix=fix)


def _refers_to_hydra(entry: Any) -> bool:
    """Return whether an entry of a defaults list refers to Hydra's own configuration."""
    if not isinstance(entry, dict):
        return _HYDRA in _segments(str(entry))
    return any(_HYDRA in _segments(str(group)) or _HYDRA in _folders(option) for group, option in entry.items())


def _names(entry: Any) -> list[str]:
    """Return the groups and options in an entry of a defaults list, each option after its group."""
    if not isinstance(entry, dict):
        return [str(entry)]
    options = [option if isinstance(option, list) else [option] for option in entry.values()]
    return [f"{group}/{option}" for group, chosen in zip(entry, options, strict=True) for option in chosen]


def _leads_out(name: str) -> bool:
    """Return whether a name in a defaults list is a path of its own, or read from somewhere else."""
    return "${" in name or ".." in re.split(r"[/@\s]", name) or "//" in name or "~" in name


def _segments(name: str) -> list[str]:
    return re.split(r"[\s/.@:]+", name)


def _folders(option: Any) -> list[str]:
    """Return the folders in the name of an option, or in those of a list of options."""
    options = option if isinstance(option, list) else [option]
    return [segment for option in options for segment in _segments(str(option).rpartition("/")[0])]


def _targets(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of all ``_target_`` keys."""
    if isinstance(value, dict):
        for key, inner in value.items():
            where = f"{path}.{key}" if path else str(key)
            if str(key).rpartition(".")[2] == _TARGET:
                yield where
            yield from _targets(inner, where)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _targets(inner, f"{path}.{index}")


def display_path(path: Path) -> str:
    """Return the path relative to the working directory if it is inside it, and the full path otherwise."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
