"""docs/getting-started.md and the docstring of rlflow.run keep their promises."""

import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import rlflow
from tests.conftest import ROOT, Typed
from tests.e2e.test_readme import TYPED, own_recipe

PAGE = (ROOT / "docs" / "getting-started.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
COMMANDS = [
    line.replace("\\\n", "")
    for block in re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    for line in re.findall(r"^rlflow (?:.*\\\n)*.*", block, flags=re.MULTILINE)
]


def write_files_of_the_page(folder: Path) -> None:
    """Write the files that the page asks for, among them the README's recipe."""
    own_recipe(folder)
    with (folder / "my_rewards.py").open("a") as rewards:
        rewards.write(f"\n\n{CODE[0]}")


def example() -> str:
    """Return the page's code, followed by the docstring's, with fewer steps."""
    _, page = CODE
    docstring = textwrap.dedent(str(rlflow.run.__doc__).partition("Example:\n")[2])
    return re.sub(r"\bsteps=\d+", "steps=3", f"import os\nos.umask(0o027)\n{page}\n{docstring}")


@pytest.mark.slow
def test_the_examples_run_and_say_nothing_that_is_not_theirs(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", example()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "accelerator" not in done.stdout, "DeepSpeed's, which transformers imports to save a model"
    weights = list(tmp_path.glob("outputs/*/*/model/actor/model.safetensors"))
    assert len(weights) == 2
    assert {path.stat().st_mode & 0o777 for path in weights} == {0o640}, "those that the umask leaves"
    assert [line.split()[0] for line in done.stdout.splitlines() if "finished" in line] == ["beginner_tiny"] * 2


def test_the_reward_counts_digits() -> None:
    names: dict[str, Any] = {}
    exec(CODE[0], names)
    assert names["digits_right"](["12", "13", ""], [{"answer": "12"}] * 3) == [1.0, 0.5, 0.0]


def test_every_command_is_found() -> None:
    assert len(COMMANDS) == len(re.findall(r"^rlflow ", PAGE, flags=re.MULTILINE))


@pytest.mark.slow
@pytest.mark.parametrize("command", [command for command in COMMANDS if f"{command} dry_run=true" not in TYPED])
def test_every_command_has_a_plan(command: str, typed: Typed, tmp_path: Path) -> None:
    write_files_of_the_page(tmp_path)
    code, out, errors = typed(*shlex.split(command)[1:], *([] if "dry_run=true" in command else ["dry_run=true"]))
    assert (code, errors) == (0, "")
    assert "fingerprint" in out


def save_small_model(folder: Path) -> None:
    """Save a model of random weights that reads bytes and has a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytewise = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<end>")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **sizes, **heads)
    Qwen2ForCausalLM(config).save_pretrained(folder)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_reader_who_types_every_command_reaches_the_end(tmp_path: Path) -> None:
    """A small model replaces that on the hub, because tests download nothing."""
    write_files_of_the_page(tmp_path)
    save_small_model(tmp_path / "small")
    small = ["models.policy.path=small", "models.policy.architecture=null", "models.policy.architecture_of=null"]
    for command in COMMANDS:
        arguments = ["-m", *shlex.split(command), *(small if "cluster=local" in command else [])]
        done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
    reports = [json.loads(path.read_text()) for path in tmp_path.glob("outputs/*/*/report.json")]
    trained = [command for command in COMMANDS if "dry_run=true" not in command]
    assert sorted(report["steps"] for report in reports) == sorted(
        int(re.findall(r"\bsteps=(\d+)", command)[0]) for command in trained
    )
