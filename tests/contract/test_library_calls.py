"""The libraries below rlflow take what rlflow passes: every call is listed, and fits the signature that is installed.

A library that renames a function or an argument fails here, and not in the middle of a run on GPUs.
"""

import ast
import inspect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import MemberDescriptorType
from typing import Any, get_args
from unittest.mock import Mock

import pytest

import rlflow
from rlflow.resources.models.lora import LORA_RANKS
from rlflow.runtime.objects.store_usage import StoreUsage
from rlflow.runtime.ray.cluster.binding import BoundPlan
from rlflow.runtime.ray.role_workers import RoleWorkers
from tests.conftest import ROOT
from tests.contract.library_scan import LIBRARIES, Call, calls_of, files, references_of
from tests.helpers import load
from tests.unit.runtime.ray.cluster.test_binding import live

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

_AUTO = "transformers.models.auto.auto_factory._BaseAutoModelClass"
# The subclasses that define these methods for the annotated class.
SUBCLASSES = {
    # Behind a decorator that hides it.
    "transformers.AutoModelForCausalLM.from_config": f"{_AUTO}.from_config",
    "transformers.AutoModelForImageTextToText.from_config": f"{_AUTO}.from_config",
    "transformers.PreTrainedModel": "transformers.Qwen2ForCausalLM",
    "transformers.PreTrainedModel.score": "transformers.Qwen2ForTokenClassification.score",
    "transformers.PreTrainedTokenizerBase": "transformers.PreTrainedTokenizerFast",
}


@cache
def found(path: str) -> Any:
    """Return what the library has at a dotted path; None for an attribute that its objects make for themselves.

    Raises AttributeError for what it has not.
    """
    names = path.split(".")
    here: Any = import_module(names[0])
    for count, name in enumerate(names[1:], start=1):
        if hasattr(here, name):
            here = getattr(here, name)
        elif isinstance(here, type):
            if not made_by_objects(here, name):
                raise AttributeError(f"{here} has no '{name}'")
            return None
        else:
            try:
                here = import_module(".".join(names[: count + 1]))
            except ModuleNotFoundError:
                # A function that hides a module of its name.
                here = getattr(import_module(".".join(names[:count])), name)
        if isinstance(here, property | MemberDescriptorType):
            return None
    return here


def made_by_objects(kind: type, name: str) -> bool:
    """Return whether objects of the class have an attribute that the class lacks."""
    if name.removesuffix("_id") in getattr(kind, "SPECIAL_TOKENS_ATTRIBUTES", ()):
        return True
    for each in kind.__mro__[:-1]:
        if name in getattr(each, "__annotations__", {}):
            return True
        try:
            if f"self.{name}" in inspect.getsource(each):
                return True
        except (OSError, TypeError):
            continue
    return False


CALLS = sorted({call for source, where in files() for call in calls_of(source, where)})


def test_every_call_is_listed(golden: Callable[[str, str], None]) -> None:
    """A new call is read before it joins the list, and has a signature test from then on."""
    golden("library_calls.txt", "".join(f"{call}\n" for call in CALLS))
    assert {call.path.partition(".")[0] for call in CALLS} == set(LIBRARIES)


def test_calls_fit_the_signatures(subtests: pytest.Subtests) -> None:
    for call in CALLS:
        with subtests.test(str(call)):
            check_signature(call)


def check_signature(call: Call) -> None:
    path = SUBCLASSES.get(call.path, call.path)
    function, owner = found(path), found(path.rpartition(".")[0])
    if function is None:
        return
    takes_self = call.bound and isinstance(owner, type)
    if takes_self:
        static = inspect.getattr_static(owner, path.rpartition(".")[2], None)
        takes_self = not isinstance(static, staticmethod | classmethod)
    elif call.bound and isinstance(function, type):
        function, takes_self = getattr(function, "forward", None) or function.__call__, True
    try:
        signature = inspect.signature(function)
    except ValueError:  # of a compiled function, which does not tell
        assert callable(function)
        return
    positional = [None] * (call.positional + takes_self)
    (signature.bind_partial if call.open_ended else signature.bind)(*positional, **dict.fromkeys(call.keywords))


def test_every_name_exists() -> None:
    """Classes, constants and functions that are passed on without a call exist too."""
    names = {name for source, where in files() for name in references_of(source, where)}
    missing = []
    for name in sorted(names):
        try:
            found(SUBCLASSES.get(name, name))
        except (AttributeError, AssertionError) as error:
            missing.append(f"{name}: {error}")
    assert missing == []


def test_ray_knows_the_options_of_workers() -> None:
    """Ray checks these options only when an actor starts."""
    from ray._common.ray_option_utils import actor_options

    plan = rlflow.compile(load("recipe=grpo_7b"), "1x8")
    bundles = plan.roles["rollout"].bundles
    placed = BoundPlan(
        group=None,
        bundle_indices={bundle: index for index, bundle in enumerate(bundles)},
        gpu_ids={bundle: str(bundle.gpu) for bundle in bundles},
        hosts={"host-0": live("host-0", simulated=True)},
    )
    actors = RoleWorkers(plan, "rollout", plan.recipe.models["policy"], placed, StoreUsage({}), Mock())
    assert actors._options(bundles[0]).keys() <= actor_options.keys()


def test_vllm_reads_the_variables_that_are_set_for_it() -> None:
    from vllm import envs

    tree = ast.parse((ROOT / "rlflow/engines/serving/settings.py").read_text())
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    variables = {text for text in texts if text.startswith("VLLM_")}
    assert len(variables) >= 5
    assert variables <= envs.environment_variables.keys()


def test_vllm_supports_the_ranks_that_it_is_given_and_none_above() -> None:
    from vllm.config.lora import MaxLoRARanks

    supported = get_args(MaxLoRARanks)
    assert set(LORA_RANKS) <= set(supported)
    assert LORA_RANKS[-1] == max(supported)


@pytest.mark.parametrize(
    ("source", "call"),
    [
        ("from vllm import LLM\nLLM('x', seed=1)", Call("vllm.LLM", 1, ("seed",))),
        ("import deepspeed\ndeepspeed.zero.Init(*a)", Call("deepspeed.zero.Init", open_ended=True)),
        ("ray = import_ray()\nray.get(1)", Call("ray.get", 1)),
        (
            "import_ray().get_runtime_context().get_job_id()",
            Call("ray.runtime_context.RuntimeContext.get_job_id", bound=True),
        ),
        ("from peft import X\nasked = X\nasked(1)", Call("peft.X", 1)),
        ("from peft import LoraConfig\nLoraConfig().save(1)", Call("peft.LoraConfig.save", 1, bound=True)),
        (
            "from transformers import Model\ndef f(model: 'Model'):\n    model.run(a=1)",
            Call("transformers.Model.run", 0, ("a",), bound=True),
        ),
    ],
)
def test_calls_are_found_however_they_are_written(source: str, call: Call) -> None:
    assert call in set(calls_of(source, "somewhere.py"))


def test_an_object_of_vllm_is_known_by_its_name() -> None:
    found = set(calls_of("def f(engine): engine.pause(mode='keep')", "engines/vllm.py"))
    assert found == {Call("vllm.LLMEngine.pause", 0, ("mode",), bound=True)}
