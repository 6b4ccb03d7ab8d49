"""The work in a step of a published run: how many samples, how long, in how many parts."""

import re
from dataclasses import dataclass

from benchmarks.published import settings
from benchmarks.published.cases import Case
from benchmarks.published.libraries import profile_of
from benchmarks.published.rows import Row
from rlflow.resources.time.lengths import Lengths

# Samples of supervised steps if the row does not say: ms-swift and Megatron-SWIFT both come to 16 by default.
_SWIFT_BATCH = 16
# The comparison with DeepSpeed-Chat in OpenRLHF's README (benchmark/README.md): all of 1024 + 1024 tokens, reward and
# critic as large as the actor, updates of 128.
COMPARED_LENGTH, COMPARED_BATCH = 1024, 128
# Mean tokens that models write before any limit cuts them: those that reason at length first, and the others. The
# only published figures used are the means of responses to questions of mathematics, 6000 to 10000 of distilled
# reasoning models at 32k (DeepSeek-R1, AReaL) and 500 to 2000 of others while they are trained.
_REASONED, _ANSWERED = 8000.0, 1200.0
_REASONS = re.compile(r"r1|distill|qwq|qwen3|think|reason|gpt-oss|or1|deepscaler|deepcoder|magistral|glm-4\.[5-9]|mimo")
_ANSWERS = re.compile(r"base|instruct|coder|math")


@dataclass(frozen=True)
class Batch:
    samples: float
    group_size: int
    prompts: Lengths
    responses: Lengths
    minibatches: int
    """Optimizer steps per step."""
    micro_batch_tokens: float
    """Tokens that actually pass through the model at once."""

    @property
    def tokens(self) -> float:
        return self.samples * (self.prompts.mean + self.responses.mean)

    @property
    def typical_length(self) -> float:
        """Return the mean length of the sequence that a token belongs to."""
        whole = [self.prompts.mean + length for length in self.responses.values]
        return sum(length * length for length in whole) / sum(whole)


def is_full(row: Row) -> bool:
    """Return whether supervised samples, or packs of them, fill the limit."""
    return not row.rollout_engine and (profile_of(row).fills or settings.fills_limit(row))


def is_compared(row: Row) -> bool:
    """Return whether the row belongs to OpenRLHF's comparison with DeepSpeed-Chat."""
    return "1024 prompts" in row.step_time_kind


def batch_of(case: Case) -> Batch | None:
    """Return the work of a step; None if the row does not say."""
    row = case.row
    samples, prompts, responses = case.samples, case.prompts, case.responses
    if samples is None and "swift" in row.system and not row.rollout_engine:
        samples = float(_SWIFT_BATCH)
    if samples is None and not row.rollout_engine and "tokens per s" in row.step_time_kind:
        # A time that was derived from throughput is that of one micro-batch of each rank.
        samples = float((row.micro_batch_per_gpu or 1) * case.train.data_parallel_size)
    if samples is None:
        return None
    limit = float(row.max_total_len or 0) or prompts.longest + responses.longest
    if is_compared(row):
        prompts = responses = Lengths((float(COMPARED_LENGTH),))
        limit = 2.0 * COMPARED_LENGTH
    elif is_full(row):
        responses = Lengths((limit,))
    elif "mean_response_len" in case.assumed and not settings.data_lengths(row):
        responses = _responses(case, samples, prompts.mean, responses.longest)
    samples *= settings.sequences_per_sample(row) if not row.rollout_engine else 1
    return Batch(
        samples,
        max(1, case.group_size),
        prompts,
        responses,
        _minibatches(row, samples),
        _micro_batch(row, prompts.mean + responses.mean, limit),
    )


def stated_tokens(case: Case) -> float | None:
    """Return the tokens of a step that follow from what the row measured.

    Published throughput is tokens per GPU and second. An MFU of the update counts six operations per parameter and
    token.
    """
    row = case.row
    if row.tokens_per_s_per_gpu and row.step_time_s and row.n_gpus:
        return row.tokens_per_s_per_gpu * row.step_time_s * row.n_gpus
    if row.mfu and row.train_time_s and row.rollout_engine and case.gpu and case.gpu.peak_tflops:
        operations = row.mfu * 1e12 * case.gpu.peak_tflops["bfloat16"] * case.train.num_gpus * row.train_time_s
        return operations / 6 / case.model.num_active_parameters
    return None


def lengths_are_given(case: Case) -> bool:
    """Return whether the mean length of responses is stated, or follows from what the row says."""
    stated = "mean_response_len" not in case.assumed or settings.data_lengths(case.row) or is_compared(case.row)
    return bool(stated) or stated_tokens(case) is not None


def _responses(case: Case, samples: float, prompt: float, limit: float) -> Lengths:
    """Return response lengths for a row without a mean.

    They follow from the tokens of a step. Otherwise they are those that such models usually generate, truncated at the
    limit.
    """
    tokens = stated_tokens(case)
    if tokens is not None:
        return Lengths.log_normal(max(1.0, tokens / samples - prompt), limit)
    name = case.row.model.lower()
    reasons = _REASONS.search(name) and not (_ANSWERS.search(name) and "distill" not in name)
    mean = _REASONED if reasons else _ANSWERED
    return Lengths((*(min(limit, value) for value in Lengths.log_normal(mean, 8 * mean).values[:-1]), limit))


def _minibatches(row: Row, samples: float) -> int:
    """Return the number of minibatches; verl counts prompts in a mini-batch, other systems samples in a batch."""
    if is_compared(row):
        return max(1, round(samples / COMPARED_BATCH))
    if row.mini_batch and row.prompts_per_step and "verl" in row.system:
        return max(1, round(row.prompts_per_step / row.mini_batch))
    if row.mini_batch:
        return max(1, round(samples / row.mini_batch))
    if row.train_batch and row.rollout_engine and "verl" not in row.system:
        return max(1, round(samples / row.train_batch))
    return 1


def _micro_batch(row: Row, mean: float, limit: float) -> float:
    """Return the tokens of a micro-batch; NeMo-RL's performance recipes and packed rows fill the limit."""
    if row.max_tokens_per_gpu and "dynamic batch false" not in row.text:
        return float(row.max_tokens_per_gpu)
    if not row.micro_batch_per_gpu and settings.is_packed(row):
        # A budget of tokens has room for the longest sequence.
        return limit
    sequences = (row.micro_batch_per_gpu or 1) * settings.sequences_per_sample(row)
    if (row.train_pp or 1) > 1 and profile_of(row).pipeline_sequences:
        sequences = profile_of(row).pipeline_sequences or 1
    if "performance-summary" in row.source_path or is_full(row):
        return limit * sequences
    return sequences * mean
