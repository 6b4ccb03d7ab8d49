"""compose: from file names and overrides to one configuration, by Hydra.

Shapes such as ``2x8@h200`` are configurations of the group ``cluster`` that exist without a file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlflow import recipe_files
from rlflow.arguments import CONF as CONF
from rlflow.arguments import hydra_arguments
from rlflow.errors import FileError, RecipeError, did_you_mean
from rlflow.recipe import Recipe, Tune, load, plain
from rlflow.resources.cluster import Cluster, cluster_from, parse_shape
from rlflow.resources.time.speed import Calibration, calibration_from
from rlflow.schema import Section, parse
from rlflow.yaml_files import read_yaml


@dataclass(frozen=True, kw_only=True)
class FrontDoor(Section):
    """What the configuration holds besides the recipe."""

    cluster: Mapping[str, Any]
    dry_run: bool
    plan: str | None
    resume: bool | str
    explain: bool
    tune: Tune
    calibration: str | None
    """A YAML file with measured efficiencies by kind of GPU."""


class ShapeSource(ConfigSource):
    """Gives ``cluster/<shape>`` a configuration: the shape, and the figures of the kinds of GPU in it."""

    @staticmethod
    def scheme() -> str:
        return "shape"

    def load_config(self, config_path: str) -> ConfigResult:
        shape = self._shape(config_path)
        kinds = sorted({kind for _, _, kind in parse_shape(shape)})
        config = OmegaConf.create(
            {"defaults": [{f"/gpu@gpus.{kind}": kind} for kind in kinds], "shape": shape},
        )
        header: dict[str, str | None] = {"package": None}
        return ConfigResult(provider=self.provider, path=self.full_path(), config=config, header=header)

    def is_config(self, config_path: str) -> bool:
        shape = self._shape(config_path)
        # Whatever begins like a shape is one, so that a wrong one is told what it lacks.
        return config_path.startswith("cluster/") and re.match(r"\d", shape) is not None

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "cluster")

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> "list[str]":
        return []

    @staticmethod
    def _shape(config_path: str) -> str:
        return config_path.removeprefix("cluster/").removesuffix(".yaml")


class MadeSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for source in (ShapeSource, recipe_files.GivenRecipes):
            search_path.append("rlflow", f"{source.scheme()}://")


def register_sources() -> None:
    """Register shapes and vetted files with Hydra; once is enough, more does no harm."""
    for plugin in (ShapeSource, recipe_files.GivenRecipes, MadeSearchPath):
        Plugins.instance().register(plugin)
    recipe_files.register(CONF / "config.yaml")


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> DictConfig:
    """The whole configuration for ``overrides``, as on the command line. ``config_dir`` holds the user's own parts.

    Raises RecipeError.
    """
    register_sources()
    extra = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    # Composing works inside a job that Hydra runs, too.
    hydra = GlobalHydra.instance()
    outer = hydra.hydra
    hydra.clear()
    try:
        with initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
            return hydra_compose("config", [*extra, *hydra_arguments(overrides, config_dir)])
    except COMPOSING_ERRORS as error:
        raise composing_error(error) from None
    finally:
        hydra.hydra = outer


def recipe_of(config: DictConfig, config_dir: Path | None = None, above: tuple[str, ...] = ()) -> Recipe:
    """The recipe's part, with the recipes of its models composed in their turn; ``above`` are those it is for.

    Raises RecipeError.
    """

    def parts(name: str) -> Mapping[str, Any]:
        if name in above:
            raise RecipeError("recipe", f"goes in a circle: {' -> '.join([*above, name])}", fix="start from a path")
        return asdict(recipe_of(compose([f"recipe={name}"], config_dir), config_dir, (*above, name)))

    return load(_without_front_door(config), parts)


def front_door_of(config: DictConfig) -> FrontDoor:
    """What is to be done with the recipe, and where. Raises RecipeError."""
    return parse(FrontDoor, plain(OmegaConf.masked_copy(config, _front_door_keys())), "")


def _without_front_door(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [str(key) for key in config if key not in _front_door_keys()])


def _front_door_keys() -> list[str]:
    return [field.name for field in fields(FrontDoor)]


def cluster_named(name: str, config_dir: Path | None = None) -> Cluster:
    """A cluster of conf/cluster, or a shape. Raises RecipeError."""
    return cluster_from(front_door_of(compose([f"cluster={name}"], config_dir)).cluster)


def cluster_of_hosts(devices: Mapping[str, Sequence[str]], config_dir: Path | None = None) -> Cluster:
    """The hosts with their GPUs, by the names that nvidia-smi has for these; the processor where there are none.

    Raises RecipeError for a GPU without figures, or one host with GPUs of several kinds.
    """
    if not any(devices.values()):
        return cluster_named("local", config_dir)
    folders = [CONF / "gpu", *([config_dir / "gpu"] if config_dir else [])]
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    kinds = {str(_device_name(path)): path.stem for path in files}
    hosts = []
    for host, names in devices.items():
        if unknown := [name for name in names if name not in kinds]:
            raise RecipeError(
                "cluster",
                f"no figures for the GPU '{unknown[0]}' of '{host}'",
                known=[f"{kind} ({name})" for name, kind in kinds.items() if name != "None"],
                fix="a file gpu/NAME.yaml with its memory_gib and device_name in a folder given by --config-dir",
            )
        if len(set(names)) > 1:
            raise RecipeError(
                "cluster",
                f"'{host}' has GPUs of several kinds ({', '.join(sorted(set(names)))})",
                fix="a file cluster/NAME.yaml with the hosts and which of their GPUs are free",
            )
        if names:
            hosts.append({"name": host, "gpus": len(names), "gpu": kinds[names[0]]})
    used = sorted({str(host["gpu"]) for host in hosts})
    figures = cluster_named("+".join(f"1x1@{kind}" for kind in used), config_dir).gpus
    return cluster_from({"hosts": hosts, "gpus": {kind: asdict(figures[kind]) for kind in used}})


def calibration_of(door: FrontDoor, cluster: Cluster) -> Calibration:
    """Measured efficiencies from the file that the front door names; none otherwise. Raises RecipeError."""
    if door.calibration is None:
        return {}
    try:
        measured = read_yaml(Path(door.calibration))
    except FileError as error:
        raise RecipeError("calibration", f"'{error.path}' {error.fact}", fix=error.notes["Fix"]) from None
    return calibration_from(plain(measured), cluster)


def _device_name(path: Path) -> object:
    return read_yaml(path).get("device_name")


COMPOSING_ERRORS = (HydraException, OmegaConfBaseException, RecursionError)


def _where_to_put(group: str, name: str) -> str:
    if group == "recipe":
        return "a recipe of your own is given by its path, as recipe=./mine.yaml"
    return f"a file {group}/{name}.yaml in a folder given by --config-dir"


def composing_error(error: Exception) -> RecipeError:
    """What Hydra found wrong, in our form."""
    if isinstance(error, RecursionError):
        return recipe_files.circle_error(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        options = sorted(str(option) for option in error.options or [])
        known = [*options, "shapes as 2x8 or 7x8+1x7@h200"] if group == "cluster" else options
        return RecipeError(
            {"": "command line", "gpu": "cluster"}.get(group, group),
            f"no {group.rpartition('/')[2] or 'configuration'} '{name}'",
            known=known,
            fix=did_you_mean(name, options) or _where_to_put(group, name),
        )
    reason = " ".join(str(error).split("\nSee ")[0].split()).rstrip(".")
    return RecipeError("command line", reason)
