"""Text files that are replaced as one, and files that grow by lines."""

import os
from collections.abc import Iterable
from pathlib import Path

from rlflow.errors import storage_error


def replace_text(path: Path, text: str) -> None:
    """Write a file that has its old text or the new one, even if this process is killed meanwhile.

    Raises StorageError.
    """
    temporary = path.with_name(f"{path.name}.writing")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise storage_error(error, path) from error


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file, which need not exist. Raises StorageError."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
    except OSError as error:
        raise storage_error(error, path) from error
