"""Model folders of strangers: no pickle is read, and no Python file of theirs is run."""

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer
from rlflow.errors import RecipeError
from rlflow.recipe import Model
from tests.helpers import spec

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 16,
}
CODE = "import pathlib\npathlib.Path('owned').touch()\nclass Own: pass\n"
AUTO_MAP = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", None]}


class Owner:
    """An object whose pickle writes a file when it is read."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch owned",)


PICKLE = pickle.dumps({"model.norm.weight": Owner()})
FOLDERS: dict[str, dict[str, object]] = {
    "a pickle of weights": {"config.json": CONFIG, "pytorch_model.bin": PICKLE},
    "a pickle that is indexed": {
        "config.json": CONFIG,
        "pytorch_model.bin.index.json": {"metadata": {}, "weight_map": {"model.norm.weight": "part.bin"}},
        "part.bin": PICKLE,
    },
    "a pickle called safetensors": {"config.json": CONFIG, "model.safetensors": PICKLE},
    "an index that leads out": {
        "config.json": CONFIG,
        "model.safetensors.index.json": {"metadata": {}, "weight_map": {"model.norm.weight": "../../x.safetensors"}},
    },
    "a model of its own": {"config.json": {**CONFIG, "auto_map": AUTO_MAP}, "own.py": CODE},
    "a type of its own": {"config.json": {**CONFIG, "model_type": "own", "auto_map": AUTO_MAP}, "own.py": CODE},
    "code elsewhere": {"config.json": {**CONFIG, "model_type": "own", "auto_map": {"AutoConfig": "a/b--own.Own"}}},
    "a header of 2**60 bytes": {"config.json": CONFIG, "model.safetensors": (2**60).to_bytes(8, "little") + b"{}"},
    "an empty file of weights": {"config.json": CONFIG, "model.safetensors": b""},
    "a configuration that is a list": {"config.json": [1]},
    "a configuration that is nested": {"config.json": b'{"a":' * 100_000},
    "a configuration with texts for numbers": {"config.json": {**CONFIG, "hidden_size": "8; import os"}},
}
TOKENIZERS: dict[str, dict[str, object]] = {
    "a tokenizer of its own": {
        "config.json": CONFIG,
        "tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": AUTO_MAP},
        "own.py": CODE,
    },
    "a tokenizer that is not JSON": {"config.json": CONFIG, "tokenizer.json": b"\xff\xfe"},
    "a tokenizer that is a pickle": {"config.json": CONFIG, "tokenizer.json": PICKLE, "tokenizer.model": PICKLE},
    "a tokenizer that is nested": {"config.json": CONFIG, "tokenizer.json": b"[" * 100_000},
}


def write(folder: Path, files: dict[str, object]) -> Model:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(
            content
            if isinstance(content, bytes)
            else (content if isinstance(content, str) else json.dumps(content)).encode()
        )
    return Model(path=str(folder))


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_model_is_refused(name: str, tmp_path: Path) -> None:
    model = write(tmp_path / "model", FOLDERS[name])
    with pytest.raises(RecipeError) as raised:
        load_model(spec(model=model), dtype=torch.float32)
    assert raised.value.path == "models.policy.path"
    assert not (tmp_path / "owned").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_hostile_tokenizer_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        load_tokenizer("policy", write(tmp_path / "model", TOKENIZERS[name]))
    assert raised.value.path == "models.policy.path"
    assert not (tmp_path / "owned").exists()
