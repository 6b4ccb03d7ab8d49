"""Folders of data of strangers: only the files in them are read."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlflow.data.files import check_folder
from rlflow.data.loading import load_rows
from rlflow.errors import RecipeError
from rlflow.recipe import Data

ROW = {"prompt": "1+1=", "answer": "2"}
OUTSIDE = {"absolute": "FOLDER/../victim.jsonl", "above": "../victim.jsonl", "below and above": "a/../../victim.jsonl"}
REMOTE = {
    "http": "URL/x.jsonl",
    "hub": "hf://datasets/a/b/x.jsonl",
    "chain": "zip://x.jsonl::URL/x.zip",
    "file": "file:/etc/x",
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def requests() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server, and the paths that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        def do_HEAD(self) -> None:
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def write(path: Path, text: str | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(ROW) + "\n" if text is None else text)
    return path


def data(source: Path) -> Data:
    return Data(source=str(source), batch_size=3, max_prompt_tokens=8)


def configs(key: str) -> str:
    return f"configs:\n- config_name: default\n  {key}\n"


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize("key", ["data_files: PLACE", "data_files: [{split: train, path: [PLACE]}]", "data_dir: PLACE"])
def test_files_outside_are_refused(file: str, key: str, tmp_path: Path, requests: tuple[str, list[str]]) -> None:
    address, asked = requests
    folder = write(tmp_path / "folder" / "a.jsonl").parent
    write(tmp_path / "victim.jsonl")
    for place in [*OUTSIDE.values(), *REMOTE.values()]:
        place = place.replace("FOLDER", str(folder)).replace("URL", address)
        text = configs(key.replace("PLACE", f"'{place}'"))
        write(folder / file, f"---\n{text}---\n" if file == "README.md" else text)
        with pytest.raises(RecipeError, match=r"data.source: .* names the data file .*not a path inside of the folder"):
            load_rows(data(folder), "split")
        assert not asked, place


def test_files_inside_are_read(tmp_path: Path) -> None:
    folder = write(tmp_path / "parts" / "first.jsonl").parent.parent
    write(folder / "others.jsonl", '{"prompt": "other"}\n')
    write(folder / "README.md", f"---\n{configs('data_files: [{split: train, path: parts/*.jsonl}]')}---\n# A title\n")
    assert [dict(row) for row in load_rows(data(folder), "split")] == [ROW]


def test_a_large_card_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "README.md", "x" * 2**21)
    with pytest.raises(RecipeError, match=r"README.md' is larger than 1 MiB"):
        load_rows(data(tmp_path), "split")


@pytest.mark.parametrize("name", ["glob[1].jsonl", "a*b.jsonl", "what?.jsonl", "[!a].jsonl"])
def test_a_name_is_no_pattern(name: str, tmp_path: Path) -> None:
    write(tmp_path / name)
    assert len(load_rows(data(tmp_path / name), "split")) == 1


def test_a_folder_whose_name_is_a_pattern_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "data1" / "a.jsonl")
    write(tmp_path / "data[1]" / "a.jsonl")
    with pytest.raises(RecipeError, match="rename the folder"):
        load_rows(data(tmp_path / "data[1]"), "split")


def test_images_are_not_fetched(tmp_path: Path, requests: tuple[str, list[str]]) -> None:
    """A row of an image column may name an address, and decoding would ask for it."""
    address, asked = requests
    image = {"bytes": None, "path": f"{address}/x.png"}
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    schema = pyarrow.schema([("prompt", pyarrow.string()), ("one", kind), ("many", pyarrow.list_(kind))])
    features = {
        "prompt": {"dtype": "string", "_type": "Value"},
        "one": {"_type": "Image"},
        "many": {"_type": "List", "feature": {"_type": "Image"}},
    }
    table = pyarrow.Table.from_pylist([{"prompt": "a", "one": image, "many": [image]}], schema)
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    parquet.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    rows = load_rows(data(tmp_path / "a.parquet"), "split")
    assert (rows[0]["one"], asked) == (image, [])


BOMB = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text", [f"a0: &a0 x.jsonl\n{BOMB}\nconfigs: [{{data_files: *a29}}]", "configs: [{data_files: &a [*a]}]"]
)
def test_aliases_are_read_once(text: str, tmp_path: Path) -> None:
    """The first one stands for 9 ** 29 names, the second for itself."""
    write(tmp_path / ".huggingface.yaml", text)
    check_folder(tmp_path)
