"""Prompts with images: their tokens are those that a library's own processor makes."""

from io import BytesIO
from pathlib import Path

import PIL.Image
import pytest

from rlflow.data.encoding import Reader
from rlflow.data.loading import load_rows
from rlflow.data.source import open_training_data
from rlflow.engines.vision.base import load_vision
from rlflow.recipe import Model
from tests.unit.data.test_source import data, write
from tests.vision_models import encoded_picture, model_folder

# SmolVLM's, with letters that the tiny model has. It reads only parts.
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}"
    "{% if message['content'][0]['type'] == 'image' %}{{ ':' }}{% else %}{{ ': ' }}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)


@pytest.mark.slow
def test_tokens_are_those_of_idefics3s_processor(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Idefics3Processor

    files = {"a.png": encoded_picture(100, 101), "b.png": encoded_picture(16, 16, 1)}
    for name, encoded in files.items():
        (tmp_path / name).write_bytes(encoded)
    folder = model_folder("idefics3")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    parts = [{"type": "image"}, {"type": "text", "text": "which is it"}, {"type": "image"}]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": parts}]
    options = data(
        write(tmp_path / "rows.jsonl", [{"images": list(files), "prompt": messages}]),
        **{"batch_size": 1, "max_prompt_tokens": 9999},
    )
    reader = Reader(load_vision=lambda: load_vision("policy", Model(path=str(folder)), tokenizer))
    source = open_training_data(options, tokenizer, load_rows(options, "split"), 0, reader=reader)
    assert reader.load_vision is not None
    processor = Idefics3Processor(reader.load_vision().image_processor, tokenizer, image_seq_len=16)
    as_parts = [{"role": "system", "content": [{"type": "text", "text": "be short"}]}, messages[1]]
    text = tokenizer.apply_chat_template(as_parts, tokenize=False, add_generation_prompt=True)
    pictures = [PIL.Image.open(BytesIO(encoded)) for encoded in files.values()]
    expected = processor(text=[text], images=[pictures], add_special_tokens=False)["input_ids"][0]
    assert source.prompt_ids[0].tolist() == expected
