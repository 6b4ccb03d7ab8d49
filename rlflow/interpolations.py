"""Resolves the interpolations of a configuration, without those that read more than the configuration."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from omegaconf.resolvers import oc

from rlflow.errors import RecipeError

_ENVIRONMENT = "oc.env"


def to_mapping(config: DictConfig) -> dict[str, Any]:
    """Return the configuration as dicts and lists, with interpolations resolved.

    Raises RecipeError, also for a value that comes from the environment: plans and logs would show it, and a recipe of
    someone else could ask for a secret.
    """
    with _without_environment() as refused:
        try:
            container = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except MissingMandatoryValue as error:
            raise RecipeError(str(error.full_key), "is missing") from None
        except OmegaConfBaseException as error:
            path = str(error.full_key or "recipe")
            if refused:
                fact = f"reads {refused[0]} from the environment, and the value would be in plans and logs"
                fix = f'{path}="${refused[0]}" on the command line, which the shell replaces'
                raise RecipeError(path, fact, fix=fix) from None
            raise RecipeError(path, str(error.msg or error).splitlines()[0].rstrip(".")) from None
    return cast(dict[str, Any], container)


@contextmanager
def _without_environment() -> Iterator[list[str]]:
    """Refuse to read environment variables within the context, and list those that were asked for."""
    refused: list[str] = []

    def refuse(name: str, default: str = "") -> str:
        refused.append(name)
        raise KeyError(name)

    OmegaConf.register_new_resolver(_ENVIRONMENT, refuse, replace=True)
    try:
        yield refused
    finally:
        OmegaConf.register_new_resolver(_ENVIRONMENT, oc.env, replace=True)
