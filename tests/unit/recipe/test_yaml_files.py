"""Mistakes in YAML: each is one message with its file and line, and takes no time."""

import time
from pathlib import Path

import pytest

from rlflow.errors import FileError
from rlflow.recipe.yaml_files import MAX_BYTES, read_yaml

# Nine to the power of nine values in 400 bytes.
BOMB = "a0: &a0 [1, 2, 3, 4, 5, 6, 7, 8, 9]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 9)
)

MISTAKES = [
    (b"a:\n\tb: 1", r":2: found character '\t' that cannot start any token."),
    (b"a: 1\nb: 2\na: 3", ":3: found duplicate key a."),
    (b"a:\n  b: 1\n c: 2", ":3: expected <block end>, but found"),
    (b"a: {b: 1\nc: 2", ":2: expected ',' or '}', but got ':'."),
    (b"a: *x", ":1: found undefined alias 'x'."),
    (b"a: 1\n---\nb: 1", ":2: has a second document."),
    (b"a: 1\nb: !!binary aGk=", ":2: the tag '!!binary' is not supported."),
    (b"a: !!python/object/apply:os.system [ls]", ":1: the tag '!!python/object/apply:os.system' is not supported."),
    (b"a: 1\nb: 1:30", ":2: YAML reads 1:30 in base 60."),
    (b"a: [1, 1:30.5]", ":1: YAML reads 1:30.5 in base 60."),
    (b"a: 010", ":1: YAML reads 010 in base 8."),
    (b"a: &x [*x]", ":1: an alias refers to the value that contains it."),
    (b"a: &x {b: *x}", ":1: an alias refers to the value that contains it."),
    (b"- a", ":1: expected a mapping."),
    (b"a: !!int x", ": has a value that cannot be read (ValueError: "),
    (b"a: " + b"1" * 5000, ": has a value that cannot be read (ValueError: "),
    (b"null: 1", ": has a value that cannot be read (KeyValidationError: "),
    (b"[a]: 1", ":1: found unhashable key."),
    (b"a: ${b", ": has a value that cannot be read (GrammarParseError: "),
    (b"a: \x00", ": is not a text file (ReaderError: "),
    (b"a: 1\nb: \xff", ":2: byte 0xff is not UTF-8."),
    (b"a: " + b"[" * 500, ": is nested too deeply."),
    (b"a: 1\n#" + b" " * MAX_BYTES, ": has more than 64 KiB, which no recipe needs."),
    (BOMB.encode(), ": has more than 10000 values once its aliases are expanded."),
]


@pytest.mark.parametrize(("content", "message"), MISTAKES, ids=[message.strip(": ") for _, message in MISTAKES])
def test_a_mistake_is_one_message_with_its_place(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    began = time.perf_counter()
    with pytest.raises(FileError) as raised:
        read_yaml(path)
    assert time.perf_counter() - began < 5, "the bomb is refused before it is expanded"
    assert str(raised.value).startswith(f"{path}{message}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest", "larger", "message"),
    [
        ("#\n" * 9_999 + "a: 1\n", "#\n" * 10_000 + "a: 1\n", "has more than 10000 lines"),
        ("a: " + "[" * 63 + "]" * 63, "a: " + "[" * 64 + "]" * 64, "is nested too deeply"),
        ("a: [" + "1," * 9_996 + "1]", "a: [" + "1," * 9_997 + "1]", "has more than 10000 values"),
    ],
    ids=["lines", "levels", "values"],
)
def test_the_largest_file_is_read_and_a_larger_one_is_not(
    largest: str, larger: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(largest)
    assert list(read_yaml(path)) == ["a"]
    path.write_text(larger)
    with pytest.raises(FileError, match=message):
        read_yaml(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"none.yaml: cannot be read \(No such file or directory\)"):
        read_yaml(tmp_path / "none.yaml")


def test_anchors_and_merges_within_the_limit(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]\n")
    assert read_yaml(tmp_path / "mine.yaml") == {
        "a": {"x": 1, "y": 2},
        "b": {"x": 1, "y": 3},
        "c": [{"x": 1, "y": 2}] * 2,
    }


def test_numbers_that_look_like_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("a: 0\nb: 0.5\nc: 1_000\nd: '1:30'\ne: 0x10\nf: -0\n")
    assert read_yaml(tmp_path / "mine.yaml") == {"a": 0, "b": 0.5, "c": 1000, "d": "1:30", "e": 16, "f": 0}


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("# nothing\n")
    assert read_yaml(tmp_path / "mine.yaml") == {}
