"""Readers that check the files of a run, also while the run still writes them."""

from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from rlflow.errors import FileError

T = TypeVar("T")

# The bytes that show that a file is the one that was read before.
_TAIL = 512
_LONGEST_SHOWN = 60
"""Characters of a wrong value that an error shows."""


def read_document(path: Path, kind: TypeAdapter[T], fix: str) -> T:
    """Return the content of a JSON file. Raises FileError for a file that is not of this ``kind``."""
    try:
        return kind.validate_json(path.read_bytes())
    except OSError as error:
        fact = f"cannot be read ({error.strerror})"
    except ValidationError as error:
        fact = _first_mistake(error)
    raise FileError(str(path), fact, fix=fix)


def _first_mistake(error: ValidationError) -> str:
    """Return what was expected and found at the first wrong value of a JSON file."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return f"expected JSON, found other text ({first['ctx']['error']})"
    place = ".".join(str(key) if str(key).isprintable() else repr(key) for key in first["loc"])
    if first["type"] == "missing":
        return f"{place} is missing"
    expected, value = first["msg"].replace("Input should be", "expected"), repr(first["input"])
    shown = value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}..."
    return f"{place}: {expected}, found {shown}" if place else f"{expected}, found {shown}"


class GrowingFile(Generic[T]):
    """A file with a JSON object in each line, which a run extends, or replaces when it resumes.

    Lines that are not as a run writes them are left out and counted.
    """

    def __init__(self, path: Path, kind: TypeAdapter[T]) -> None:
        self._path, self._kind = path, kind
        self._restart()

    def _restart(self) -> None:
        self._offset = 0
        """The end of the last complete line."""
        self._tail = b""
        """The bytes before it."""
        self._num_lines = 0
        self._left_out: list[int] = []
        """The numbers of the lines that are left out, counted from 1."""
        self._ends_in_a_line = False
        """The file ends in a line without an end."""

    def read(self) -> tuple[bool, list[T]]:
        """Return whether the file has been replaced, and its new lines. A torn last line comes later.

        Raises FileError for a file that cannot be read.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            was_there = self._offset > 0
            self._restart()
            return was_there, []
        except OSError as error:
            fix = "move it away; a resumed run writes a new one"
            raise FileError(str(self._path), f"cannot be read ({error.strerror})", fix=fix) from None
        with file:
            file.seek(self._offset - len(self._tail))
            is_other = file.read(len(self._tail)) != self._tail
            if is_other:
                self._restart()
                file.seek(0)
            content = file.read()
        complete = content[: content.rfind(b"\n") + 1]
        self._ends_in_a_line = len(complete) < len(content)
        self._offset += len(complete)
        self._tail = (self._tail + complete)[-_TAIL:]
        return is_other, [record for line in complete.split(b"\n")[:-1] for record in self._parse(line)]

    def _parse(self, line: bytes) -> list[T]:
        """Return the record in a line; none for a line that is left out or empty."""
        self._num_lines += 1
        try:
            return [self._kind.validate_json(line)] if line else []
        except ValidationError:
            self._left_out.append(self._num_lines)
            return []

    def describe_left_out(self, *, is_growing: bool) -> list[str]:
        """Return a sentence about the lines that are left out, if any.

        The last line counts too if it has no end, unless the file ``is_growing``.
        """
        torn = [self._num_lines + 1] if self._ends_in_a_line and not is_growing else []
        numbers = [*self._left_out, *torn]
        if not numbers:
            return []
        if len(numbers) == 1:
            return [f"{self._path.name}: line {numbers[0]} is damaged or incomplete, and left out"]
        fact = f"{len(numbers)} lines are damaged or incomplete, and left out (the first is line {numbers[0]})"
        return [f"{self._path.name}: {fact}"]
