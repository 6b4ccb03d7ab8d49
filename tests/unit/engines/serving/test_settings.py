"""The settings that vLLM starts with, without vLLM."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.serving.settings import (
    check_model,
    engine_arguments,
    load_config,
    load_end_ids,
    model_files,
    set_environment,
)
from rlflow.engines.serving.weights import (
    ExpectedWeights,
)
from rlflow.errors import RecipeError
from rlflow.resources.layout import Layout
from rlflow.resources.models.lora import Lora
from tests.helpers import ARCHITECTURE, CHARACTERS, MODEL, spec


class TestModelFiles:
    def test_a_new_model_is_the_one_of_the_other_engines(self) -> None:
        with model_files(spec(seed=3)) as folder:
            config = load_config("policy", folder)
            again = replace(MODEL, path=folder, random_weights=False)
            read = load_model(spec(model=again), dtype=torch.float32).state_dict()
            assert load_end_ids(folder, config) == 0
        assert not Path(folder).exists()
        new = load_model(spec(model=MODEL, seed=3), dtype=torch.float32).state_dict()
        assert new.keys() == read.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in new.items())

    def test_a_folder_without_a_model(self, tmp_path: Path) -> None:
        with pytest.raises(RecipeError, match=r"models\.policy\.path: .*cannot be loaded"):
            load_config("policy", str(tmp_path))


def config(**values: Any) -> SimpleNamespace:
    usual = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 2}
    text = SimpleNamespace(**(usual | {"hidden_size": 512, "max_position_embeddings": 4096} | values))
    text.model_type, text.get_text_config = "qwen3", lambda: text
    return text


class TestSettings:
    def test_a_head_that_no_kernel_takes(self) -> None:
        with pytest.raises(
            RecipeError, match=r"models\.policy: vLLM on the CPU has no attention kernel for head_dim 8\."
        ):
            check_model(spec(), config(head_dim=8))
        check_model(replace(spec(), device="cuda:0"), config(head_dim=8))
        check_model(spec(), config(head_dim=None))

    def test_heads_that_cannot_be_shared_out(self) -> None:
        three = replace(spec("rollout"), layout=Layout(micro_batch_tokens=1, tensor_parallel_size=3))
        with pytest.raises(RecipeError, match=r"roles\.rollout\.tensor_parallel_size: 3 does not divide the 8"):
            check_model(three, config())

    def test_on_the_cpu_the_cache_holds_all_concurrent_sequences(self) -> None:
        given = engine_arguments(replace(spec(), max_num_seqs=8, max_model_len=100), "folder", config())
        blocks = (8 + 1) * (4 + 1)
        assert given["kv_cache_memory_bytes"] == blocks * 32 * 2 * 2 * 4 * 64 * 4
        assert (given["max_model_len"], given["max_num_seqs"]) == (100, 8)
        assert given["enforce_eager"]
        assert given["distributed_executor_backend"] == "uni"

    def test_only_layers_with_adapters_have_room_for_them(self) -> None:
        given = replace(spec(), lora=Lora(rank=4, target_modules=("v_proj", "q_proj")))
        with model_files(given) as folder:
            adapted = ExpectedWeights.of(load_config("policy", folder), given).adapted_layers
        arguments = engine_arguments(given, "folder", config(), adapted)
        assert (arguments["lora_target_modules"], arguments["max_lora_rank"]) == (["q_proj", "v_proj"], 8)

    def test_on_gpus_it_is_as_planned(self) -> None:
        layout = Layout(micro_batch_tokens=1, tensor_parallel_size=2, gpu_memory_utilization=0.6, sleeps=True)
        given = engine_arguments(
            replace(spec(), device="cuda:0", layout=layout, max_model_len=None), "folder", config()
        )
        assert (given["tensor_parallel_size"], given["distributed_executor_backend"]) == (2, "mp")
        assert (given["gpu_memory_utilization"], given["enable_sleep_mode"]) == (0.6, True)
        assert given["max_model_len"] == 4096
        assert given["max_num_batched_tokens"] == 8192
        assert "kv_cache_memory_bytes" not in given

    @pytest.mark.parametrize("eager", [True, False])
    def test_graphs_are_as_planned(self, eager: bool) -> None:
        layout = Layout(micro_batch_tokens=1, eager=eager)
        given = engine_arguments(replace(spec(), device="cuda:0", layout=layout), "folder", config())
        assert given["enforce_eager"] == eager

    @pytest.mark.parametrize("sequences", [513, 640, 1000])
    def test_graphs_reach_the_planned_number_of_sequences(self, sequences: int) -> None:
        """vLLM's own sizes end at 512."""
        given = engine_arguments(replace(spec(), device="cuda:0", max_num_seqs=sequences), "folder", config())
        sizes = given["cudagraph_capture_sizes"]
        assert (sizes[0], sizes[-1]) == (1, sequences)
        assert sizes == sorted(set(sizes))
        # No batch is padded by more than vLLM pads small ones.
        assert max(np.diff(sizes[3:])) <= 32
        assert len(sizes) <= 70
        few = engine_arguments(replace(spec(), device="cuda:0", max_num_seqs=512), "folder", config())
        assert "cudagraph_capture_sizes" not in few

    def test_seeds_are_drawn_from_in_one_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second model runner does so on GPUs, and rlflow's own sampler with the first one on CPUs."""
        monkeypatch.setattr(os, "environ", environment := dict[str, str]())
        for device, runner in (("cpu", "0"), ("cuda:0", "1")):
            set_environment(replace(spec(), device=device))
            assert environment["VLLM_USE_V2_MODEL_RUNNER"] == runner

    def test_ranks_have_cores_of_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "environ", environment := dict[str, str]())
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {4, 5, 6, 7, 9})
        set_environment(replace(spec(), layout=Layout(micro_batch_tokens=1, tensor_parallel_size=2)))
        assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
        with pytest.raises(RecipeError, match="needs a core for each of 2 ranks, but there are 1 cores"):
            set_environment(replace(spec(), layout=Layout(micro_batch_tokens=1, tensor_parallel_size=2)))


def test_the_model_of_these_tests_has_heads_that_vllm_takes() -> None:
    assert ARCHITECTURE.head_dim == 32
    assert len(CHARACTERS) + 1 == ARCHITECTURE.vocab_size
