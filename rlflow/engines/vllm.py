"""Generates with vLLM, in a process of its own."""

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rlflow.batch import Packed, Prompts, Repeated, Rollouts
from rlflow.engines.base import ALL_TRANSPORTS, EngineSpec, Sampling, WeightTransport, sample_seed
from rlflow.engines.causal_lm.pretrained import end_ids, load_tokenizer
from rlflow.engines.group_progress import NO_RESPONSE, PartialResponse, prepend_partial
from rlflow.engines.serving.activity import EngineActivity
from rlflow.engines.serving.batching import Batcher, Request, Written
from rlflow.engines.serving.files import Expected, adapter_files, load_config, load_end_ids, model_files, shared_files
from rlflow.engines.serving.sessions import Sessions
from rlflow.engines.serving.settings import check_model, engine_arguments, set_environment
from rlflow.errors import EngineError, UserError, first_line
from rlflow.resources.memory.state import TrainingMemory

if TYPE_CHECKING:
    from torch import Tensor


class VllmEngine(Sessions):
    parallel: ClassVar[frozenset[str]] = frozenset({"data", "tensor", "pipeline"})
    package: ClassVar[str | None] = "vllm"
    concurrent: ClassVar[bool] = True
    training_memory: ClassVar[TrainingMemory | None] = None
    sends_weights_by: ClassVar[frozenset[WeightTransport]] = frozenset()
    receives_weights_by: ClassVar[frozenset[WeightTransport]] = ALL_TRANSPORTS

    @staticmethod
    def check_package() -> None:
        """Raise ImportError if vLLM's compiled kernels do not load with the installed torch; vLLM itself only warns."""
        import torch
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        if not hasattr(torch.ops._C, "rms_norm"):
            raise ImportError(f"its compiled kernels do not load with torch {torch.__version__}")

    def __init__(self, spec: EngineSpec) -> None:
        """Raises RecipeError for a model that vLLM cannot run here, EngineError when it does not start."""
        self._spec = spec
        self._weights_asleep = False
        self._copies = 0
        """Of adapters, begun so far."""
        set_environment(spec)
        self._tokenizer = load_tokenizer(spec.model_name, spec.model)
        with model_files(spec) as folder:
            config = load_config(spec.model_name, folder, trust_remote_code=spec.model.trust_remote_code)
            check_model(spec, config)
            self._expected = Expected.of(config, spec)
            self._end_ids = end_ids(*load_end_ids(folder, config), self._tokenizer.eos_token_id)
            arguments = engine_arguments(spec, folder, config, self._expected.adapted)
            self._max_model_len: int = arguments["max_model_len"]
            try:
                self._batcher = Batcher(spec.role, lambda: _start(arguments))
            except UserError:
                raise
            except Exception as error:
                raise EngineError(f"role {spec.role}: vLLM does not start ({first_line(error)}).") from error
        self._places = spec.max_num_seqs
        self._cache_tokens = self._batcher.call(_cache_tokens)

    @property
    def capacity(self) -> tuple[int, int]:
        return self._places, self._cache_tokens

    def set_max_num_seqs(self, number: int) -> None:
        """That are written at once from the next generation on: at most as many as it was built for."""
        self._places = min(number, self._spec.max_num_seqs)

    @property
    def decode_steps(self) -> int:
        return self._batcher.decode_steps

    def submit(
        self, samples: Prompts, sampling: Sampling, begun: Sequence[PartialResponse] | None = None
    ) -> "list[Future[Written]]":
        longest = int(samples.ids.lengths.max(initial=0))
        if longest >= self._max_model_len:
            raise EngineError(
                f"role {self._spec.role}: a prompt of {longest} tokens leaves no room for a response"
                f" in {self._max_model_len}."
            )
        ids = samples.ids.take(np.arange(len(samples)))
        return self._batcher.submit(
            [
                self._request(ids[row].tolist(), key, sampling, begun[row] if begun else NO_RESPONSE)
                for row, key in enumerate(samples.keys)
            ]
        )

    def _request(
        self, prompt_ids: list[int], key: NDArray[np.int64], sampling: Sampling, begun: PartialResponse
    ) -> Request:
        if not len(begun.ids):
            return Request(prompt_ids, self._params(sampling, sample_seed(self._spec.seed, key)))
        # vLLM draws a request's numbers from their beginning again: those for the same key would be the same.
        seed = sample_seed(self._spec.seed, np.append(key, len(begun.ids)))
        left = replace(sampling, max_tokens=sampling.max_tokens - len(begun.ids))
        return Request([*prompt_ids, *begun.ids.tolist()], self._params(left, seed), begun)

    def abort(self, answers: "Collection[Future[Written]]") -> None:
        self._batcher.abort(answers)

    def rollouts(self, samples: Prompts, responses: Sequence[Written], sampling: Sampling) -> Rollouts:
        outputs = [response.output for response in responses]
        response_ids = Packed.from_rows([output.token_ids for output in outputs], np.int32)
        logprobs = Packed.from_rows([output.logprobs.logprobs for output in outputs], np.float32)
        versions = Repeated(np.array([each.version for each in responses], np.int32), response_ids.lengths)
        before = [response.begun for response in responses]
        if any(len(begun.ids) for begun in before):
            response_ids, logprobs, versions = prepend_partial(before, response_ids, logprobs, versions)
        ids = [response_ids[row].tolist() for row in range(len(response_ids))]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
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
        )

    def take_activity(self) -> list[EngineActivity]:
        """What vLLM did since this was last asked."""
        return self._batcher.take_activity()

    def load_weights(self, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        """They are handed on in passing. They stay as they are until this returns: vLLM keeps some for a while.

        Waits for what is being generated, and what comes later waits for it.
        """
        self._batcher.call(lambda engine: self._load(engine, weights, version))

    def transfer(self, method: str, arguments: dict[str, Any]) -> None:
        """A step of vLLM's own way from GPU to GPU, on all ranks. ``finish_transfer`` ends it."""
        self._batcher.call(lambda engine: self._transfer(engine, method, arguments))

    def finish_transfer(self, version: int) -> None:
        """All weights have come by ``transfer``."""
        self._batcher.call(lambda engine: self._renew(engine, version))

    def sleep(self, discard_weights: bool = False) -> None:
        """On the CPU it only generates nothing until it is woken: vLLM's memory is there as long as vLLM is."""
        self._batcher.call(lambda engine: self._sleep(engine, discard_weights))

    def wake(self, weights_only: bool = False) -> None:
        """With ``weights_only`` it generates nothing yet, and has no room for keys and values."""
        self._batcher.call(lambda engine: self._wake(engine, weights_only))

    def _params(self, sampling: Sampling, seed: int) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            # vLLM takes 63 bits.
            seed=seed >> 1,
            stop_token_ids=[*self._end_ids, *sampling.stop_ids],
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _load(self, engine: Any, weights: "Iterable[tuple[str, Tensor]]", version: int) -> None:
        role = self._spec.role
        self._expect_weights()
        given = self._expected.checked(role, weights)
        try:
            missing = (
                self._take_weights(engine, given) if self._spec.lora is None else self._take_adapters(engine, given)
            )
        except EngineError:
            raise
        except Exception as error:
            raise EngineError(f"role {role}: the copy of weights {version} failed ({first_line(error)}).") from error
        if missing:
            raise EngineError(f"role {role}: the weights lack vLLM's '{min(missing)}'.")
        self._renew(engine, version)

    def _take_weights(self, engine: Any, given: "Iterable[tuple[str, Tensor]]") -> set[str]:
        """Returns the names of those for which nothing came."""
        _on_ranks(engine, "begin_copy")
        for part in [given] if self._spec.layout.model_parallel_size == 1 else shared_files(given):
            _on_ranks(engine, "take_weights", part)
        return {name for names in _on_ranks(engine, "finish_copy") for name in names}

    def _take_adapters(self, engine: Any, given: "Iterable[tuple[str, Tensor]]") -> set[str]:
        """In the place of those before. All are there: what lacks some is no whole copy."""
        from vllm.lora.request import LoRARequest

        assert self._spec.lora is not None
        # By name and number vLLM knows what it has already.
        number = self._copies = self._copies + 1
        with adapter_files(self._spec.lora, given) as folder:
            request = LoRARequest(f"copy {number}", number, folder)
            _on_ranks(engine, "add_lora", request)
        self._batcher.adapters = request
        return set()

    def _transfer(self, engine: Any, method: str, arguments: dict[str, Any]) -> None:
        if method not in ("init_weight_transfer_engine", "shutdown_weight_transfer_engine"):
            self._expect_weights()
        _on_ranks(engine, method, **arguments)

    def _expect_weights(self) -> None:
        if self._weights_asleep:
            raise EngineError(f"role {self._spec.role}: weights come while it is asleep.")
        self._batcher.version = None

    def _renew(self, engine: Any, version: int) -> None:
        self._forget_prompts(engine)
        self._batcher.version = version

    def _forget_prompts(self, engine: Any) -> None:
        """Keys and values of the old weights."""
        if not engine.reset_prefix_cache():
            raise EngineError(f"role {self._spec.role}: vLLM keeps its prefix cache.")

    def _sleep(self, engine: Any, discard_weights: bool) -> None:
        if not self._weights_asleep and self._spec.device != "cpu":
            self._forget_prompts(engine)
            engine.sleep(level=2 if discard_weights else 1)
            if discard_weights:
                self._batcher.version = None
        self._weights_asleep = self._batcher.asleep = True

    def _wake(self, engine: Any, weights_only: bool) -> None:
        asleep = self._weights_asleep if weights_only else self._batcher.asleep
        if asleep and self._spec.device != "cpu":
            engine.wake_up(["weights"] if weights_only else None)
        self._weights_asleep = False
        self._batcher.asleep = self._batcher.asleep and weights_only


def _start(arguments: dict[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    _on_ranks(engine, "score_whole_distribution")
    return engine


def _cache_tokens(engine: Any) -> int:
    cache = engine.vllm_config.cache_config
    # vLLM keeps one block for itself.
    return int((cache.num_gpu_blocks - 1) * cache.block_size)


def _on_ranks(engine: Any, method: str, *arguments: Any, **named: Any) -> list[Any]:
    """Return what a method of vLLM's worker, or of WorkerExtension, returns on each rank. Raises the first error."""
    answers = engine.collective_rpc("attempt", args=(method, *arguments), kwargs=named)
    for error, _ in answers:
        if error is not None:
            raise error
    return [result for _, result in answers]


ENGINE = VllmEngine
