"""Experts that are recorded and replayed, in three kinds of routers."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlflow.batch import Packed, Sequences
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm.compilation import checkpoint_layers
from rlflow.engines.causal_lm.decoding import decode
from rlflow.engines.causal_lm.pretrained import load_model
from rlflow.engines.causal_lm.routing import Routers
from rlflow.engines.causal_lm.token_outputs import token_scores
from rlflow.errors import EngineError
from rlflow.recipe import Model
from tests.expert_models import random_routing, save_model
from tests.helpers import prompts, sequences, spec

GIVEN = sequences([5, 2, 4], [[4, 3, 1], [2], [1, 6]])
NAMES = pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "deepseek_v3"])
Load = Callable[[str], tuple[Any, Routers]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Return a function that loads a model with its routers."""
    saved: dict[str, Model] = {}

    def loaded(name: str) -> tuple[Any, Routers]:
        if name not in saved:
            saved[name] = save_model(tmp_path_factory.mktemp(name), name)
        model = load_model(spec(model=saved[name]), dtype=torch.float32)
        routers = Routers.of(model)
        assert routers is not None
        return model, routers

    return loaded


def scored(model: Any, routers: Routers | None, of: Sequences) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logprobs and the gradients of all weights."""
    logprobs = token_scores(model, of, 1.0, routers=routers)[:, 0]
    weights = torch.linspace(-1, 1, len(logprobs))
    return logprobs.detach(), list(torch.autograd.grad((logprobs * weights).sum(), list(model.parameters())))


def recorded(model: Any, routers: Routers, of: Sequences) -> tuple[Packed, Packed]:
    """Return the experts that a model uses, and these without those of the last token of each row."""
    rows = []
    with routers.recording() as take, torch.no_grad():
        for row in range(len(of)):
            token_scores(model, of.take(np.array([row])), 1.0, routers=routers)
            rows.append(take())
    return Packed.from_rows(rows, rows[0].dtype), Packed.from_rows([row[:-1] for row in rows], rows[0].dtype)


@NAMES
def test_its_own_choice_changes_neither_results_nor_gradients(load: Load, name: str) -> None:
    """The router of each layer has its gradient, as without replay."""
    model, routers = load(name)
    logprobs, gradients = scored(model, routers, GIVEN)
    routing, cut = recorded(model, routers, GIVEN)
    for replayed in (routing, cut):
        again, same = scored(model, routers, replace(GIVEN, routing=replayed))
        assert torch.equal(again, logprobs)
        assert all(torch.equal(one, other) for one, other in zip(gradients, same, strict=True))
    named = zip(dict(model.named_parameters()), gradients, strict=True)
    assert all(float(value.norm()) > 1e-4 for weight, value in named if weight.endswith("gate.weight"))


@NAMES
def test_the_experts_of_generated_tokens_are_those_of_one_pass_over_them(load: Load, name: str) -> None:
    model, routers = load(name)
    given, sampling = prompts((3, 5)).repeat(2), Sampling(max_tokens=6, group_size=2)
    new = decode(model, prompts((3, 5)), sampling, range(4), end_ids=[1, 2, 3], routers=routers)
    assert new.routing is not None
    assert len({len(ids) for ids in new.ids}) > 1, "responses of several lengths"
    whole = Sequences(keys=given.keys, prompt_ids=given.ids, response_ids=Packed.from_rows(new.ids, np.int32))
    experts, _ = recorded(model, routers, whole)
    for row, routing in enumerate(new.routing):
        np.testing.assert_array_equal(routing, experts[row])


@NAMES
def test_other_experts_are_used_in_a_packed_stream_as_one_by_one(load: Load, name: str) -> None:
    model, routers = load(name)
    num_layers = 1 if name == "deepseek_v3" else 2
    given = replace(GIVEN, routing=random_routing(GIVEN, num_layers))
    rows = [scored(model, routers, given.take(np.array([row]))) for row in range(len(given))]
    used, _ = recorded(model, routers, given)
    assert given.routing is not None
    assert used.values.tobytes() == given.routing.values.tobytes()
    logprobs, _ = scored(model, routers, given)
    assert torch.allclose(logprobs, torch.cat([row for row, _ in rows]), atol=1e-5)
    assert not torch.allclose(logprobs, scored(model, routers, GIVEN)[0], atol=1e-2)


def test_recomputed_layers_have_the_same_gradients(load: Load) -> None:
    model, routers = load("qwen3_moe")
    given = replace(GIVEN, routing=random_routing(GIVEN, 2))
    expected = scored(model, routers, given)[1]
    model.train()
    checkpoint_layers(model, 0)
    for one, other in zip(expected, scored(model, routers, given)[1], strict=True):
        assert torch.allclose(one, other, atol=1e-7)


def test_a_router_that_does_not_choose_by_topk_is_refused(load: Load) -> None:
    model, routers = load("mixtral")
    gate = model.model.layers[1].mlp.gate

    def choose(hidden: torch.Tensor) -> Any:
        scores = torch.nn.functional.linear(hidden, gate.weight).softmax(-1)
        values, experts = scores.sort(-1, descending=True)
        return scores, values[:, :2], experts[:, :2]

    gate.forward = choose
    token_scores(model, GIVEN, 1.0, routers=routers)
    with pytest.raises(EngineError, match="MixtralForCausalLM chooses its experts in a way"):
        token_scores(model, replace(GIVEN, routing=random_routing(GIVEN, 2)), 1.0, routers=routers)


def test_a_model_without_experts_has_no_routers() -> None:
    assert Routers.of(load_model(spec(), dtype=torch.float32)) is None
