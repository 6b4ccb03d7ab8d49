from pathlib import Path

import pytest
from omegaconf import OmegaConf

from rlflow.resources.model import Architecture
from tests.conftest import ROOT
from tests.helpers import ARCHITECTURE

CARDS = sorted((ROOT / "conf" / "model").glob("*.yaml"))


def card(path: Path) -> Architecture:
    return Architecture(**OmegaConf.to_container(OmegaConf.load(path))["architecture"])  # type: ignore[index,call-overload,arg-type]


@pytest.mark.parametrize("architecture", [ARCHITECTURE, *map(card, CARDS)], ids=["tiny", *(p.stem for p in CARDS)])
@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_parameters_are_those_of_the_modules(architecture: Architecture, model_type: str) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    figures = vars(architecture) | {"model_type": model_type}
    theta = figures.pop("rope_theta")
    config = AutoConfig.for_model(**figures, rope_parameters={"rope_type": "default", "rope_theta": theta})
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert Architecture(**figures).num_parameters == sum(weight.numel() for weight in built.parameters())


@pytest.mark.parametrize(("name", "billions"), [("qwen2_5_7b", 7.615616512), ("qwen2_5_32b", 32.763876352)])
def test_parameters_are_those_of_the_published_weights(name: str, billions: float) -> None:
    """Source: the sizes that the models' pages on the hub state for their safetensors."""
    assert card(ROOT / "conf" / "model" / f"{name}.yaml").num_parameters == round(billions * 1e9)
