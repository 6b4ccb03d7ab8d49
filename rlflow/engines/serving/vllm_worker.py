"""What rlflow adds to vLLM's workers: new weights in parts, and logprobs of the whole distribution.

vLLM reloads a layer when all of its weights are there, so that what it packs for speed is packed anew, and then writes
the result where the old one lies.
"""

from collections.abc import Sequence
from typing import Any

from rlflow.engines.serving.files import SharedFile
from rlflow.errors import first_line


class WorkerExtension:
    """Becomes a base of vLLM's worker class; its methods are called on every rank."""

    model_runner: Any
    vllm_config: Any
    _rlflow_missing: set[str]

    def score_whole_distribution(self) -> None:
        """The logprobs of sampled tokens are those before top-p cut the distribution."""
        sampler = self.model_runner.sampler.topk_topp_sampler
        cut_and_draw = sampler.forward

        def forward(logits: Any, generators: Any, k: Any, p: Any) -> Any:
            import torch

            if k is None and p is None:
                return cut_and_draw(logits, generators, k, p)
            # Before the cut, which writes into the logits.
            scores = logits.log_softmax(dim=-1, dtype=torch.float32)
            return cut_and_draw(logits, generators, k, p)[0], scores

        sampler.forward = forward

    def attempt(self, method: str, *arguments: Any, **named: Any) -> tuple[Exception | None, Any]:
        """Return the error that a method of the worker raised, and what it returned.

        Where ranks raise or return an error, vLLM takes the first answer and leaves the others to the next call.
        """
        try:
            return None, getattr(self, method)(*arguments, **named)
        except Exception as error:  # whatever it is, it is raised where the answers are
            alone = self.vllm_config.parallel_config.world_size == 1
            return (error if alone else RuntimeError(first_line(error))), None

    def begin_copy(self) -> None:
        """What a copy that failed has left is put away first."""
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

    def take_weights(self, weights: Any) -> None:
        """All or some of them, in the form of the model's files. vLLM keeps each until its layer is whole."""
        given = weights.tensors() if isinstance(weights, SharedFile) else weights
        with self._rlflow_config():
            loaded = self.model_runner.get_model().load_weights(given)
        # Some models do not tell.
        self._rlflow_missing = set() if loaded is None else self._rlflow_missing - set(loaded)

    def finish_copy(self) -> Sequence[str]:
        """The names of vLLM's parameters for which nothing came."""
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        with self._rlflow_config():
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)
        return sorted(self._rlflow_missing)

    def _rlflow_config(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)
