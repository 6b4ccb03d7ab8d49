"""The errors of rlflow.

    Exception
    ├── ValueError
    │   └── UserError            a mistake in the recipe or on the command line; exit code 2
    │       ├── RecipeError      a value in the recipe, or a file that it names
    │       │   └── FileError    a configuration file; the error's path is the file
    │       ├── GraphError       the algorithm's graph: nodes, edges, roles
    │       └── PlacementError   the recipe does not fit the cluster
    └── RuntimeError
        └── EngineError          a model or a worker failed while running; exit code 1
            ├── EnvironmentFailedError  an environment failed, and no engine is at fault
            ├── NotFiniteError   values of a step are NaN or infinite; the run skips the step
            └── StorageError     a file of the run cannot be read or written, often because the disk is full

Every UserError reads ``<path in the recipe>: <what was expected and found>.``, with indented lines *Known*, *Free* and
*Fix* after it.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Characters of a part of an error.
_LONGEST_TEXT = 10_000


class UserError(ValueError):
    """A mistake that the user can fix in the recipe or on the command line.

    ``path`` is the path in the recipe (``roles.rollout.engine``), and ``fact`` says what is wrong there.
    """

    def __init__(
        self,
        path: str,
        fact: str,
        *,
        known: Iterable[object] = (),
        free: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.path = make_printable(path)
        self.fact = make_printable(fact)
        notes = {"Known": ", ".join(str(name) for name in known), "Free": free, "Fix": fix}
        self.notes = {name: text and make_printable(text) for name, text in notes.items()}
        super().__init__(self.path, self.fact)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.fact}.",
            *(f"{name}: {text}" + ("" if text.endswith("?") else ".") for name, text in self.notes.items() if text),
        ]
        return "\n  ".join(lines)


class RecipeError(UserError):
    """A value in the recipe, or a file that it names, is wrong."""


class FileError(RecipeError):
    """A configuration file cannot be read or sets a forbidden key. ``path`` is ``FILE`` or ``FILE:LINE``."""


class GraphError(UserError):
    """The graph of the algorithm is invalid."""


class PlacementError(UserError):
    """The cluster does not have the resources that the roles need."""


class EngineError(RuntimeError):
    """A model or a worker failed while running. The message names the step and the role."""


class EnvironmentFailedError(EngineError):
    """An environment of a conversation failed. No engine is at fault, so none is replaced."""


class NotFiniteError(EngineError):
    """Values of a step are NaN or infinite, and no optimizer step was made with them. The run skips the step."""

    node: str = ""
    """The node whose output or loss it is."""

    def __str__(self) -> str:
        return f"node {self.node}: {super().__str__()}" if self.node else super().__str__()


class StorageError(EngineError):
    """A file of the run cannot be read or written. The message names the file and a fix."""


_FIXES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some of your quota on that disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EEXIST: "remove or rename what has that name",
    errno.EISDIR: "remove or rename what has that name",
    errno.ENOTDIR: "remove or rename the file that has the name of a folder",
    errno.EROFS: "choose a writable folder with hydra.run.dir=FOLDER",
    errno.EACCES: "choose a folder that you may write to, with hydra.run.dir=FOLDER",
    errno.EPERM: "choose a folder that you may write to, with hydra.run.dir=FOLDER",
}


def storage_error(error: OSError, path: object) -> StorageError:
    """Return the error for a file that could not be read or written; ``path`` is used if ``error`` names no file."""
    fact = f"{error.filename or path}: {error.strerror or error}"
    fix = _FIXES.get(error.errno or 0)
    return StorageError(f"{fact}.\n  Fix: {fix}." if fix else f"{fact}.")


@contextmanager
def below(path: str) -> Iterator[None]:
    """Prefix the path of a UserError raised inside with ``path``, because the inner code knows only the rest."""
    try:
        yield
    except FileError:
        raise
    except UserError as error:
        error.path = f"{path}.{error.path}"
        raise


def make_printable(text: str) -> str:
    """Return a text with escapes for characters that a terminal acts on or does not show, and shortened if very long.

    Errors quote the files of strangers.
    """
    short = text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]} [...]"
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode() for each in short
    )


def first_line(error: BaseException) -> str:
    """Return the type and the first line of another library's error, to quote it in a sentence.

    Of a group of errors it is the first one.
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(". :")


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the *Fix* line for a misspelt or shortened name, or None when no known name is similar."""
    known = list(known)
    longer = sorted(each for each in known if name and each.startswith(f"{name}_"))
    near = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    quoted = " or ".join(f"'{each}'" for each in near)
    return f"did you mean {quoted}?" if near else None
