"""Routing replay: how far the logprobs of vLLM and of the trained model are apart, with and without it."""

import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers

from benchmarks.parallel.cases import SPARSE, VOCABULARY, save_model, spec_of
from rlflow.batch import Packed, Prompts, Rollouts
from rlflow.engines.base import EngineSpec, Sampling
from rlflow.engines.torch import TorchEngine
from rlflow.resources.layout import Layout

_PROMPTS, _TOKENS = 64, 40


def differences(folder: Path) -> dict[str, float]:
    """Return percentile 99 of the difference of logprobs: in bfloat16 with replay and without, and in float32."""
    # vLLM has no attention kernel for smaller heads on CPUs.
    config = transformers.Qwen3MoeConfig(**SPARSE, head_dim=32, num_experts=8, norm_topk_prob=True)
    save_model(folder / "sampled", config)
    percentiles = {}
    for dtype in ("bfloat16", "float32"):
        spec = replace(spec_of(folder / "sampled", Layout(micro_batch_tokens=4096), dtype), routing_replay=True)
        # vLLM binds threads and environment of its process, and ends with it.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            rollouts = pool.apply(_sample, (spec,))
        trained = TorchEngine(spec)
        for name, of in (("with", rollouts), ("without", replace(rollouts, routing=None))):
            scored = trained.logprobs(of, 1.0).values.values
            percentiles[f"{dtype} {name}"] = float(np.quantile(np.abs(scored - rollouts.logprobs.values), 0.99))
    return percentiles


def _sample(spec: EngineSpec) -> Rollouts:
    from rlflow.engines.vllm import VllmEngine

    torch.set_num_threads(1)
    draw = np.random.default_rng(0)
    ids = Packed.from_rows([draw.integers(1, VOCABULARY, draw.integers(4, 20)) for _ in range(_PROMPTS)], np.int32)
    keys = np.array([[0, prompt, 0] for prompt in range(_PROMPTS)], np.int64)
    engine = VllmEngine(replace(spec, role="rollout", max_model_len=128, max_num_seqs=16))
    return engine.generate(Prompts(keys=keys, ids=ids, rows=({},) * _PROMPTS), Sampling(max_tokens=_TOKENS))
