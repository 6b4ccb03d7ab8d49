"""New weights for vLLM, without vLLM."""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from rlflow.engines.serving.settings import (
    load_config,
    model_files,
)
from rlflow.engines.serving.weights import (
    ExpectedWeights,
    SharedFile,
    write_shared_files,
)
from rlflow.errors import EngineError
from tests.helpers import ARCHITECTURE, MODEL, spec


class TestSharedFiles:
    def test_what_went_in_comes_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlflow.engines.serving.weights._FILE_BYTES", 300)
        given = [
            ("a", torch.arange(6.0).view(2, 3)),
            ("b", torch.arange(5).to(torch.bfloat16)),
            ("large", torch.arange(200.0)),
            ("scalar", torch.tensor(3.0)),
            ("transposed", torch.arange(6.0).view(2, 3).T),
        ]
        paths: list[str] = []
        found: list[tuple[str, torch.Tensor]] = []
        for file in write_shared_files(iter(given)):
            assert isinstance(file, SharedFile)
            assert os.path.exists(file.path)
            paths.append(file.path)
            found += file.tensors()
        assert len(paths) == 3
        assert not any(map(os.path.exists, paths))
        assert [name for name, _ in found] == [name for name, _ in given]
        for (_, tensor), (_, same) in zip(given, found, strict=True):
            assert tensor.dtype == same.dtype
            assert torch.equal(tensor, same)

    def test_a_stream_that_breaks_off_leaves_no_file(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlflow.engines.serving.weights._FILE_BYTES", 8)

        def stream() -> Iterator[tuple[str, torch.Tensor]]:
            yield "a", torch.zeros(4)
            yield "b", torch.zeros(4)
            raise OSError("gone")

        files = write_shared_files(stream())
        path = next(files).path
        with pytest.raises(OSError, match="gone"):
            next(files)
        assert not os.path.exists(path)


class TestExpectedWeights:
    @pytest.mark.parametrize("tied", [False, True])
    def test_weights_are_held_against_the_model(self, tied: bool) -> None:
        model = replace(MODEL, architecture=replace(ARCHITECTURE, tie_word_embeddings=tied))
        with model_files(spec(model=model)) as folder:
            expected = ExpectedWeights.of(load_config("policy", folder), spec())
        weights = {name: torch.zeros(shape) for name, shape in expected.shapes.items()}
        assert dict(expected.check("rollout", weights.items())).keys() == weights.keys()
        head = weights.pop("lm_head.weight")
        if tied:
            assert len(list(expected.check("rollout", weights.items()))) == len(weights)
        else:
            with pytest.raises(EngineError, match=r"role rollout: the weights lack 'lm_head\.weight'"):
                list(expected.check("rollout", weights.items()))
        for wrong in ({"lm_head.weight": head[:1]}, {"another": head}):
            with pytest.raises(EngineError, match=f"the weight '{next(iter(wrong))}' does not fit the model"):
                list(expected.check("rollout", (weights | wrong).items()))
