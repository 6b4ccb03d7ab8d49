"""Images of samples: small pictures in the run's folder, and on its page."""

import json
from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import PIL.Image

from rlflow.batch import Image, Thumbnail
from rlflow.data.digits import digits
from rlflow.report.records import SampleLog
from rlflow.report.run_figures import RunFiles
from tests.unit.report.test_run_figures import write_plan
from tests.unit.report.test_tracker import PLAN, SAMPLE


def thumbnail() -> Thumbnail:
    return Image(digits("test")[0]["images"][0], 16, 16).thumbnail()


def test_samples_have_digests_and_small_pictures(tmp_path: Path) -> None:
    write_plan(tmp_path)
    image, log = thumbnail(), SampleLog()
    log.started(PLAN, tmp_path, 0)
    log.sampled([SAMPLE, replace(SAMPLE, choice="worst", images=(image, image))])
    first, second = map(json.loads, (tmp_path / "samples.jsonl").read_text().splitlines())
    assert "images" not in first
    assert second["images"] == [{"digest": image.digest, "width": 16, "height": 16}] * 2
    assert (tmp_path / "images" / f"{image.digest}.jpg").read_bytes() == image.encoded
    figures = RunFiles(tmp_path).figures()
    assert [len(sample["images"]) for sample in figures["samples"]] == [0, 2]
    assert figures["thumbnails"].keys() == {image.digest}
    shown = b64decode(figures["thumbnails"][image.digest].removeprefix("data:image/jpeg;base64,"))
    assert PIL.Image.open(BytesIO(shown)).size == (16, 16)


def test_a_page_shows_at_most_200_pictures_and_none_from_elsewhere(tmp_path: Path) -> None:
    write_plan(tmp_path)
    log, image = SampleLog(), thumbnail()
    log.started(PLAN, tmp_path, 0)
    images = [replace(image, digest=f"{number:032x}") for number in range(210)]
    log.sampled([replace(SAMPLE, images=(each,)) for each in images])
    (tmp_path / "secret.jpg").write_bytes(b"secret")
    with (tmp_path / "samples.jsonl").open("a") as file:
        other = {"digest": "../secret", "width": 1, "height": 1}
        file.write(json.dumps({**SAMPLE.to_dict(), "images": [other]}) + "\n")
    assert list(RunFiles(tmp_path).figures()["thumbnails"]) == [each.digest for each in reversed(images)][:200]
