"""The lengths of a row's samples, and its largest micro-batch."""

import re
from math import ceil, exp
from statistics import NormalDist

from benchmarks.published import settings
from benchmarks.published.rows import Row
from rlflow.resources.time.lengths import Lengths

_TEXT_LENGTH, _LIMIT_TO_MEAN = 200.0, 10.0
"""Mean tokens of a supervised sample of unknown data: those of Alpaca, or a tenth of the limit, divided by the
micro-batch's sequences, if that is more. Limits usually truncate few samples and let the longest ones fit."""
_SPREAD, _SAMPLES = 0.8, 256
"""The standard deviation of the logarithm of unknown texts' lengths, and the number of samples that represent a data
set."""
_ANSWER_SHARE = 0.3
"""The mean length of sampled responses as a share of the limit, if it is not given."""


def lengths_of(row: Row) -> tuple[Lengths, Lengths, set[str]]:
    """Return the lengths of prompts and responses, and which were guessed.

    Supervised samples are one text, the response, after a prompt of one token.
    """
    guessed = set()
    total = row.max_total_len or (row.max_prompt_len or 0) + (row.max_response_len or 0) or None
    if not row.rollout_engine and not row.max_response_len:
        limit = float(total or 32768)
        mean = row.mean_response_len or row.mean_prompt_len
        if mean is None:
            guessed.add("mean_response_len")
            known = settings.data_lengths(row)
            sequences = (row.micro_batch_per_gpu or 1) * settings.sequences_per_sample(row)
            mean = max(_TEXT_LENGTH, (total or 0) / _LIMIT_TO_MEAN / sequences)
            mean = min(known.prompt + known.answer if known else mean, limit / 2)
        return Lengths((1.0,)), _texts(mean, limit), guessed
    response_limit = float(row.max_response_len or total or 2048)
    prompt_limit = float(row.max_prompt_len or (total or 4096) / 2)
    average = re.search(r"average seq len \(prompt\+response\) ([\d,]+)", row.notes, re.I)
    known = settings.data_lengths(row)
    prompt, response = row.mean_prompt_len, row.mean_response_len
    if known and response is None:
        prompts = _texts(known.prompt, prompt_limit, known.prompt_spread)
        return prompts, _texts(known.answer, response_limit, known.answer_spread), {"mean_response_len"}
    if prompt is None:
        prompt = min(150.0, prompt_limit / 2)
    if response is None and average:
        response = max(1.0, float(average[1].replace(",", "")) - prompt)
    if response is None:
        guessed.add("mean_response_len")
        response = _ANSWER_SHARE * response_limit
    return _texts(prompt, prompt_limit), Lengths.log_normal(response, response_limit), guessed


def _texts(mean: float, limit: float, spread: float = _SPREAD) -> Lengths:
    """Return lengths of human texts: log-normal around ``mean``, truncated at ``limit``."""
    normal = NormalDist()
    median = mean / exp(spread**2 / 2)
    quantiles = (normal.inv_cdf((index + 0.5) / _SAMPLES) for index in range(_SAMPLES))
    lengths = (median * exp(spread * quantile) for quantile in quantiles)
    return Lengths(tuple(min(limit, max(1.0, length)) for length in lengths))


def micro_batch_sequences(row: Row, in_pipeline: int | None, samples_per_rank: float | None) -> int:
    """Return the sequences of a micro-batch, of which a rank never has more than its samples."""
    samples = row.micro_batch_per_gpu or 1
    if in_pipeline and (row.train_pp or 1) > 1:
        samples = in_pipeline
    if samples_per_rank is not None:
        samples = max(1, min(samples, ceil(samples_per_rank)))
    return samples * settings.sequences_per_sample(row)


def largest_micro_batch(
    row: Row, prompts: Lengths, responses: Lengths, sequences: int, available: float | None, *, fills: bool
) -> float:
    """Return the tokens of the largest micro-batch of a GPU (or its group) in a run.

    ``available`` is the number of samples that the GPU has for one optimizer step, if it is known.
    """
    limit = float(row.max_total_len or (row.max_prompt_len or 0) + (row.max_response_len or 0) or 32768)
    packed = settings.is_packed(row)
    mean, variance = prompts.mean + responses.mean, responses.mean_square - responses.mean**2
    if row.max_tokens_per_gpu and packed:
        budget = float(settings.tokens_per_group(row))
        if available is None or not settings.data_lengths(row):
            return budget
        return float(min(budget, max(mean * available + 3 * (variance * available) ** 0.5, mean)))
    if fills or settings.fills_limit(row):
        return limit * sequences / (settings.sequences_per_sample(row) if packed else 1)
    if packed:
        # Without padding: the sum of what is drawn, three standard deviations above its mean at most.
        return float(min(limit * sequences, max(mean * sequences + 3 * (variance * sequences) ** 0.5, mean)))
    if _reaches_limit(row):
        return limit * sequences
    return float(min(limit, prompts.longest + responses.longest) * sequences)


def possible_micro_batches(
    row: Row, prompts: Lengths, responses: Lengths, sequences: int, tokens: int, *, fills: bool
) -> tuple[float, float]:
    """Return the range of the largest micro-batch, around ``tokens``.

    Without lengths, all samples may be of the mean length or of the maximum.
    """
    limit = row.max_total_len or (row.max_prompt_len or 0) + (row.max_response_len or 0)
    is_fixed = bool(row.max_tokens_per_gpu and settings.is_packed(row)) or fills or settings.fills_limit(row)
    if is_fixed or row.mean_response_len or row.mean_prompt_len or settings.data_lengths(row):
        return tokens, tokens
    mean = prompts.mean + responses.mean
    return min(tokens, mean * sequences), max(tokens, float(limit) * sequences)


def _reaches_limit(row: Row) -> bool:
    """Return whether the longest of a run's supervised samples is as long as the limit.

    It usually is among thousands. ms-swift's examples train on some hundred instructions, which are short.
    """
    named = re.search(r"well below|not filled", row.text)
    return not (row.rollout_engine or "swift" in row.system or named or settings.data_lengths(row))
