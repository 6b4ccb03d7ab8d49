"""Data sets of strangers: files that are not what they say end in one plain error."""

import pickle
from pathlib import Path

import pytest

import rlflow
from rlflow.data.loading import load_rows
from rlflow.errors import RecipeError
from tests.conftest import CONFIG_DIR

PICKLE = pickle.dumps({"prompt": print})
FILES = {
    "pickle.jsonl": PICKLE,
    "pickle.parquet": PICKLE,
    "empty.parquet": b"",
    "magic.parquet": b"PAR1" + b"\xff" * 64 + b"PAR1",
    "nested.jsonl": b'{"prompt": ' + b"[" * 100_000,
    "mixed.jsonl": b'{"prompt": "a"}\n{"prompt": {"a": 1}}\n',
    "list.json": b"[1, 2, 3]",
    "zeros.jsonl": b"\x00" * 4096,
    "script.py": b"raise SystemExit",
    "empty.jsonl": b"",
    "keys.jsonl": b'{"prompt": "1", "prompt": "2"}\n',
    "surrogate.jsonl": b'{"prompt": "\\ud800"}\n',
    "utf16.jsonl": '{"prompt": "1"}\n'.encode("utf-16"),
}
CAUSES = {
    "keys.jsonl": "the key 'prompt' occurs twice",
    "surrogate.jsonl": "the column 'prompt' has half of a surrogate pair",
    "utf16.jsonl": "is not UTF-8",
    "magic.parquet": "Parquet",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_plain_error(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / name
    path.write_bytes(FILES[name])
    data = rlflow.load(["recipe=fake", f"data.source={path}", "data.options={}"], CONFIG_DIR).data
    with pytest.raises(RecipeError) as raised:
        load_rows(data, "split")
    assert raised.value.path.startswith("data.")
    assert str(raised.value).count("\n") <= 2
    assert CAUSES.get(name, "") in str(raised.value)
