"""The vLLM engine: generates with vLLM, in a process of its own, and follows a trained role."""

from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Prompts, Repeated, Rollouts
from rlflow.batch.images import images_of
from rlflow.batch.routing import Routing, pack_routing, to_records
from rlflow.engines.base import ALL_TRANSPORTS, EngineKind, EngineSpec, Sampling, sample_seed
from rlflow.engines.causal_lm.pretrained import count_experts, load_tokenizer, merge_end_ids
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse, prepend_partial
from rlflow.engines.journal import Journal
from rlflow.engines.serving.activity import EngineActivity
from rlflow.engines.serving.batching import Batcher, Request, Response
from rlflow.engines.serving.sessions import SessionEngine
from rlflow.engines.serving.settings import (
    check_model,
    engine_arguments,
    load_config,
    load_end_ids,
    model_files,
    set_environment,
)
from rlflow.engines.serving.weights import ExpectedWeights, adapter_folder, parts_for_ranks
from rlflow.engines.vision.passes import ServedImages, create_vision
from rlflow.errors import EngineError, UserError, first_line
from rlflow.system.compat.vllm import kernels_are_loaded, replace_logprobs, wait_for_ranks

if TYPE_CHECKING:
    from torch import Tensor


P = ParamSpec("P")


def _between_requests(
    method: "Callable[Concatenate[VllmEngine, Any, P], None]",
) -> "Callable[Concatenate[VllmEngine, P], None]":
    """Call a method with vLLM's engine after the running requests have finished, in its thread; later requests wait."""

    @wraps(method)
    def call(self: "VllmEngine", /, *arguments: P.args, **named: P.kwargs) -> None:
        self._batcher.call(lambda engine: method(self, engine, *arguments, **named))

    return call


class VllmEngine(SessionEngine):
    """The engine for fast generation. It takes new samples while it generates, and batches those of all callers."""

    def __init__(self, spec: EngineSpec) -> None:
        """Start vLLM. Raises RecipeError for a model that it cannot run here, EngineError if it does not start."""
        self._spec, self.seed = spec, spec.seed
        self._weights_asleep = False
        self._num_adapter_syncs = 0
        self.journal = Journal(spec.journal, spec.role)
        set_environment(spec)
        self.tokenizer = load_tokenizer(spec.model_name, spec.model)
        with model_files(spec) as folder:
            config = load_config(spec.model_name, folder, trust_remote_code=spec.model.trust_remote_code)
            check_model(spec, config)
            self._expected = ExpectedWeights.of(config, spec)
            self._vision = create_vision(spec, config, self.tokenizer)
            self._num_experts = count_experts(config) if spec.routing_replay else 0
            self._end_ids = merge_end_ids(load_end_ids(folder, config), self.tokenizer.eos_token_id)
            arguments = engine_arguments(spec, folder, config, self._expected.adapted_layers)
            self._max_model_len: int = arguments["max_model_len"]
            try:
                self._batcher = Batcher(
                    spec.role, lambda: self._start(arguments), self._read_routing if self._num_experts else None
                )
            except UserError:
                raise
            except Exception as error:
                raise EngineError(f"role {spec.role}: vLLM does not start ({first_line(error)}).") from error
        self._max_num_seqs = spec.max_num_seqs
        self._cache_tokens = self._batcher.call(_count_cache_tokens)

    @staticmethod
    def follow(spec: EngineSpec) -> None:
        """Run the ranks of an engine on a host that is not its first. Returns when one of them has ended."""
        set_environment(spec)
        with model_files(spec) as folder:
            config = load_config(spec.model_name, folder, trust_remote_code=spec.model.trust_remote_code)
            wait_for_ranks(engine_arguments(spec, folder, config))

    def _start(self, arguments: dict[str, Any]) -> Any:
        from vllm import LLMEngine
        from vllm.engine.arg_utils import EngineArgs

        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        _on_ranks(engine, "end_with_engine")
        _on_ranks(engine, "prepare_sampler", self._never_sampled)
        if self._spec.device == "cpu" and self._spec.layout.expert_parallel_size > 1:
            _on_ranks(engine, "prepare_experts")
        replace_logprobs(_append_logprobs)
        if self._num_experts:
            self._sparse_layers: list[int] = _on_ranks(engine, "prepare_routing", self._num_experts)[0]
        return engine

    def _read_routing(self, engine: Any, outputs: Sequence[Any]) -> Sequence[Routing | None]:
        """Return the experts of requests that are at their end. All ranks have used the same."""
        if self._spec.device == "cpu":
            names = [output.request_id for output in outputs]
            routing: list[Routing | None] = _on_ranks(engine, "take_routing", names)[0] if names else []
            return routing
        experts = [output.outputs[0].routed_experts for output in outputs]
        return [None if x is None else to_records(x[:, self._sparse_layers], self._num_experts) for x in experts]

    @property
    def capacity(self) -> tuple[int, int]:
        return self._max_num_seqs, self._cache_tokens

    def set_max_num_seqs(self, number: int) -> None:
        """Limit the samples generated at the same time, from the next generation on, to at most the planned number."""
        self._max_num_seqs = min(number, self._spec.max_num_seqs)

    @property
    def decode_steps(self) -> int:
        return self._batcher.decode_steps

    def submit(
        self, samples: Prompts, sampling: Sampling, partial: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Response]]":
        longest = int(samples.ids.lengths.max(initial=0))
        if longest >= self._max_model_len:
            raise EngineError(
                f"role {self._spec.role}: a prompt of {longest} tokens leaves no room for a response"
                f" in {self._max_model_len}."
            )
        ids, served = samples.ids.take(np.arange(len(samples))), self._serve_images(samples)
        requests = [
            self._build_request(ids[row].tolist(), key, sampling, partial[row] if partial else NO_RESPONSE)
            for row, key in enumerate(samples.keys)
        ]
        return self._batcher.submit([replace(r, images=images) for r, images in zip(requests, served, strict=True)])

    def _serve_images(self, samples: Prompts) -> list[ServedImages | None]:
        """Process the images of each row, in this thread: vLLM's own goes on generating."""
        if samples.images is None:
            return [None] * len(samples)
        if self._vision is None:
            raise EngineError(f"role {self._spec.role}: the prompts have images, which this model cannot see.")
        served: list[ServedImages | None] = []
        for row in range(len(samples)):
            if row and np.array_equal(samples.images[row], samples.images[row - 1]):
                served.append(served[-1])
            else:
                images = images_of(samples.images, row)
                served.append(self._vision.serve(samples.ids[row], images) if images else None)
        return served

    @property
    def _never_sampled(self) -> list[int]:
        return [] if self._vision is None else sorted(self._vision.family.media_ids)

    def _build_request(
        self, prompt_ids: list[int], key: NDArray[np.int64], sampling: Sampling, partial: PartialResponse
    ) -> Request:
        # A token's random numbers depend on the seed and its position, so a resumed response continues with its own.
        remaining = replace(sampling, max_tokens=sampling.max_tokens - len(partial.ids))
        params = self._sampling_params(remaining, sample_seed(self._spec.seed, key))
        return Request([*prompt_ids, *partial.ids.tolist()], params, partial)

    def _sampling_params(self, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            # vLLM's seeds have 63 bits.
            seed=seed >> 1,
            stop_token_ids=[*self._end_ids, *sampling.stop_ids],
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # Greedy decoding takes no part in the cut of the sampler, and its logprobs are not trained on.
            logit_bias=dict.fromkeys(self._never_sampled, -100.0) if sampling.temperature == 0 else None,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def abort(self, futures: "Collection[Future[Response]]") -> None:
        self._batcher.abort(futures)

    def rollouts(self, samples: Prompts, responses: Sequence[Response], sampling: Sampling) -> Rollouts:
        outputs = [response.output for response in responses]
        response_ids = Packed.from_rows([output.token_ids for output in outputs], np.int32)
        logprobs = Packed.from_rows([output.logprobs.logprobs for output in outputs], np.float32)
        versions = Repeated(np.array([response.version for response in responses], np.int32), response_ids.lengths)
        before = [response.partial for response in responses]
        if any(len(partial.ids) for partial in before):
            response_ids, logprobs, versions = prepend_partial(before, response_ids, logprobs, versions)
        ids = [response_ids[row].tolist() for row in range(len(response_ids))]
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return Rollouts(
            keys=samples.keys,
            prompt_ids=samples.ids,
            response_ids=response_ids,
            logprobs=response_ids.like(logprobs.values),
            versions=versions,
            temperature=sampling.scoring_temperature,
            finished=np.array([output.finish_reason == "stop" for output in outputs], np.bool_),
            texts=tuple(texts),
            rows=samples.rows,
            images=samples.images,
            routing=pack_routing([response.routing for response in responses]),
        )

    def take_activity(self) -> list[EngineActivity]:
        """Return what vLLM did since the last call."""
        return self._batcher.take_activity()

    def start_profile(self) -> None:
        """Record what torch does in each of vLLM's ranks until ``write_profile``. Generation continues."""
        self._batcher.call_now(lambda engine: _on_ranks(engine, "start_profile"))

    def write_profile(self, folder: Path) -> None:
        """Write a trace of each rank to a file, which is named after the role, this engine and the rank in it."""
        name = f"{self._spec.role}-{self._spec.rank}"
        self._batcher.call_now(lambda engine: _on_ranks(engine, "write_profile", folder, name))

    @_between_requests
    def load_weights(self, engine: Any, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """Replace the weights. The tensors must stay valid until this returns: vLLM keeps some of them for a while."""
        role = self._spec.role
        self._invalidate_weights()
        checked = self._expected.check(role, weights)
        load = self._load_model if self._spec.lora is None else self._load_adapters
        try:
            load(engine, checked)
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"role {role}: weight sync {version} failed ({first_line(error)}).") from error
        self._accept_weights(engine, version)

    def _load_model(self, engine: Any, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Load weights of the model. Raises EngineError if a parameter of vLLM that must change got none."""
        _on_ranks(engine, "begin_reload", self._spec.synced_parts)
        for part in parts_for_ranks(weights, self._spec.layout):
            _on_ranks(engine, "reload_weights_part", part)
        if missing := {name for names in _on_ranks(engine, "finish_reload") for name in names}:
            raise EngineError(f"role {self._spec.role}: the weights lack vLLM's '{min(missing)}'.")

    def _load_adapters(self, engine: Any, weights: "Iterable[tuple[str, Tensor]]") -> None:
        """Replace the adapters; none can be missing, since ``ExpectedWeights`` has checked them all."""
        from vllm.lora.request import LoRARequest

        assert self._spec.lora is not None
        # vLLM does not load adapters again whose name and number it knows.
        number = self._num_adapter_syncs = self._num_adapter_syncs + 1
        with adapter_folder(self._spec.lora, weights) as folder:
            request = LoRARequest(f"sync {number}", number, folder)
            _on_ranks(engine, "add_lora", request)
        self._batcher.adapters = request

    @_between_requests
    def transfer(self, engine: Any, method: str, arguments: dict[str, Any]) -> None:
        """Call a method of vLLM's GPU-to-GPU weight transfer on all ranks; ``finish_transfer`` ends the transfer."""
        if method not in ("init_weight_transfer_engine", "shutdown_weight_transfer_engine"):
            self._invalidate_weights()
        _on_ranks(engine, method, **arguments)

    @_between_requests
    def finish_transfer(self, engine: Any, version: int) -> None:
        """Accept the weights that arrived by ``transfer``."""
        self._accept_weights(engine, version)

    def _invalidate_weights(self) -> None:
        """Refuse to generate until a weight sync succeeds. Raises EngineError while the engine sleeps."""
        if self._weights_asleep:
            raise EngineError(f"role {self._spec.role}: it cannot load weights: it is asleep.")
        self._batcher.version = None

    def _accept_weights(self, engine: Any, version: int) -> None:
        self._clear_prefix_cache(engine)
        self._batcher.version = self.journal.version = version

    def _clear_prefix_cache(self, engine: Any) -> None:
        """Drop the cached prompts and images, which belong to the old weights."""
        if self._vision is not None:
            engine.reset_encoder_cache()
        if not engine.reset_prefix_cache():
            raise EngineError(f"role {self._spec.role}: vLLM does not clear its prefix cache.")

    @_between_requests
    def sleep(self, engine: Any, discard_weights: bool = False) -> None:
        """Release GPU memory. On a CPU the engine just refuses to generate: vLLM cannot release memory there."""
        if not self._weights_asleep and self._spec.device != "cpu":
            self._clear_prefix_cache(engine)
            engine.sleep(level=2 if discard_weights else 1)
            if discard_weights:
                self._batcher.version = None
        self._weights_asleep = self._batcher.asleep = True

    @_between_requests
    def wake(self, engine: Any, weights_only: bool = False) -> None:
        """Take GPU memory again; with ``weights_only`` the engine has no KV cache and does not generate yet."""
        asleep = self._weights_asleep if weights_only else self._batcher.asleep
        if asleep and self._spec.device != "cpu":
            engine.wake_up(["weights"] if weights_only else None)
        self._weights_asleep = False
        self._batcher.asleep = self._batcher.asleep and weights_only


def _check_package() -> None:
    """Raise ImportError if vLLM's compiled kernels do not load with the installed torch; vLLM itself only warns."""
    import torch

    if not kernels_are_loaded():
        raise ImportError(f"its compiled kernels do not load with torch {torch.__version__}")


def _append_logprobs(processor: Any, output: Any) -> None:
    """Append the logprobs of a request's new tokens, without the ranks and texts that vLLM adds in Python.

    ``processor`` is vLLM's LogprobsProcessor, and ``output`` its EngineCoreOutput.
    """
    if output.new_logprobs is not None:
        processor.logprobs.logprobs.extend(output.new_logprobs.logprobs[:, 0].tolist())


def _count_cache_tokens(engine: Any) -> int:
    cache = engine.vllm_config.cache_config
    # vLLM keeps one block for itself.
    return int((cache.num_gpu_blocks - 1) * cache.block_size)


def _on_ranks(engine: Any, method: str, *arguments: Any, **named: Any) -> list[Any]:
    """Call a method of vLLM's worker, or of WorkerExtension, on each rank; return the results or raise an error."""
    answers = engine.collective_rpc("attempt", args=(method, *arguments), kwargs=named)
    for error, _ in answers:
        if error is not None:
            raise error
    return [result for _, result in answers]


ENGINE = EngineKind(
    engine=VllmEngine,
    parallel=frozenset({"data", "tensor", "pipeline", "expert"}),
    package="vllm",
    check_package=_check_package,
    concurrent=True,
    routing_replay=True,
    receives_weights_by=ALL_TRANSPORTS,
)
