"""Images in rows: their forms, their checks, and how they reach the batches of a step."""

import struct
import zlib
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

from rlflow.batch import Image, images_of
from rlflow.data.encoding import Reader
from rlflow.data.loading import describe_rows, load_rows
from rlflow.data.source import DataSource, open_training_data
from rlflow.engines.causal_lm.pretrained import load_tokenizer
from rlflow.errors import EngineError, RecipeError
from tests.helpers import MODEL
from tests.unit.data.test_source import data, write

TOKENIZER = load_tokenizer("policy", MODEL)
TOKENIZER.add_special_tokens({"additional_special_tokens": ["[picture]", "[film]"]})
PICTURE, FILM = TOKENIZER.convert_tokens_to_ids(["[picture]", "[film]"])
FEATURE = 7
TEXTS = "{% for m in messages %}{{ m['content'] }}+{% endfor %}"
PARTS = (
    "{% for m in messages %}{% for p in m['content'] %}"
    "{{ '[picture]' if p['type'] == 'image' else p['text'] }}{% endfor %}+{% endfor %}"
)


def vision() -> Any:
    """Return a family whose images have a token for each column and row."""
    return SimpleNamespace(
        placeholder="[picture]",
        placeholder_id=PICTURE,
        media_ids=frozenset({PICTURE, FILM}),
        image_ids=lambda width, height: np.full(width + height, FEATURE, np.int32),
        tokenizer=TOKENIZER,
    )


def encoded(width: int = 2, height: int = 1, kind: str = "PNG", **options: Any) -> bytes:
    buffer = BytesIO()
    PIL.Image.new("RGB", (width, height), (10, 200, 30)).save(buffer, kind, **options)
    return buffer.getvalue()


def opened(folder: Path, rows: list[dict[str, Any]], template: str | None = None, **fields: Any) -> DataSource:
    tokenizer, edge = load_tokenizer("policy", MODEL), fields.pop("edge", "prompts")
    sees_images = fields.pop("sees_images", True)
    tokenizer.add_special_tokens({"additional_special_tokens": ["[picture]", "[film]"]})
    tokenizer.chat_template = template
    options = data(write(folder / "rows.jsonl", rows), **{"batch_size": len(rows), "max_prompt_tokens": 32, **fields})
    reader = Reader(load_vision=vision if sees_images else None)
    loaded = load_rows(options, "split", sees_images=sees_images)
    return open_training_data(options, tokenizer, loaded, 0, edge=edge, reader=reader)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(encoded(2, 1))
    (tmp_path / "b.jpg").write_bytes(encoded(1, 3, "JPEG"))
    return tmp_path


@pytest.mark.parametrize("column", ["image", "images"])
def test_a_model_that_reads_text_alone_ignores_images(tmp_path: Path, column: str) -> None:
    """It needs neither pillow nor images that can be read, and a text may be something else."""
    for value, stays in (({"bytes": "no image"}, False), (["python:3.12"], True)):
        source = opened(tmp_path, [{"prompt": "1+1=", column: value, "answer": "2"}], sees_images=False)
        assert source.images is None
        assert (column in source.rows[0]) == stays
        assert source.rows[0]["answer"] == "2"
        warned = any(f"has images in '{column}', and the model reads text" in text for text in source.warnings)
        assert warned != stays
    with pytest.raises(RecipeError, match=r"row 0 of .* has <image> in its prompt, and the model reads text alone"):
        opened(tmp_path, [{"prompt": "<image>1+1=", column: "a.png"}], sees_images=False)
    with pytest.raises(RecipeError, match="names images, and the model reads text alone"):
        opened(tmp_path, [{"prompt": "1+1=", "photo": "a.png"}], columns={column: "photo"}, sees_images=False)


def prompt_of(source: DataSource, row: int = 0) -> str:
    """Return the text of a prompt, with ``.`` for each token of an image."""
    ids = source.prompt_ids[row].tolist()
    assert source.tokenizer is not None
    return "".join("." if token == FEATURE else source.tokenizer.decode([token]) for token in ids)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize("template", [None, TEXTS, PARTS])
@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"image": "a.png", "prompt": "1+1"}, "...1+1"),
        ({"images": ["a.png"], "prompt": "1+1"}, "...1+1"),
        ({"images": [{"bytes": None, "path": "a.png"}], "prompt": "1+1"}, "...1+1"),
        ({"images": ["a.png", "b.jpg"], "prompt": "1<image>+<image>1"}, "1...+....1"),
        ({"images": ["a.png", "b.jpg"], "prompt": "2+2"}, ".......2+2"),
    ],
)
def test_forms_of_images(row: dict[str, Any], expected: str, template: str | None, folder: Path) -> None:
    assert prompt_of(opened(folder, [row], template)) == expected + ("+" if template else "")


@pytest.mark.parametrize("template", [TEXTS, PARTS])
@pytest.mark.parametrize(
    "content",
    ["1+<image>1", [{"type": "text", "text": "1+"}, {"type": "image", "text": None}, {"type": "text", "text": "1"}]],
)
def test_messages_with_images(content: Any, template: str, folder: Path) -> None:
    assert prompt_of(opened(folder, [{"images": ["a.png"], "prompt": user(content)}], template)) == "1+...1+"


def test_a_step_has_its_images_and_rows_have_none(folder: Path) -> None:
    files = [(folder / name).read_bytes() for name in ("a.png", "b.jpg")]
    rows = [
        {"images": ["a.png", "b.jpg"], "prompt": "1", "answer": "1"},
        {"images": [], "prompt": "2", "answer": "2"},
    ]
    source = opened(folder, rows)
    prompts = source.prompts(0)
    order = [int(row["answer"]) - 1 for row in prompts.rows]
    assert prompts.images is not None
    shown = [images_of(prompts.images, row) for row in range(2)]
    assert [shown[order.index(0)], shown[order.index(1)]] == [(Image(files[0], 2, 1), Image(files[1], 1, 3)), ()]
    assert all(row.keys() == {"prompt", "answer"} for row in prompts.rows)
    (folder / "b.jpg").write_bytes(encoded(1, 3, "JPEG", quality=20))
    with pytest.raises(EngineError, match="has changed since the run started"):
        source.prompts(0)


def test_examples_and_pairs_have_images(folder: Path) -> None:
    row = {"images": ["a.png"], "prompt": "1", "response": "2", "chosen": "3", "rejected": "4"}
    examples = opened(folder, [row], edge="examples").examples(0)
    assert examples.images is not None
    assert len(images_of(examples.images, 0)) == 1
    pairs = opened(folder, [row], edge="pairs").pairs(0)
    assert pairs.images is not None
    assert images_of(pairs.images, 0) == images_of(pairs.images, 1) == images_of(examples.images, 0)


def test_people_see_the_sizes_of_images_and_small_pictures(folder: Path) -> None:
    (folder / "large.png").write_bytes(encoded(400, 100))
    row = {"images": ["a.png", "large.png"], "prompt": "1<image>2<image>3", "response": "4"}
    source = opened(folder, [row], edge="examples", max_prompt_tokens=1000)
    examples = source.examples(0)
    [(prompt, _)] = source.texts(examples)
    assert prompt == "1[image 2x1]2[image 400x100]3"
    [(small, large)] = source.thumbnails(examples)
    assert [(image.width, image.height) for image in (small, large)] == [(2, 1), (400, 100)]
    assert PIL.Image.open(BytesIO(large.encoded)).size == (96, 24)


def test_rows_are_described_by_their_images(folder: Path) -> None:
    options = data(write(folder / "rows.jsonl", [{"image": "a.png", "prompt": "1"}]), batch_size=1, max_prompt_tokens=9)
    before = describe_rows(load_rows(options, "split"))
    (folder / "a.png").write_bytes(encoded(2, 2))
    assert describe_rows(load_rows(options, "split")) != before


def test_a_folder_of_images_needs_the_name_of_its_file(folder: Path) -> None:
    write(folder / "rows.jsonl", [{"image": "a.png", "prompt": "1"}])
    for number in range(3):
        (folder / f"{number}.png").write_bytes(encoded())
    with pytest.raises(RecipeError, match=r"holds data of the kind 'imagefolder'[^$]*name the file with the rows"):
        load_rows(data(folder), "split")


def test_a_turned_photograph_has_the_size_in_which_it_is_shown(folder: Path) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = 6
    for name, kind in (("c.jpg", "JPEG"), ("c.png", "PNG"), ("c.webp", "WEBP")):
        (folder / name).write_bytes(encoded(4, 1, kind, exif=exif))
        prompts = opened(folder, [{"image": name, "prompt": "1"}]).prompts(0)
        assert prompts.images is not None
        (image,) = images_of(prompts.images, 0)
        assert (image.width, image.height) == (1, 4) == image.picture().size


def bomb() -> bytes:
    """Return a PNG of 60 bytes whose header claims ten billion pixels."""
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    packed = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(packed)


@pytest.mark.parametrize(
    ("changes", "fact", "fix"),
    [
        ({"images": ["bomb.png"]}, "an image of more than 67108864 pixels", "scale it down"),
        ({"images": ["cut.png"]}, "an image that is cut off (PNG", "copy or download it again"),
        ({"images": ["cut.jpg"]}, "an image that is cut off (JPEG", "copy or download it again"),
        ({"images": ["https://host/a.png"]}, "names an image by its address", "download it"),
        ({"images": ["data:image/png;base64,AAAA"]}, "names an image by its address", "download it"),
        ({"images": ["c.svg"]}, "an image that cannot be read", "PNG, JPEG, WEBP, GIF"),
        ({"images": ["../a.png"]}, "outside of the data set's folder", "copy it into"),
        ({"images": ["/etc/hostname"]}, "outside of the data set's folder", "copy it into"),
        ({"images": ["link.png"]}, "outside of the data set's folder", "copy it into"),
        ({"images": ["missing.png"]}, "'missing.png', which cannot be read", "correct the path"),
        ({"images": [3]}, "neither bytes nor a path (int)", "save it as a file"),
        ({"images": ["a.png"] * 9}, "has 9 images, more than 8", "data.image.max_per_prompt=9"),
        ({"prompt": "<image>1<image>"}, "has 2 <image> in its prompt and 1 images", "write one <image>"),
        ({"images": [], "prompt": "<image>1"}, "has 1 <image> in its prompt and 0 images", "write one <image>"),
        ({"prompt": "1[picture]"}, "stands for images or videos ([picture])", "remove it from the text"),
        ({"prompt": "1[film]"}, "stands for images or videos ([picture], [film])", "remove it from the text"),
        ({"images": [], "prompt": "1[picture]"}, "stands for images or videos ([picture])", "remove it from the text"),
        ({"response": "[picture]"}, "has '[picture]' in its 'response'", "remove the row"),
    ],
)
def test_hostile_rows_are_refused(changes: dict[str, Any], fact: str, fix: str, folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    files = {
        "a.png": encoded(),
        "bomb.png": bomb(),
        "cut.png": encoded(64, 64)[:-20],
        "cut.jpg": encoded(64, 64, "JPEG")[:-20],
        "c.svg": b"<svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>",
    }
    for name, content in files.items():
        (inside / name).write_bytes(content)
    (inside / "link.png").symlink_to(folder / "a.png")
    row = {"images": ["a.png"], "prompt": "1", "response": "1"}
    with pytest.raises(RecipeError) as raised:
        opened(inside, [row, {**row, **changes}], edge="examples")
    assert raised.value.path == "data.source"
    assert raised.value.fact.startswith("row 1 of ")
    assert fact in raised.value.fact
    assert fix in str(raised.value.notes["Fix"])


@pytest.mark.parametrize(
    ("part", "fact"),
    [({"type": "video"}, "a part of the type 'video'"), ({"type": "image", "image": "a.png"}, "an image inside")],
)
def test_parts_that_are_refused(part: dict[str, Any], fact: str, folder: Path) -> None:
    with pytest.raises(RecipeError) as raised:
        opened(folder, [{"images": ["a.png"], "prompt": user([part])}], TEXTS)
    assert fact in raised.value.fact


def test_a_template_that_shows_no_images_is_refused(folder: Path) -> None:
    with pytest.raises(RecipeError, match="has 1 images, of which the chat template shows 0"):
        opened(folder, [{"images": ["a.png"], "prompt": "1"}], "{{ messages | length }}")


def test_images_cannot_be_shortened(folder: Path) -> None:
    with pytest.raises(RecipeError, match="has images, which cannot be shortened"):
        opened(folder, [{"image": "a.png", "prompt": "1"}], overlong="truncate_left")


def test_a_column_without_any_image_is_no_column_of_images(folder: Path) -> None:
    prompts = opened(folder, [{"image": None, "prompt": "1"}, {"image": None, "prompt": "2"}]).prompts(0)
    assert prompts.images is None
