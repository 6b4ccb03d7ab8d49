"""The stage compose: Hydra combines configuration files and overrides into one configuration.

Cluster shapes such as ``2x8@h200`` are options of the group ``cluster`` that exist without a file.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from rlflow.errors import FileError, RecipeError, UserError, below
from rlflow.recipe import Recipe, sources
from rlflow.recipe.arguments import CONF as CONF
from rlflow.recipe.arguments import hydra_arguments, recipe_argument
from rlflow.recipe.composing_errors import COMPOSING_ERRORS, composing_error
from rlflow.recipe.interpolations import to_mapping
from rlflow.recipe.load import load
from rlflow.recipe.options import CommandOptions
from rlflow.recipe.yaml_files import read_yaml
from rlflow.resources.cluster import Cluster, cluster_from, parse_shape
from rlflow.resources.time.calibration import Calibration, calibration_from
from rlflow.schema import check_values, parse

# Set on import, because the processes of a launcher get the registered sources from the one that started them.
sources.FileConfigSource.trusted_file = (CONF / "config.yaml").resolve()


class ShapeSource(ConfigSource):
    """A source of Hydra's that gives ``cluster/<shape>`` the shape and the data of its kinds of GPU."""

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
        # Everything that begins like a shape counts as one, so that the error for a wrong shape explains the syntax.
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


class RlflowSearchPath(SearchPathPlugin):
    """A plugin that adds shapes and recipe files to the places where Hydra searches."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        for source in (ShapeSource, sources.RecipeFileSource):
            search_path.append("rlflow", f"{source.scheme()}://")


def register_sources() -> None:
    """Register rlflow's sources of configuration with Hydra. Repeated calls have no effect."""
    for plugin in (ShapeSource, sources.RecipeFileSource, RlflowSearchPath):
        Plugins.instance().register(plugin)
    sources.register()


def compose(overrides: Sequence[str] = (), config_dir: Path | None = None) -> DictConfig:
    """Return the configuration for ``overrides``, which are written as on the command line. Raises RecipeError.

    ``config_dir`` is the user's own folder of configuration files.
    """
    register_sources()
    extra = [f"hydra.searchpath=[file://{config_dir.resolve()}]"] if config_dir else []
    # Set aside the state of a job that Hydra is running, because composing starts from its own.
    hydra = GlobalHydra.instance()
    outer = hydra.hydra
    hydra.clear()
    try:
        with initialize_config_dir(str(CONF.resolve()), version_base="1.3"):
            return hydra_compose("config", [*extra, *hydra_arguments(overrides, config_dir)])
    except UserError:
        raise
    # Hydra reads "nan" as a number, and has no better error for a number in the place of a name.
    except (*COMPOSING_ERRORS, ValueError) as error:
        raise composing_error(error) from None
    finally:
        hydra.hydra = outer


def recipe_from_config(config: DictConfig, config_dir: Path | None = None, parents: tuple[str, ...] = ()) -> Recipe:
    """Return the recipe in a configuration, together with the recipes that its models name. Raises RecipeError.

    ``parents`` are the names of the recipes that led to this one.
    """

    def recipe_of_model(name: str) -> Mapping[str, Any]:
        if name in parents:
            raise RecipeError("recipe", f"refers to itself: {' -> '.join([*parents, name])}", fix="start from a path")
        if config_dir is None and (CONF / "recipe" / f"{name}.yaml").is_file():
            return asdict(_shipped_recipe(name))
        config = compose([recipe_argument(name)], config_dir)
        with below("recipe"):
            return asdict(recipe_from_config(config, config_dir, (*parents, name)))

    return load(_recipe_part(config), recipe_of_model)


@cache
def _shipped_recipe(name: str) -> Recipe:
    """Return a recipe of rlflow's own, which every job of a sweep may start from."""
    return recipe_from_config(compose([f"recipe={name}"]))


def options_from_config(config: DictConfig) -> CommandOptions:
    """Return the options in a configuration. Raises RecipeError."""
    return parse(CommandOptions, to_mapping(OmegaConf.masked_copy(config, _option_keys())), "")


def _recipe_part(config: DictConfig) -> DictConfig:
    # Keys that are not texts stay as they are, so that the checks refuse them.
    return OmegaConf.masked_copy(config, [cast(str, key) for key in config if key not in _option_keys()])


def _option_keys() -> list[str]:
    return [field.name for field in fields(CommandOptions)]


def load_cluster(name: str, config_dir: Path | None = None) -> Cluster:
    """Return a cluster by its name in conf/cluster or by its shape. Raises RecipeError."""
    return _shipped_cluster(name) if config_dir is None else _composed_cluster(name, config_dir)


@cache
def _shipped_cluster(name: str) -> Cluster:
    return _composed_cluster(name, None)


def _composed_cluster(name: str, config_dir: Path | None) -> Cluster:
    return cluster_from(options_from_config(compose([f"cluster={name}"], config_dir)).cluster)


def cluster_of_hosts(devices: Mapping[str, Sequence[str]], config_dir: Path | None = None) -> Cluster:
    """Return the cluster of hosts with these GPUs, or of the local CPU if there are none.

    ``devices`` has the names that nvidia-smi gives to each host's GPUs. Raises RecipeError for an unknown kind of GPU,
    or for a host with several kinds.
    """
    if not any(devices.values()):
        return load_cluster("local", config_dir)
    folders = [CONF / "gpu", *([config_dir / "gpu"] if config_dir else [])]
    files = [path for folder in folders for path in sorted(folder.glob("*.yaml"))]
    kinds = {str(_device_name(path)): path.stem for path in files}
    hosts = []
    for host, names in devices.items():
        if unknown := [name for name in names if name not in kinds]:
            raise RecipeError(
                "cluster",
                f"the GPU '{unknown[0]}' of '{host}' is unknown",
                known=[f"{kind} ({name})" for name, kind in kinds.items() if name != "None"],
                fix="add gpu/NAME.yaml with memory_gib and device_name to a folder and give it with --config-dir",
            )
        if len(set(names)) > 1:
            raise RecipeError(
                "cluster",
                f"'{host}' has GPUs of several kinds ({', '.join(sorted(set(names)))})",
                fix="add a file cluster/NAME.yaml that lists the hosts and their free GPUs",
            )
        if names:
            hosts.append({"name": host, "gpus": len(names), "gpu": kinds[names[0]]})
    used = sorted({str(host["gpu"]) for host in hosts})
    gpus = load_cluster("+".join(f"1x1@{kind}" for kind in used), config_dir).gpus
    return cluster_from({"hosts": hosts, "gpus": {kind: asdict(gpus[kind]) for kind in used}})


def load_calibration(options: CommandOptions, cluster: Cluster) -> Calibration:
    """Return the measured efficiencies in the file ``calibration``; empty without one. Raises RecipeError."""
    if options.calibration is None:
        return {}
    try:
        measured = read_yaml(Path(options.calibration))
    except FileError as error:
        fix = error.notes["Fix"] or "write one with: rlflow calibrate"
        raise RecipeError("calibration", f"'{error.path}' {error.fact}", fix=fix) from None
    # Checked first, so that errors name the option and not a key of the recipe.
    check_values(OmegaConf.to_container(measured), "calibration")
    return calibration_from(to_mapping(measured), cluster)


def _device_name(path: Path) -> object:
    return read_yaml(path).get("device_name")
