"""Small files that would become huge when they are read are refused at once; usual files are not."""

import gzip
import io
import json
import random
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from rlflow.data.expansion import check_expansion
from rlflow.data.files import check_folder
from rlflow.data.loading import load_rows
from rlflow.errors import RecipeError
from rlflow.recipe import Data

LONG = "x" * 1_000_000
# The paths of the texts in each column.
TEXTS = {
    "text": ["text"],
    "binary": ["binary"],
    "list": ["list.list.element"],
    "record": ["record.a"],
    "messages": ["messages.list.element.role", "messages.list.element.content"],
    "map": ["map.key_value.key", "map.key_value.value"],
}
# The limits of what a refusal may cost. It takes 0.1 s of a CPU, and reading these files minutes.
SECONDS, MIB = 5, 50


def repeated(text: str, times: int) -> pyarrow.Array:
    """Return an array that holds a text once and has it many times."""
    return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * times, pyarrow.int32()), pyarrow.array([text]))


def parquet_of(values: Callable[[], pyarrow.Array], **options: object) -> Callable[[Path], None]:
    def write(file: Path) -> None:
        parquet.write_table(
            pyarrow.table({"prompt": values()}), file, store_schema=False, compression="zstd", **options
        )

    return write


def nested(values: pyarrow.Array) -> pyarrow.Array:
    """Return conversations of one message each."""
    messages = pyarrow.StructArray.from_arrays([values], names=["content"])
    return pyarrow.ListArray.from_arrays(pyarrow.array(range(len(values) + 1), pyarrow.int32()), messages)


BOMBS: dict[str, Callable[[Path], object]] = {
    "text.parquet": parquet_of(lambda: repeated(LONG, 100_000), dictionary_pagesize_limit=10**9),
    "conversations.parquet": parquet_of(lambda: nested(repeated(LONG, 100_000)), dictionary_pagesize_limit=10**9),
    "rows.parquet": parquet_of(lambda: repeated("1+1=", 20_000_000)),
    "numbers.parquet": parquet_of(lambda: pyarrow.array([1] * 20_000_000)),
    "delta.parquet": parquet_of(
        lambda: pyarrow.repeat(LONG, 200),
        use_dictionary=False,
        column_encoding="DELTA_BYTE_ARRAY",
        data_page_size=2**30,
    ),
    "compressed.parquet": parquet_of(lambda: pyarrow.array([LONG * 100] * 2), use_dictionary=False),
    "rows.jsonl.gz": lambda file: file.write_bytes(gzip.compress(b'{"prompt": "1"}\n' * 4_000_000)),
}
QUICK = {"text.parquet", "rows.jsonl.gz"}


def cost_of(file: Path) -> tuple[str, float, float]:
    """Check a file in a process of its own. Return the error, the seconds of CPU, and the MiB that memory grew by."""
    code = (
        "import json, resource, sys, time; from pathlib import Path; import pyarrow.compute, pyarrow.parquet;"
        "from rlflow.data.expansion import check_expansion; from rlflow.errors import RecipeError\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024\n"
        "before, start, message = peak(), time.process_time(), ''\n"
        "try: check_expansion(Path(sys.argv[1]))\n"
        "except RecipeError as error: message = str(error)\n"
        "print(json.dumps([message, time.process_time() - start, peak() - before]))"
    )
    done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True, timeout=60)
    message, seconds, mib = json.loads(done.stdout)
    return message, seconds, mib


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in BOMBS]
)
def test_a_bomb_is_refused_at_once(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    BOMBS[name](file)
    assert file.stat().st_size < 400_000
    message, seconds, mib = cost_of(file)
    assert message.startswith(f"data.source: '{file}' would be more than 200 times as large")
    assert seconds < SECONDS
    assert mib < MIB


def test_a_bomb_in_a_folder_is_found(tmp_path: Path) -> None:
    BOMBS["text.parquet"](tmp_path / "train.parquet")
    data = Data(source=str(tmp_path), batch_size=1, max_prompt_tokens=8)
    with pytest.raises(RecipeError, match="200 times as large"):
        load_rows(data, "split")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl.gz"])
def test_usual_files_are_read(name: str, tmp_path: Path) -> None:
    """Rows share a long instruction, and are larger than what every file may have."""
    draw, instruction = random.Random(0), "Solve the problem step by step. " * 60
    rows = [{"prompt": f"{instruction}{draw.getrandbits(512):x}"} for _ in range(10_000)]
    file = tmp_path / name
    if name.endswith("gz"):
        file.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    assert sum(len(row["prompt"]) for row in rows) > 2**24
    check_expansion(file)


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["dictionary", "DELTA_BYTE_ARRAY"])
def test_every_column_of_texts_is_counted(encoding: str, tmp_path: Path) -> None:
    """Each text has a mebibyte; 17 of them are more than the 16 MiB that any small file may have, and 15 are not."""
    text, file = "x" * 2**20, tmp_path / "rows.parquet"
    columns: dict[str, Callable[[int], pyarrow.Array]] = {
        "text": lambda times: pyarrow.array([text] * times),
        "binary": lambda times: pyarrow.array([text.encode(), None] * times),
        "list": lambda times: pyarrow.array([[text] * times, []]),
        "record": lambda times: pyarrow.array([{"a": text, "b": 1}] * times),
        "messages": lambda times: pyarrow.array([[{"role": "user", "content": text}] * times]),
        "map": lambda times: pyarrow.array([[("key", text)]] * times, pyarrow.map_("string", "string")),
    }
    options = {"use_dictionary": encoding == "dictionary", "data_page_size": 2**30, "compression": "zstd"}
    for name, values in columns.items():
        for times in (15, 17):
            if encoding != "dictionary":
                options["column_encoding"] = dict.fromkeys(TEXTS[name], encoding)
            parquet.write_table(pyarrow.table({name: values(times)}), file, dictionary_pagesize_limit=2**30, **options)
            if times == 15:
                check_expansion(file)
            else:
                with pytest.raises(RecipeError, match="200 times as large"):
                    check_expansion(file)


def test_other_kinds_of_compression_and_of_data_are_refused(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as opened:
        opened.writestr("train.jsonl", '{"prompt": "1"}\n')
    (tmp_path / "train.zip").write_bytes(packed.getvalue())
    with pytest.raises(RecipeError, match="is compressed with zip, not with gzip"):
        check_folder(tmp_path)
    (tmp_path / "train.zip").unlink()
    (tmp_path / "train.xml").write_text("<a/>")
    data = Data(source=str(tmp_path), batch_size=1, max_prompt_tokens=8)
    with pytest.raises(RecipeError, match="holds data of the kind 'xml'") as raised:
        load_rows(data, "split")
    assert "Known: json, csv, parquet, text." in str(raised.value)


@pytest.mark.parametrize(("name", "kept"), [("text.parquet", 0.9), ("rows.jsonl.gz", 0.1)])
def test_a_damaged_file_is_refused(name: str, kept: float, tmp_path: Path) -> None:
    """A file that cannot be counted is not read, for the library may get further than the count."""
    file = tmp_path / name
    BOMBS[name](file)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * kept)])
    with pytest.raises(RecipeError, match="is damaged") as raised:
        check_expansion(file)
    assert "Fix: copy or download it again" in str(raised.value)
