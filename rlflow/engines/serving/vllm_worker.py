"""An extension of vLLM's workers: new weights in parts, reproducible samples, and logprobs of the whole distribution.

vLLM reloads a layer once all of its weights have arrived: it repacks them for its kernels, and writes the result where
the old weights are.
"""

import os
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rlflow.batch.routing import Routing
from rlflow.engines import times
from rlflow.engines.buckets import Bucket
from rlflow.engines.serving.routing import RoutingRecorder
from rlflow.engines.serving.weights import SharedFile
from rlflow.errors import first_line
from rlflow.resources.models.vision import Part
from rlflow.system.compat import vllm
from rlflow.system.processes import die_with_parent


class WorkerExtension:
    """A base class that vLLM adds to its worker class; its methods are called on every rank."""

    model_runner: Any
    vllm_config: Any
    rank: int
    _rlflow_missing: set[str]
    _rlflow_routing: RoutingRecorder

    def end_with_engine(self) -> None:
        """End this process with the one that started it, also while it waits for a rank that has ended."""
        if self.vllm_config.parallel_config.world_size > 1:
            die_with_parent(os.getppid())

    def prepare_sampler(self, never: Sequence[int] = ()) -> None:
        """Draw each token from its sample's seed and its position alone, and score it before top-p cuts the logits.

        A response then has the same random numbers in every batch and on every engine, also where it is resumed. Tokens
        in ``never`` are cut, too.
        """
        runner, cut = self.model_runner, list(never)
        if not self.vllm_config.use_v2_model_runner:
            runner.sampler.topk_topp_sampler.forward = partial(_sample, runner, cut)
            vllm.prepare_stage(runner)
        elif runner.sampler is not None:  # only the last pipeline stage samples
            vllm.wrap_random_sampling(runner.sampler, lambda sample: partial(_sample_on_gpu, sample, cut))

    def prepare_experts(self) -> None:
        """Compute the experts of this rank alone, on a CPU."""
        vllm.map_experts(self.model_runner.get_model())

    def prepare_routing(self, num_experts: int) -> list[int]:
        """Record the experts of tokens, where vLLM does not; return the layers that have experts."""
        if not self.vllm_config.use_v2_model_runner:
            self._rlflow_routing = RoutingRecorder(self.model_runner, num_experts)
        return vllm.sparse_layers(self.model_runner.get_model())

    def take_routing(self, names: Sequence[str]) -> list[Routing | None]:
        """Return the recorded experts of requests that end, before vLLM's next step."""
        return self._rlflow_routing.take(names)

    def attempt(self, method: str, *arguments: Any, **named: Any) -> tuple[Exception | None, Any]:
        """Call a method of the worker; return the error that it raised, and its result.

        If ranks raised errors themselves, vLLM would take the first answer and leave the others to the next call.
        """
        try:
            return None, getattr(self, method)(*arguments, **named)
        except Exception as error:  # raised again where the answers of all ranks are read
            is_alone = self.vllm_config.parallel_config.world_size == 1
            return (error if is_alone else RuntimeError(first_line(error))), None

    def start_profile(self) -> None:
        """Record the operations of this rank until ``write_profile``."""
        times.start_profile()

    def write_profile(self, folder: Path, name: str) -> None:
        """Write the recorded operations to a file, whose name ends in the rank if there are several."""
        parallel = self.vllm_config.parallel_config
        times.write_profile(folder, name if parallel.world_size == 1 else f"{name}-{self.rank}")

    def begin_reload(self, parts: Collection[Part]) -> None:
        """Prepare for new weights of these parts, and clean up what a failed weight sync has left."""
        model = self.model_runner.get_model()
        vllm.undo_reload(model)
        self._rlflow_missing = {name for name, _ in model.named_parameters() if _part_of(model, name) in parts}
        with self._rlflow_config():
            vllm.begin_reload(model)
        if not self.vllm_config.use_v2_model_runner and "language" in parts:
            vllm.repack_experts(model)

    def reload_weights_part(self, weights: Any) -> None:
        """Load some of the weights, named as in the model's files. vLLM keeps each one until its layer is complete."""
        tensors = weights.tensors() if isinstance(weights, SharedFile | Bucket) else weights
        with self._rlflow_config():
            loaded = self.model_runner.get_model().load_weights(tensors)
        # Some models do not report which weights they loaded.
        self._rlflow_missing = set() if loaded is None else self._rlflow_missing - set(loaded)

    def finish_reload(self) -> Sequence[str]:
        """Finish the reload, and return the names of vLLM's parameters that got no new values."""
        with self._rlflow_config():
            vllm.finish_reload(self.model_runner.get_model(), self.vllm_config.model_config)
        return sorted(self._rlflow_missing)

    def _rlflow_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)


def _part_of(vision_model: Any, weight: str) -> Part:
    """Return the part that a weight belongs to, by its name in vLLM's own model."""
    if not hasattr(vision_model, "get_mm_mapping"):
        return "language"
    mapping = vision_model.get_mm_mapping()
    # vLLM's projector may lie inside of the tower.
    if weight.startswith(tuple(mapping.connector)):
        return "projector"
    return "tower" if weight.startswith(tuple(mapping.tower_model)) else "language"


def _sample(runner: Any, never: list[int], logits: Any, generators: Any, k: Any, p: Any) -> tuple[Any, Any]:
    """Return tokens [B] and logprobs [B, V] from logits [B, V], on a CPU.

    vLLM draws once from the generator of each request, one after another; here generators only hold the seeds.
    """
    import torch

    # Logprobs come first, because the cut overwrites the logits.
    logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
    logits[:, never] = float("-inf")
    # Greedy requests have no generator, and vLLM replaces their tokens.
    seeds = [generators[row].initial_seed() if row in generators else 0 for row in range(len(logits))]
    positions = torch.from_numpy(runner.input_batch.num_tokens_no_spec[: len(seeds)])
    # The kernel hashes its keys, so those of neighbouring positions may be neighbours.
    keys = torch.tensor(seeds) + positions
    return vllm.draw_tokens(vllm.cut_logits(logits, k, p), keys), logprobs


def _sample_on_gpu(sample: Any, never: list[int], logits: Any, *inputs: Any) -> Any:
    """Return tokens [B] and logits [B, V], on a GPU, where vLLM's kernel draws from seeds and positions itself."""
    rows, requests, positions, k, p, fused = inputs
    # The cut may overwrite the logits.
    uncut = logits if k is None and p is None and not never else logits.clone()
    if never:
        logits[:, never] = float("-inf")
    return sample(logits, rows, requests, positions, k, p, fused)[0], uncut
