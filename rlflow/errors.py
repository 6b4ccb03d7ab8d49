"""The errors of rlflow.

    Exception
    ├── ValueError
    │   └── UserError            something a person can mend in the recipe or on the command line; exit code 2
    │       ├── RecipeError      a value in the recipe, a file or a figure that it names
    │       │   └── FileError    a configuration file; its path is that of the file
    │       ├── GraphError       the algorithm's graph: nodes, edges, roles
    │       └── PlacementError   the recipe does not fit the cluster
    └── RuntimeError
        └── EngineError          a model or a worker failed while running; exit code 1
            └── StorageError     a file of the run cannot be read or written, mostly because the disk is full

Every message has one form: ``<recipe path>: <fact with values>.`` and indented lines *Known*, *Free*, *Fix*.
"""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake that the person who wrote the recipe can mend.

    ``path`` is the place in the recipe (``roles.rollout.engine``), ``fact`` says what is wrong with the value in it.
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
        self.path = path
        self.fact = fact
        self.notes = {"Known": ", ".join(str(name) for name in known), "Free": free, "Fix": fix}
        super().__init__(path, fact)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.fact}.",
            *(f"{name}: {text}" + ("" if text.endswith("?") else ".") for name, text in self.notes.items() if text),
        ]
        return "\n  ".join(lines)


class RecipeError(UserError):
    """A value in the recipe, or a file that it names, is wrong."""


class FileError(RecipeError):
    """A configuration file cannot be read, or says what no recipe may. Its ``path`` is ``FILE`` or ``FILE:LINE``."""


class GraphError(UserError):
    """The graph of the algorithm does not hold together."""


class PlacementError(UserError):
    """What the roles ask for cannot be had from the cluster."""


class EngineError(RuntimeError):
    """A model or a worker failed while running. Says the step and the role."""


class StorageError(EngineError):
    """A file of the run cannot be read or written. Says which one, and what to do about it."""


_FIXES = {
    errno.ENOSPC: "free some space on that disk",
    errno.EDQUOT: "free some space of your quota on that disk",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EROFS: "choose a folder that can be written, as hydra.run.dir=FOLDER",
    errno.EACCES: "choose a folder that you may write, as hydra.run.dir=FOLDER",
    errno.EPERM: "choose a folder that you may write, as hydra.run.dir=FOLDER",
}


def storage_error(error: OSError, path: object) -> StorageError:
    """Return the error for a file that could not be read or written: its own, or else ``path``."""
    fact = f"{error.filename or path}: {error.strerror or error}"
    fix = _FIXES.get(error.errno or 0)
    return StorageError(f"{fact}.\n  Fix: {fix}." if fix else f"{fact}.")


@contextmanager
def below(path: str) -> Iterator[None]:
    """Put ``path`` before that of a UserError from inside, which knows its place only from there on."""
    try:
        yield
    except FileError:
        raise
    except UserError as error:
        error.path = f"{path}.{error.path}"
        raise


def first_line(error: BaseException) -> str:
    """Kind and message of someone else's error, for a sentence of ours."""
    return f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(". :")


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """Return the *Fix* line for a misspelt or shortened name, or None when nothing known is near it."""
    known = list(known)
    longer = sorted(each for each in known if name and each.startswith(f"{name}_"))
    near = longer or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    quoted = " or ".join(f"'{each}'" for each in near)
    return f"did you mean {quoted}?" if near else None
