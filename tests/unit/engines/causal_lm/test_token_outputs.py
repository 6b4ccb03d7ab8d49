"""Packed passes and cached decoding against transformers' own, one sequence at a time."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.varlen_on_cpu import register_cpu_kernel
from rlflow.batch import Packed, Prompts, Sequences
from rlflow.engines.base import Sampling
from rlflow.engines.causal_lm import attention
from rlflow.engines.causal_lm.compilation import checkpoint_layers
from rlflow.engines.causal_lm.decoding import _sample, decode
from rlflow.engines.causal_lm.packing import pack, padded_blocks
from rlflow.engines.causal_lm.pretrained import load_model, load_tokenizer
from rlflow.engines.causal_lm.token_outputs import token_scores
from rlflow.engines.torch import TorchEngine
from rlflow.engines.transformers import TransformersEngine
from rlflow.errors import EngineError, RecipeError
from rlflow.nodes.policy_loss import LikelihoodLoss
from rlflow.nodes.policy_update import PolicyUpdate
from rlflow.recipe import Model, Optimizer
from rlflow.resources.layout import Layout
from rlflow.resources.memory.activations import layer_bytes
from rlflow.resources.memory.state import MIXED_PRECISION
from tests.helpers import ARCHITECTURE, MODEL, minibatch, prompts, sequences, spec


def model(implementation: str | None = None) -> Any:
    built = load_model(spec(model=MODEL), dtype=torch.float32)
    if implementation is not None:
        built.config._attn_implementation = implementation
    return built


def own_logprobs(of: Sequences) -> list[float]:
    """Score each sequence by itself, with the library's own attention."""
    plain = model("eager")
    values: list[float] = []
    for prompt, response in zip(
        map(of.prompt_ids.__getitem__, range(len(of))), map(of.response_ids.__getitem__, range(len(of))), strict=True
    ):
        ids = torch.tensor(np.concatenate([prompt, response]))[None].long()
        with torch.no_grad():
            scores = plain(ids).logits[0].log_softmax(-1)
        values += [float(scores[len(prompt) - 1 + at, token]) for at, token in enumerate(response)]
    return values


SHAPES = [
    ([3], [[4]]),
    ([3], [[4, 4, 4]]),
    ([1], [[1, 1]]),
    ([3, 3], [[4], [4]]),
    ([2, 7, 4], [[9, 1, 5], [3], [1, 30]]),
]


@pytest.mark.parametrize(("prompt_lengths", "response_lengths"), SHAPES)
def test_packed_is_one_by_one(prompt_lengths: Sequence[int], response_lengths: Sequence[Sequence[int]]) -> None:
    given = sequences(prompt_lengths, response_lengths)
    with torch.no_grad():
        packed = token_scores(model(), given, 1.0)[:, 0]
    assert packed.tolist() == pytest.approx(own_logprobs(given), abs=1e-5)


def test_a_prompt_is_in_the_stream_once_and_the_last_token_is_not() -> None:
    given = sequences([5, 2], [[4, 3, 1], [2]])
    stream = pack(given.prompt_ids, given.response_ids)
    assert len(stream.ids) == 5 + (3 + 2 + 0) + 2 + 1
    assert stream.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 5, 6, 0, 1, 2]
    assert stream.predictors.tolist() == [4, 5, 6, 7, 4, 8, 9, 4, 11, 12]


def test_no_slot_of_padding_is_anyones() -> None:
    given = sequences([5, 2, 9], [[4, 3, 1], [2], [20, 17]])
    stream = pack(given.prompt_ids, given.response_ids)
    blocks, owners = padded_blocks(stream.segments)
    places = np.concatenate([block.ravel() for block in blocks])
    assert (places[owners] == np.arange(len(stream.ids))).all()
    ends = np.cumsum([block.size for block in blocks])
    for owner, position in zip(owners, stream.positions, strict=True):
        block = int(np.searchsorted(ends, owner, side="right"))
        slot = owner - (ends[block] - blocks[block].size)
        assert slot % blocks[block].shape[1] == position


def decoded(prompts: Packed, sampling: Sampling, merge_end_ids: Sequence[int] = (0,)) -> Any:
    keys = np.array([(0, row, 0) for row in range(len(prompts))])
    batch = Prompts(keys=keys, ids=prompts, rows=[{} for _ in keys])
    return decode(model(), batch, sampling, list(range(len(prompts) * sampling.group_size)), merge_end_ids)


def test_greedy_decoding_is_the_librarys() -> None:
    prompts = sequences([3, 7, 1], [[1], [1], [1]]).prompt_ids
    ours = decoded(prompts, Sampling(max_tokens=12, temperature=0.0))
    plain = model("eager")
    for row in range(3):
        ids = torch.tensor(prompts[row])[None].long()
        theirs = plain.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=0, pad_token_id=0
        )
        assert ours.ids[row].tolist() == theirs[0, ids.shape[1] :].tolist()


def test_sequences_end_at_the_end_token_and_leave_the_others_alone() -> None:
    """Sequences leave at every step. Each must equal the one generated alone, cut at its first end."""
    prompts = sequences([3, 7, 1, 2], [[1]] * 4).prompt_ids
    sampling = Sampling(max_tokens=10, group_size=5)
    whole = decoded(prompts, sampling, merge_end_ids=())
    ends = (0, 3, 5, 8)
    cut = decoded(prompts, sampling, merge_end_ids=ends)
    assert not whole.finished.any()
    for row in range(20):
        stops = np.flatnonzero(np.isin(whole.ids[row], ends))
        length = stops[0] + 1 if stops.size else 10
        assert cut.ids[row].tolist() == whole.ids[row][:length].tolist()
        assert cut.logprobs[row] == pytest.approx(whole.logprobs[row][:length], abs=1e-5)
        assert cut.finished[row] == bool(stops.size)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "live"), [(4096, 4), (8, 256), (8, 3), (1, 1), (4096, 20)])
def test_responses_do_not_depend_on_the_batch(tokens: int, live: int) -> None:
    given, sampling = prompts((3, 7, 1, 2)), Sampling(max_tokens=6, group_size=5)
    whole = TransformersEngine(spec()).generate(given, sampling)
    engine = TransformersEngine(replace(spec(micro_batch_tokens=tokens), max_num_seqs=live))
    parts = engine.generate(given, sampling)
    assert parts.response_ids.values.tolist() == whole.response_ids.values.tolist()
    assert parts.logprobs.values == pytest.approx(whole.logprobs.values, abs=1e-5)
    assert parts.finished.tolist() == whole.finished.tolist()
    batches = list(engine._decoding_batches(given.ids.lengths, 5))
    assert max(batch.num_prompts * batch.num_samples for batch in batches) <= live
    for batch in batches:
        lengths = given.ids.lengths[batch.first_prompt : batch.first_prompt + batch.num_prompts]
        assert batch.num_prompts == 1 or lengths.sum() <= tokens


def test_sampling_inverts_the_distribution_function() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
    for draw, token in ((0.0, 0), (0.49, 0), (0.51, 1), (0.79, 1), (0.81, 2), (0.999999, 2)):
        chosen, logprob = _sample(logits, Sampling(max_tokens=1), torch.tensor([draw], dtype=torch.float64))
        assert chosen.tolist() == [token]
        assert logprob.tolist() == pytest.approx([float(logits[0, token])])


def test_top_p_keeps_the_likeliest() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    tokens = {
        int(_sample(logits, Sampling(max_tokens=1, top_p=0.6), torch.tensor([draw], dtype=torch.float64))[0])
        for draw in np.linspace(0, 0.999, 50)
    }
    assert tokens == {1, 2}


def test_the_gradient_does_not_depend_on_the_cut() -> None:
    given = minibatch(sequences([3, 6, 2], [[4, 9, 1], [2], [5, 5]]))
    weights = []
    for size in (4096, 12, 1):
        engine = TorchEngine(
            spec(capabilities=["Trains"], micro_batch_tokens=size, optimizer=Optimizer(learning_rate=1e-2))
        )
        metrics = engine.update(given, LikelihoodLoss()).values
        weights.append((metrics["grad_norm"], torch.cat([w.flatten() for _, w in engine.weights()])))
    for norm, values in weights[1:]:
        assert norm == pytest.approx(weights[0][0], rel=1e-5)
        assert (values - weights[0][1]).abs().max() < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("capabilities", [["Trains"], ["Trains", "Values"]])
def test_an_update_repeats_itself_to_the_bit(capabilities: list[str]) -> None:
    """Large enough for several threads to share the work, with one prompt that all of them add to."""
    given = minibatch(sequences([8], [[5, 9, 13, 9, 5, 2, 7, 7] * 100]))
    weights = []
    for _ in range(5):
        engine = TorchEngine(spec(capabilities=capabilities, micro_batch_tokens=10**6))
        engine.update(given, LikelihoodLoss())
        weights.append(torch.cat([weight.flatten() for _, weight in engine.weights()]))
    assert all(torch.equal(other, weights[0]) for other in weights)


@pytest.mark.parametrize(("step", "rate"), [(0, 1e-3), (9, 1e-4)])
def test_the_learning_rate_is_that_of_the_step(step: int, rate: float) -> None:
    """The first step of AdamW moves a weight with a gradient by the learning rate."""
    engine = TorchEngine(spec(capabilities=["Trains"], optimizer=Optimizer(learning_rate=1e-3, schedule="linear")))
    given = minibatch(sequences([3], [[4]]), step)
    before = {name: weight.clone() for name, weight in engine.weights()}
    assert engine.update(given, LikelihoodLoss()).values["learning_rate"] == pytest.approx(rate)
    moved = max(float((weight - before[name]).abs().max()) for name, weight in engine.weights())
    assert moved == pytest.approx(rate, rel=1e-2)


def test_the_gradient_is_clipped() -> None:
    engine = TorchEngine(spec(capabilities=["Trains"], optimizer=Optimizer(max_grad_norm=0.1)))
    norm = engine.update(minibatch(sequences([3], [[4]])), LikelihoodLoss()).values["grad_norm"]
    gradients = [weight.grad.flatten() for weight in engine._model.parameters() if weight.grad is not None]
    assert norm > 0.1
    assert float(torch.cat(gradients).norm()) == pytest.approx(0.1, rel=1e-4)


def test_values_are_those_before_each_response_token() -> None:
    engine = TorchEngine(spec(capabilities=["Trains", "Values"]))
    given = sequences([3, 2], [[4, 1], [2]])
    ours = engine.values(given).values
    engine._model.config._attn_implementation = "eager"
    for row in range(3):
        prompt, response = given.prompt_ids[row], given.response_ids[row]
        ids = torch.tensor(np.concatenate([prompt, response]))[None].long()
        with torch.no_grad():
            values = engine._model(ids).logits[0, :, 0]
        assert ours[row] == pytest.approx(values[len(prompt) - 1 : -1].numpy(), abs=1e-5)


def test_weights_arrive() -> None:
    leader, follower = TorchEngine(spec(capabilities=["Trains"])), TransformersEngine(spec(role="rollout"))
    given = sequences([3], [[4, 2]])
    leader.update(minibatch(given), LikelihoodLoss())
    assert follower.logprobs(given, 1.0).values.values != pytest.approx(leader.logprobs(given, 1.0).values.values)
    follower.load_weights(leader.weights(), 1)
    assert follower.logprobs(given, 1.0).values.values == pytest.approx(leader.logprobs(given, 1.0).values.values)


def test_layers_that_would_mix_sequences_are_refused(tmp_path: Any) -> None:
    built = model()
    built.config.layer_types = ["full_attention", "sliding_attention"]
    built.config.sliding_window = 4
    built.config.use_sliding_window = True
    built.save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match="layers of sliding_attention are not supported"):
        load_model(spec(model=Model(path=str(tmp_path))), dtype=torch.float32)


def granite(**options: Any) -> Any:
    """Return a model that divides its logits after its output layer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model("granite", vocab_size=13, num_key_value_heads=2, **sizes, **options)
    return AutoModelForCausalLM.from_config(config, attn_implementation="rlflow")


def test_logits_that_are_changed_at_the_end_are_refused(tmp_path: Any) -> None:
    built = granite(logits_scaling=8.0)
    built.save_pretrained(tmp_path)
    with pytest.raises(
        RecipeError, match=r"models.policy.path: logits that .* \(logits_scaling 8.0\) are not supported"
    ):
        load_model(spec(model=Model(path=str(tmp_path))), dtype=torch.float32)
    with pytest.raises(EngineError, match="a GraniteForCausalLM changes its logits after its output layer"):
        token_scores(built, sequences([3], [[2]]), 1.0)


def test_a_policy_update_knows_the_entropy() -> None:
    given = sequences([3, 6], [[4, 9], [2]])
    zeros = np.zeros(len(given.response_ids.values))
    batch = minibatch(given, old_logprobs=zeros, advantages=zeros)
    loss = PolicyUpdate().loss(0.7)
    plain, expected = model("eager"), []
    for row in range(len(given)):
        prompt, response = given.prompt_ids[row], given.response_ids[row]
        ids = torch.tensor(np.concatenate([prompt, response]))[None].long()
        with torch.no_grad():
            scores = (plain(ids).logits[0] / 0.7).log_softmax(-1)[len(prompt) - 1 : -1]
        expected += (-(scores.exp() * scores).sum(-1)).tolist()
    for size in (4096, 8):
        metrics = TorchEngine(spec(capabilities=["Trains"], micro_batch_tokens=size)).update(batch, loss).values
        assert metrics["entropy"] == pytest.approx(np.mean(expected), abs=1e-5)


@pytest.mark.parametrize("kept_layers", [0, 1, 2])
def test_checkpointing_changes_no_gradient(kept_layers: int) -> None:
    given = sequences([3, 6], [[4, 9], [2]])
    plain, checkpointed = model().train(), model().train()
    checkpoint_layers(checkpointed, kept_layers)
    gradients = [
        torch.autograd.grad(token_scores(built, given, 1.0)[:, 0].sum(), list(built.parameters()))
        for built in (plain, checkpointed)
    ]
    for expected, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6)


def test_a_kept_layer_saves_what_the_planner_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer that is kept saves more; the planner leaves out its two norms' factors, 8 bytes of a token."""
    register_cpu_kernel()
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda dtype, device: True)
    four = replace(ARCHITECTURE, model_type="qwen2", hidden_size=32, head_dim=8, num_hidden_layers=4)
    given, layout = sequences([1], [[32]]), Layout(micro_batch_tokens=4096, gradient_checkpointing=True)
    saved = []
    for kept_layers in range(5):
        built = load_model(spec(model=replace(MODEL, architecture=four, dtype="bfloat16")), dtype=torch.bfloat16)
        checkpoint_layers(built.train(), kept_layers)
        saved.append(_saved_bytes(built, given))
    tokens = 1 + 32 - 1
    _, kept = layer_bytes(four, replace(layout, gradient_checkpointing=False), MIXED_PRECISION, tokens)
    _, recomputed = layer_bytes(four, layout, MIXED_PRECISION, tokens)
    # The first layer that is kept also saves what all of them share: the rotation of queries and keys.
    assert np.diff(saved)[1:].tolist() == pytest.approx([kept - recomputed + 8 * tokens] * 3, rel=0.005)


def _saved_bytes(built: Any, given: Sequences) -> int:
    """Return the bytes that a forward pass saves for the backward pass, without weights."""
    weights = {weight.untyped_storage().data_ptr() for weight in built.parameters()}
    sizes: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scores = token_scores(built, given, 1.0)
    # The saved tensors live as long as the scores, so no two of them had the same address.
    assert scores.requires_grad
    return sum(sizes.values())


def test_after_a_failed_weight_sync_nothing_is_generated() -> None:
    engine, sampling = TransformersEngine(spec()), Sampling(max_tokens=2)
    weights = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    last = list(weights)[-1]
    wrong = weights | {last: weights[last][:1]}
    with pytest.raises(EngineError, match=f"role actor: the weight '{last}' does not fit the model"):
        engine.load_weights(wrong.items(), 1)
    with pytest.raises(EngineError, match="role actor: the last weight sync failed"):
        engine.generate(prompts(), sampling)
    del wrong[last]
    with pytest.raises(EngineError, match=f"role actor: the weights lack '{last}'"):
        engine.load_weights(wrong.items(), 1)
    engine.load_weights(weights.items(), 2)
    assert set(engine.generate(prompts(), sampling).versions.values.tolist()) == {2}


def test_an_attention_that_is_not_ours_is_refused() -> None:
    built = model()
    built.model.layers[0].self_attn.sliding_window = 4
    with pytest.raises(EngineError, match="attention with sliding_window"):
        token_scores(built, sequences([3], [[2]]), 1.0)


def test_a_saved_model_is_the_same(tmp_path: Any) -> None:
    engine = TorchEngine(spec())
    engine.export(tmp_path)
    again = TransformersEngine(spec(model=Model(path=str(tmp_path), dtype="float32")))
    given = sequences([3], [[4, 2]])
    assert again.logprobs(given, 1.0).values.values == pytest.approx(
        engine.logprobs(given, 1.0).values.values, abs=1e-6
    )
    assert again.tokenizer.decode(again.tokenizer("1+2=")["input_ids"]) == "1+2="


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/nowhere/model", "models.policy.path: '/nowhere/model' is not a folder"),
        ("nobody/nothing", "models.policy.path: 'nobody/nothing' cannot be loaded ("),
    ],
)
def test_a_model_that_is_not_there(path: str, message: str) -> None:
    with pytest.raises(RecipeError) as raised:
        load_tokenizer("policy", Model(path=path))
    assert str(raised.value).startswith(message)
