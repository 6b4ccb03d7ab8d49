"""Models with a value head: as many parameters as transformers' own, and memory without logits."""

import pytest
import torch

from benchmarks.published.libraries import DEEPSPEED
from rlflow.engines.base import LOGITS_AT_ONCE
from rlflow.resources.layout import GIB
from rlflow.resources.memory.phases import score_terms, update_terms
from rlflow.resources.memory.state import TrainingMemory
from rlflow.resources.models.architecture import with_scalar_head
from tests.unit.resources.memory.test_phases import QWEN, card, layout
from tests.unit.resources.models.test_architecture import config_fields

WHOLE = TrainingMemory(logits_at_once=float("inf"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_1_5b", "qwen2_5_7b", "qwen3_8b", "llama3_1_8b", "qwen3_30b_a3b"])
def test_parameters_are_those_of_transformers(name: str) -> None:
    from transformers import AutoConfig, AutoModelForTokenClassification

    model = card(name)
    config = AutoConfig.for_model(**config_fields(model), num_labels=1)
    with torch.device("meta"):
        theirs = AutoModelForTokenClassification.from_config(config)
    assert with_scalar_head(model).num_parameters == sum(weight.numel() for weight in theirs.parameters())


def test_a_head_of_its_own_where_the_logits_have_the_embedding() -> None:
    tied = card("qwen2_5_1_5b")
    assert with_scalar_head(tied).num_parameters == tied.num_parameters + 1536 + 1


def test_memory_without_logits() -> None:
    """14 bytes for each value in place of 14 for each of the vocabulary's logits."""
    tokens, critic = 8192, with_scalar_head(QWEN)
    terms = update_terms(critic, layout(zero_stage=2, data_parallel_size=8), DEEPSPEED, tokens)
    assert terms["logits"] <= 14 * tokens / GIB
    assert terms["weights"] == pytest.approx(2 * (QWEN.num_parameters - 152064 * 3584 + 3585) / GIB)
    assert terms["optimizer"] == pytest.approx(6 * terms["weights"] / 8)
    scored = score_terms(critic, layout(), tokens, training=WHOLE)
    assert scored["logits"] == pytest.approx(10 * tokens / GIB)
    assert score_terms(QWEN, layout(), tokens, training=WHOLE)["logits"] == pytest.approx(10 * 152064 * tokens / GIB)
    # The engine makes this many logits at a time, which is more than there are values.
    some = TrainingMemory(logits_at_once=LOGITS_AT_ONCE)
    assert score_terms(critic, layout(), tokens, training=some)["logits"] == scored["logits"]
