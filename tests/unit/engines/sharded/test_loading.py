"""The functions of transformers that are replaced while a ZeRO-3 model loads are there, and are called so."""

from inspect import getsource, signature

from transformers import PreTrainedModel, modeling_utils


def test_transformers_reads_files_and_loads_models_by_these_functions() -> None:
    source = getsource(PreTrainedModel._load_pretrained_model)
    assert "_load_state_dict_into_zero3_model(model, state_dict, load_config)" in source
    assert "load_state_dict(" in source
    read, load = modeling_utils.load_state_dict, modeling_utils._load_state_dict_into_zero3_model
    assert next(iter(signature(read).parameters)) == "checkpoint_file"
    assert list(signature(load).parameters) == ["model_to_load", "state_dict", "load_config"]
