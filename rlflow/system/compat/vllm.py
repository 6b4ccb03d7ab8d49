"""Private names of vLLM's scheduler, executor, sampler, kernels, routers and reloading of weights."""

from collections.abc import Callable
from functools import partial
from typing import Any


def count_preemptions(scheduler: Any, count: Callable[[], None]) -> None:
    """Call ``count`` whenever the scheduler preempts a request. vLLM counts them only for its own metrics."""
    preempt = scheduler._preempt_request

    def count_and_preempt(*arguments: Any, **named: Any) -> Any:
        count()
        return preempt(*arguments, **named)

    scheduler._preempt_request = count_and_preempt


def kernels_are_loaded() -> bool:
    """Return whether vLLM's compiled kernels load with the installed torch; vLLM itself only warns."""
    import torch
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "rms_norm")


def wait_for_ranks(arguments: dict[str, Any]) -> None:
    """Start this host's ranks of an engine over several hosts, and return when one has ended.

    ``arguments``: those of EngineArgs. vLLM itself does so in ``vllm serve --headless`` alone.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def prepare_stage(runner: Any) -> None:
    """Give a pipeline stage the memory of its inputs, which vLLM forgets on CPUs without compilation."""
    from vllm.distributed import get_pp_group

    if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def draw_tokens(logits: Any, keys: Any) -> Any:
    """Return a random token for each row of logits, on a CPU; the random numbers follow from a key for each row."""
    import torch

    return torch.ops._C.fused_gumbel_argmax(logits, keys)


def cut_logits(logits: Any, k: Any, p: Any) -> Any:
    """Return logits of the likeliest tokens alone, by top-k and top-p. It may overwrite them."""
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    return apply_top_k_top_p(logits, k, p)


def partial_output(state: Any) -> Any:
    """Return the RequestOutput of an unfinished request, as if it had been aborted. vLLM reports none then."""
    from vllm.v1.engine import FinishReason

    return state.make_request_output([], None, FinishReason.ABORT, None)


def replace_logprobs(update: Callable[[Any, Any], None]) -> None:
    """Replace the function that adds the logprobs of new tokens to those of a request.

    vLLM's own adds ranks and texts in Python, for which it has no switch.
    """
    from vllm.v1.engine.logprobs import LogprobsProcessor

    LogprobsProcessor.update_from_output = update


def sparse_layers(model: Any) -> list[int]:
    """Return the numbers of the layers that have experts."""
    return [module.layer_id for module in _moe_runners(model)]


def capture_experts(model: Any, capture: Callable[[Any], None]) -> None:
    """Call ``capture`` with the numbers of the experts that a layer has chosen, [tokens, experts of a token].

    vLLM itself does so only in its second model runner, which needs a GPU.
    """
    for module in _moe_runners(model):
        module.router.set_capture_fn(capture)


def map_experts(model: Any) -> None:
    """Have the kernels of CPUs compute a rank's own experts, where vLLM numbers those of all ranks and ends in a crash.

    Its kernels for GPUs take the map from all experts to those of a rank.
    """
    for module in _moe_runners(model):
        method = module.routed_experts.quant_method
        method.apply = partial(_apply_own, method.apply)


def _apply_own(apply: Any, layer: Any, topk_weights: Any, topk_ids: Any, **named: Any) -> Any:
    """Call a layer's products with the numbers that its experts have on this rank; others have a weight of zero."""
    own = layer.expert_map[topk_ids]
    ids = own.clamp(min=0).to(topk_ids.dtype)
    return apply(layer=layer, topk_weights=topk_weights * (own >= 0), topk_ids=ids, **named)


def _moe_runners(model: Any) -> list[Any]:
    """Return the modules of layers with experts, which are the same in both model runners."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    return [module for module in model.modules() if isinstance(module, MoERunner)]


def image_prompt(engine: Any, ids: list[int], fields: Any, digests: list[str], places: list[Any]) -> Any:
    """Return a prompt for vLLM's engine with images that are processed already.

    ``fields`` are their pixels under the names that vLLM's model takes, ``places`` those of each image's features among
    ``ids``. vLLM would expand the prompt once more if it processed the images itself.
    """
    import torch
    from transformers import BatchFeature
    from vllm.inputs.engine import mm_input
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    inputs = BatchFeature(fields)
    items = MultiModalKwargsItems.from_hf_inputs(inputs, engine.renderer.mm_processor._get_mm_fields_config(inputs, {}))
    ranges = []
    for image in places:
        start, length = int(image[0]), int(image[-1] - image[0]) + 1
        is_embed = torch.zeros(length, dtype=torch.bool).index_fill_(0, image - start, True)
        ranges.append(PlaceholderRange(offset=start, length=length, is_embed=None if is_embed.all() else is_embed))
    return mm_input(
        prompt_token_ids=ids, mm_kwargs=items, mm_hashes={"image": digests}, mm_placeholders={"image": ranges}
    )


def wrap_random_sampling(sampler: Any, wrap: Callable[[Any], Any]) -> None:
    """Replace the function that draws tokens in the sampler of vLLM's second model runner.

    vLLM's plugins for samplers see logits alone, neither the tokens drawn nor the logits before a cut.
    """
    sampler._sample_random = wrap(sampler._sample_random)


def undo_reload(model: Any) -> None:
    """Undo what an unfinished reload of weights has left, from which vLLM itself does not recover."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()


def begin_reload(model: Any) -> None:
    """Prepare a model for new weights in parts. vLLM's public functions take all weights in one call."""
    from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

    initialize_layerwise_reload(model)


def repack_experts(model: Any) -> None:
    """Have a reload pack the weights of experts for the kernels of CPUs, which vLLM does at the start alone."""
    for module in _moe_runners(model):
        module.routed_experts.quant_method.moe_kernel = None


def finish_reload(model: Any, model_config: Any) -> None:
    """Convert the weights that have arrived for vLLM's kernels."""
    from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

    finalize_layerwise_reload(model, model_config)
