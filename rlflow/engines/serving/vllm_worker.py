"""An extension of vLLM's workers: new weights in parts, and logprobs of the whole distribution.

vLLM reloads a layer once all of its weights have arrived: it repacks them for its kernels, and writes the result where
the old weights are.
"""

from collections.abc import Sequence
from typing import Any

from rlflow.engines.serving.weights import SharedFile
from rlflow.errors import first_line


class WorkerExtension:
    """A base class that vLLM adds to its worker class; its methods are called on every rank."""

    model_runner: Any
    vllm_config: Any
    _rlflow_missing: set[str]

    def score_whole_distribution(self) -> None:
        """Make the logprobs of sampled tokens those before top-p cuts the distribution."""
        sampler = self.model_runner.sampler.topk_topp_sampler
        cut_and_sample = sampler.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
            import torch

            if k is None and p is None:
                return cut_and_sample(logits, generators, k, p)
            # Scores come first, because the cut overwrites the logits.
            scores = logits.log_softmax(dim=-1, dtype=torch.float32)
            return cut_and_sample(logits, generators, k, p)[0], scores

        sampler.forward = forward

    def attempt(self, method: str, *arguments: Any, **named: Any) -> tuple[Exception | None, Any]:
        """Call a method of the worker; return the error that it raised, and its result.

        If ranks raised errors themselves, vLLM would take the first answer and leave the others to the next call.
        """
        try:
            return None, getattr(self, method)(*arguments, **named)
        except Exception as error:  # raised again where the answers of all ranks are read
            is_alone = self.vllm_config.parallel_config.world_size == 1
            return (error if is_alone else RuntimeError(first_line(error))), None

    def begin_reload(self) -> None:
        """Prepare for new weights, and clean up what a failed weight sync has left."""
        from vllm.model_executor.model_loader.reload import layerwise

        model = self.model_runner.get_model()
        for layer in model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load():
                if info.kernel_tensors is not None:
                    layerwise._place_kernel_tensors(layer, info)
                info.reset()
        self._rlflow_missing = {name for name, _ in model.named_parameters()}
        with self._rlflow_config():
            layerwise.initialize_layerwise_reload(model)

    def reload_weights_part(self, weights: Any) -> None:
        """Load some of the weights, named as in the model's files. vLLM keeps each one until its layer is complete."""
        tensors = weights.tensors() if isinstance(weights, SharedFile) else weights
        with self._rlflow_config():
            loaded = self.model_runner.get_model().load_weights(tensors)
        # Some models do not report which weights they loaded.
        self._rlflow_missing = set() if loaded is None else self._rlflow_missing - set(loaded)

    def finish_reload(self) -> Sequence[str]:
        """Finish the reload, and return the names of vLLM's parameters that got no new values."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        with self._rlflow_config():
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
        return sorted(self._rlflow_missing)

    def _rlflow_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)
