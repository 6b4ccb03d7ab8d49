"""rlflow's changes to vLLM's sampler on GPUs, without vLLM."""

from typing import Any

import pytest
import torch

from rlflow.engines.serving.vllm_worker import _sample_on_gpu


@pytest.mark.parametrize("top_p", [None, torch.tensor([0.5])])
def test_logprobs_on_gpus_are_those_before_the_cut(top_p: Any) -> None:
    """The second model runner computes them from the logits that its sampler returns."""

    def sample(logits: Any, rows: Any, requests: Any, positions: Any, k: Any, p: Any, fused: Any) -> Any:
        assert (rows, requests, positions, k, fused) == ("rows", "requests", "positions", None, False)
        if p is not None:
            logits[0, 0] = float("-inf")
        return torch.tensor([2]), logits

    logits = torch.tensor([[0.0, 1.0, 2.0]])
    tokens, scored = _sample_on_gpu(sample, [], logits, "rows", "requests", "positions", None, top_p, False)
    assert tokens.tolist() == [2]
    assert scored.tolist() == [[0.0, 1.0, 2.0]]
