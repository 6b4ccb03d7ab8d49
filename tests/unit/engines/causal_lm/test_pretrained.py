"""Models that are written in several files, and Python files of a model, which run only when the recipe says so."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from rlflow.engines.base import Head
from rlflow.engines.causal_lm import pretrained
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer, save_model
from rlflow.engines.serving.settings import engine_arguments, load_config
from rlflow.errors import RecipeError
from rlflow.recipe import Model
from tests.helpers import MODEL, spec

CODE = """
from pathlib import Path
from transformers import PretrainedConfig, PreTrainedTokenizerFast
Path({mark!r}).touch()

class Config(PretrainedConfig):
    model_type = "foreign"

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Return a model folder whose configuration and tokenizer are classes in a file of that folder."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asks on the terminal"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    load_tokenizer("policy", MODEL).save_pretrained(folder)
    (folder / "code.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    config = {"model_type": "foreign", "auto_map": {"AutoConfig": "code.Config"}}
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer |= {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": [None, "code.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return Model(path=str(folder))


def test_no_file_of_a_model_runs_unless_the_recipe_says_so(foreign: Model, tmp_path: Path) -> None:
    assert foreign.path is not None
    ways: list[Callable[[], object]] = [
        lambda: load_tokenizer("policy", foreign),
        lambda: load_model(spec(model=foreign), dtype=torch.float32),
        lambda: load_config("policy", str(foreign.path)),
    ]
    for load in ways:
        with pytest.raises(RecipeError) as raised:
            load()
        said = str(raised.value)
        assert said.startswith(f"models.policy.path: '{foreign.path}' can only be loaded by running the Python files")
        assert said.endswith("Fix: read these files, and if you trust them set models.policy.trust_remote_code=true.")
    assert not (tmp_path / "ran").exists()


def test_a_recipe_may_trust_a_model(foreign: Model, tmp_path: Path) -> None:
    tokenizer = load_tokenizer("policy", replace(foreign, trust_remote_code=True))
    assert type(tokenizer).__name__ == "Tokenizer"
    assert (tmp_path / "ran").exists()


def test_a_recipe_may_bring_the_chat_template(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}={% endfor %}"
    load_tokenizer("policy", replace(MODEL, chat_template="other")).save_pretrained(tmp_path)
    for model in (replace(MODEL, chat_template=template), Model(path=str(tmp_path), chat_template=template)):
        tokenizer = load_tokenizer("policy", model)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "1+1"}], tokenize=False) == "1+1="
    assert load_tokenizer("policy", Model(path=str(tmp_path))).chat_template == "other"


@pytest.mark.parametrize("trusted", [False, True])
def test_vllm_gets_trust_remote_code(trusted: bool, tmp_path: Path) -> None:
    from transformers import Qwen3Config

    config = Qwen3Config(max_position_embeddings=64, head_dim=32, num_hidden_layers=2, num_key_value_heads=2)
    model = replace(MODEL, trust_remote_code=trusted)
    assert engine_arguments(spec(model=model), str(tmp_path), config)["trust_remote_code"] is trusted


@pytest.mark.slow
def test_a_large_model_is_written_in_several_files_that_load_as_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained, "_LARGEST_FILE", "20KB")
    model = load_model(spec(model=MODEL), dtype=torch.float32)
    save_model(model, load_tokenizer("policy", MODEL), tmp_path)
    # 15984 weights of 4 bytes.
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-{number:05}-of-00004.safetensors" for number in range(1, 5)]
    assert all((tmp_path / name).stat().st_size < 25_000 for name in files)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    stored = Model(path=str(tmp_path), dtype="float32")
    again = load_model(spec(model=stored, seed=1), dtype=torch.float32)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), again):
        weights = loaded.state_dict()
        assert weights.keys() == model.state_dict().keys()
        assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())


def test_a_file_of_weights_has_at_most_five_gigabytes() -> None:
    assert pretrained._LARGEST_FILE == "5GB"


@pytest.mark.slow
@pytest.mark.parametrize(("head", "trains"), [("value", False), ("reward", False), ("value", True)])
def test_a_language_model_has_no_other_head_than_its_own(head: Head, trains: bool, tmp_path: Path) -> None:
    """A head that is never trained must come with the model."""
    save_model(load_model(spec(model=MODEL), dtype=torch.float32), tokenizer(), tmp_path)
    with nullcontext() if trains else pytest.raises(RecipeError, match=f"is no {head} model: .* missing .*score"):
        load_stored(tmp_path, head, trains=trains)


@pytest.mark.parametrize("tied", [False, True])
def test_a_reward_model_is_a_language_model_where_its_output_layer_is_the_embeddings(
    tied: bool, tmp_path: Path
) -> None:
    assert MODEL.architecture is not None
    model = replace(MODEL, architecture=replace(MODEL.architecture, tie_word_embeddings=tied))
    built = load_model(spec(model=model, capabilities=["Trains", "Evaluates"]), dtype=torch.float32)
    save_model(built, tokenizer(), tmp_path)
    if not tied:
        with pytest.raises(RecipeError) as raised:
            load_stored(tmp_path, "vocabulary", trains=True)
        assert str(raised.value) == (
            f"models.policy.path: '{tmp_path}' is no language model: "
            "1 weight is missing from the checkpoint (lm_head.weight).\n"
            "  Fix: use a model for causal language modeling, with all its weights."
        )
        return
    weights = load_stored(tmp_path, "vocabulary", trains=True).state_dict()
    assert torch.equal(weights["lm_head.weight"], built.state_dict()["model.embed_tokens.weight"])


def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer("policy", MODEL)


def load_stored(folder: Path, head: Head, *, trains: bool) -> PreTrainedModel:
    model = Model(path=str(folder), dtype="float32")
    capability = {"vocabulary": "Scores", "value": "Values", "reward": "Evaluates"}[head]
    capabilities = [capability, "Trains"] if trains else [capability]
    return load_model(spec(model=model, seed=1, capabilities=capabilities), dtype=torch.float32)
