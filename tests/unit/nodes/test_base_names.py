"""Names that papers and other libraries use lead to those that are used here."""

import re
from dataclasses import fields

import pytest

import rlflow
from rlflow.compiler.wire import wire
from rlflow.errors import RecipeError
from rlflow.nodes.base import KINDS
from rlflow.nodes.policy_update import PolicyGradient
from tests.conftest import CONFIG_DIR, ROOT

UPDATES = [
    kind for kind in KINDS.values() if issubclass(kind, PolicyGradient) and kind.__module__.startswith("rlflow.")
]
ALGORITHMS, COMING_FROM = ((ROOT / "docs" / name).read_text() for name in ("algorithms.md", "coming-from.md"))


@pytest.mark.parametrize("kind", UPDATES, ids=lambda kind: kind.kind)
def test_hints_name_options_that_exist(kind: type[PolicyGradient]) -> None:
    options = {field.name for field in fields(kind)}
    assert kind.hints_for_other_names
    for other, hint in kind.hints_for_other_names.items():
        assert other not in options
        assert options & set(re.findall(r"\w+", hint)), hint


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("clip_ratio_c=3", "dual_clip"),
        ("epsilon_high=0.28", "clip_eps_high"),
        ("tis_imp_ratio_cap=2", "correction: {level: token, outside: bound, max_ratio: 2}"),
        ("icepop=true", "correction: {level: token, outside: mask, min_ratio: 0.5, max_ratio: 5}"),
        ("ppo_epochs=2", "num_epochs"),
        ("loss_agg_mode=token-mean", "aggregation: token, prompt, sequence or constant"),
    ],
)
def test_an_unknown_option_gets_the_hint(override: str, hint: str) -> None:
    with pytest.raises(RecipeError, match="unknown key") as raised:
        wire(rlflow.load(["recipe=fake", f"graph.update.{override}"], CONFIG_DIR))
    fix = raised.value.notes["Fix"]
    assert fix is not None
    assert fix.endswith(hint)


def test_reinforce_plus_plus_by_its_usual_name() -> None:
    with pytest.raises(RecipeError) as raised:
        rlflow.load(["recipe=reinforce++_tiny"])
    assert raised.value.notes["Fix"] == "did you mean 'reinforce_plus_plus_tiny'?"


@pytest.mark.slow
def test_corrections_of_the_page_are_read() -> None:
    written = re.findall(r"`(\{level: [^}]*\})`", ALGORITHMS)
    assert len(written) >= 5
    for correction in written:
        overrides = ["+graph.old_logprobs={node: logprobs, role: actor}", f"graph.update.correction={correction}"]
        wire(rlflow.load(["recipe=fake", *overrides], CONFIG_DIR))


def test_the_table_beside_verl_and_trl_has_the_defaults_of_rlflow() -> None:
    (table,) = re.findall(r"\| what \| rlflow \| verl \| TRL \| option.*?(?:\n\n|\Z)", COMING_FROM, flags=re.DOTALL)
    here = {row.split("|")[1].strip(): row.split("|")[2].strip() for row in table.strip().splitlines()[2:]}

    def default(kind: str, option: str) -> object:
        return next(field.default for field in fields(KINDS[kind]) if field.name == option)

    assert float(here["added to a group's standard deviation"]) == default("group_advantage", "epsilon")
    assert float(here["the critic's clip"]) == default("value_update", "clip_eps")
    high = default("cispo_update", "clip_eps_high")
    assert isinstance(high, float)
    assert here["CISPO's bounds of the ratio"] == f"0 to {1 + high:g}"
    assert default("cispo_update", "clip_eps") is None
    assert default("policy_update", "dual_clip") is None
    assert default("batch_advantage", "unbiased") is False
    assert here["weighting in GRPO's loss"] == f"{default('policy_update', 'aggregation')}s"
