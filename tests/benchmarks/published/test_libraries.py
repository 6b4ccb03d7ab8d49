"""Defaults of training libraries that rows of published runs leave out; expected numbers are computed by hand."""

import pytest

from benchmarks.published import memory
from benchmarks.published.cases import Case
from benchmarks.published.settings import forwards_tokens
from tests.benchmarks.published.test_memory import SAMPLED, case, judge, row

QWEN_7B, ENDS = 7_615_616_512, 2 * 152_064 * 3584
ALONE = {"n_gpus": "1", "gpus_per_node": "1", "sharding": "none(1 gpu)"}


def bytes_of(made: Case) -> tuple[float, float, float]:
    return made.training.weights, made.training.gradients, made.training.optimizer


@pytest.mark.parametrize(
    ("cells", "bytes_"),
    [
        ({"train_backend": "fsdp", "sharding": "fsdp(zero3)", "system": "fms-acceleration(hf trainer)"}, (4, 4, 8)),
        (
            {
                "train_backend": "fsdp",
                "system": "fms-acceleration",
                "notes": "torch_dtype bfloat16, no mixed precision",
            },
            (2, 2, 4),
        ),
        ({"train_backend": "lightning fabric", "system": "litgpt", **ALONE}, (2, 2, 4)),
        ({"train_backend": "hf trainer", "system": "axolotl", "notes": "adamw_8bit", **ALONE}, (2, 2, 2)),
    ],
)
def test_precisions(cells: dict[str, str], bytes_: tuple[float, ...]) -> None:
    assert bytes_of(case(**cells)) == bytes_


def test_frozen_weights_are_bf16_except_where_a_library_loads_fp32() -> None:
    assert case(train_backend="fsdp", system="fms-acceleration", lora_rank="16").training.weights == 2
    assert case(SAMPLED, lora_rank="16").training.weights == 4
    four_bit = case(model="Qwen/Qwen2.5-7B-Instruct-AWQ", lora_rank="8").training
    outside = ENDS / QWEN_7B
    assert four_bit.weights == pytest.approx(0.53 * (1 - outside) + 2 * outside, rel=1e-6)


def test_eight_bit_weights_of_experts_are_quantised_on_request() -> None:
    def weights(notes: str) -> float:
        return case(
            system="axolotl",
            train_backend="hf trainer",
            model="Qwen/Qwen3-30B-A3B",
            params_b="30.5",
            lora_rank="8",
            notes=notes,
            **ALONE,
        ).training.weights

    experts, ends, total = 48 * 128 * 3 * 2048 * 768, 2 * 151_936 * 2048, 30_532_122_624
    assert weights("LoRA on weights of 8 bits (int8, experts too)") == pytest.approx(1 + ends / total)
    assert weights("LoRA on weights of 8 bits") == pytest.approx(1 + (ends + experts) / total)


@pytest.mark.parametrize(
    ("notes", "rank", "targets"),
    [
        ("LoRA; batch 2, packed to 2048", 8, "all-linear"),
        ("Full finetune; each technique on top of the previous except LoRA/QLoRA", None, None),
        (
            "LoRA fp32 adapters, targets q_proj,k_proj,v_proj,o_proj; chunked",
            8,
            ("q_proj", "k_proj", "v_proj", "o_proj"),
        ),
        ("LoRA q,v, bf16 weights", 8, ("q_proj", "v_proj")),
    ],
)
def test_adapters_that_the_notes_describe(notes: str, rank: int | None, targets: object) -> None:
    lora = case(system="litgpt", train_backend="lightning fabric", notes=notes, **ALONE).training.lora
    assert (lora.rank if lora else None, lora.target_modules if lora else None) == (rank, targets)


def test_concurrent_adapters_exist_beside_each_other() -> None:
    lora = case(
        system="prime-rl", train_backend="fsdp2", lora_rank="16", notes="(--max-concurrent-runs 4)"
    ).training.lora
    assert lora is not None
    assert lora.rank == 64


def test_chunks_of_logits() -> None:
    trainer = {"system": "prime-rl", "train_backend": "fsdp2", "max_tokens_per_gpu": "16384"}
    assert case(**trainer, algorithm="rl-trainer-only").training.logits_at_once == 16384 * 8192
    assert case(**trainer, algorithm="sft").training.logits_at_once == float("inf")
    agile = case(system="agilerl", train_backend="hf+peft", lora_rank="8", **ALONE).training
    assert agile.logits_at_once == 1024 * 152_064


def test_a_table_of_optimizations_adds_one_after_another() -> None:
    def training(notes: str) -> tuple[bool, float, float, float]:
        notes += "; cumulative optimisation table"
        made = case(system="torchtune", train_backend="torchtune single device", notes=notes, **ALONE).training
        return made.fused_layers, made.logits, made.gradients, made.optimizer

    assert training("+ Packed Dataset") == (False, 14, 2, 4)
    assert training("+ Compile") == (True, 14, 2, 4)
    assert training("+ Chunked Cross Entropy") == (True, 3, 2, 4)
    assert training("+ Fuse optimizer step into backward") == (True, 3, 0, 4)
    assert training("+ 8-bit AdamW") == (True, 3, 0, 2)


def test_adapters_end_a_table_of_optimizations_without_those_of_the_optimizer() -> None:
    notes = "LoRA; cumulative optimisation table"
    made = case(system="torchtune", train_backend="torchtune single device", lora_rank="8", notes=notes, **ALONE)
    assert (made.training.fused_layers, made.training.offloads_activations) == (True, True)
    assert (made.training.logits, made.training.gradients, made.training.optimizer) == (3, 2, 4)


def test_scripts_say_what_their_table_leaves_out() -> None:
    megatron = {"system": "verl", "train_backend": "megatron", "sharding": "dist-optimizer", "source_path": "moe.csv"}
    fused = case(SAMPLED, **megatron, train_tp="2", notes="script DAPO_MOE30B/11.megatron_4node_tp1ep8.sh; evidence: x")
    assert fused.training.fused_loss
    sharded = {"system": "verl", "source_path": "moe.csv"}
    assert not case(SAMPLED, **sharded, notes="script DAPO_MOE30B/2.fsdp_baseline_8node.sh").training.fused_loss


@pytest.mark.parametrize(
    ("cells", "tokens"),
    [
        # A rank has no more than its four samples.
        ({"micro_batch_per_gpu": "8", "train_batch": "4", "notes": "packed to 512", "max_total_len": "512"}, 4 * 512),
        ({"micro_batch_per_gpu": "8", "train_batch": "64", "notes": "packed to 512", "max_total_len": "512"}, 8 * 512),
        # Pairs.
        ({"micro_batch_per_gpu": "2", "algorithm": "dpo", "notes": "padded to 512", "max_total_len": "512"}, 2048),
        # finetune.py pads.
        ({"system": "qwen finetune.py (hf trainer)", "max_total_len": "1024"}, 1024),
        # The longest of thousands of samples.
        ({"system": "s1(trl)", "max_total_len": "20000"}, 20000),
    ],
)
def test_largest_micro_batches(cells: dict[str, str], tokens: int) -> None:
    made = case(**ALONE, **{"train_backend": "hf trainer", **cells})
    assert made.train.micro_batch_tokens == tokens


def test_stages_of_a_pipeline_get_one_sequence_at_a_time() -> None:
    cells = {"system": "torchtitan", "train_backend": "fsdp2", "micro_batch_per_gpu": "32", "max_total_len": "8192"}
    assert case(**cells, train_pp="8").train.micro_batch_tokens == 8192
    assert case(**cells).train.micro_batch_tokens == 32 * 8192


def test_verl_counts_prompts_and_others_count_samples() -> None:
    cells = {"prompts_per_step": "", "train_batch": "128", "n_samples": "8"}
    assert case(SAMPLED, **cells).samples == 1024
    assert case(SAMPLED, **cells, system="slime", train_backend="megatron", train_tp="1").samples == 128


@pytest.mark.parametrize(
    ("cells", "unknown"),
    [
        ({"micro_batch_per_gpu": "1", "grad_ckpt": "True"}, set()),
        # verl checkpoints unless told otherwise, except with Megatron.
        ({"micro_batch_per_gpu": "1"}, set()),
        ({"micro_batch_per_gpu": "1", "train_backend": "megatron", "sharding": ""}, {"grad_ckpt", "train_tp"}),
        ({"micro_batch_per_gpu": "1", "system": "slime"}, {"grad_ckpt"}),
        ({"micro_batch_per_gpu": "", "system": "nemo-automodel", "source_path": "pull/1"}, set()),
        ({"micro_batch_per_gpu": "", "system": "nemo-automodel", "source_path": "performance-summary"}, {"grad_ckpt"}),
        ({"micro_batch_per_gpu": "1", "grad_ckpt": "True", "rollout_tp": ""}, {"rollout_tp"}),
        ({"micro_batch_per_gpu": "", "grad_ckpt": "False"}, {"micro_batch_per_gpu"}),
        ({"micro_batch_per_gpu": "1", "grad_ckpt": "True", "placement": "disaggregate"}, {"train_gpus"}),
        # ms-swift checkpoints unless told otherwise, and its engine has one GPU.
        ({"micro_batch_per_gpu": "1", "system": "ms-swift", "rollout_tp": ""}, set()),
    ],
)
def test_unknown_settings_are_not_judged(cells: dict[str, str], unknown: set[str]) -> None:
    made = case(SAMPLED, **cells)
    assert made.unknown == unknown
    judged, skipped = memory.judge([made])
    assert bool(judged) != bool(unknown)
    assert skipped == ({"a1": f"not given: {', '.join(sorted(unknown))}"} if unknown else {})


def test_gradients_of_a_single_micro_batch_do_not_accumulate() -> None:
    alone = {**ALONE, "train_backend": "hf trainer", "micro_batch_per_gpu": "4"}
    assert not case(**alone, train_batch="4").accumulates
    assert case(**alone, train_batch="8").accumulates
    assert case(train_batch="8").accumulates  # DeepSpeed keeps its buffers


def test_a_card_is_as_large_as_the_memory_that_a_script_asks_for() -> None:
    made = judge(gpu_type="", gpu_mem_gb="", peak_mem_gb="40", peak_mem_kind="header note; equals card size")
    assert made.case.memory_gib == pytest.approx(39.6)
    assert (made.measured, made.outcome) == (None, True)


def test_ms_swift_may_gather_all_weights_at_once_for_its_engine() -> None:
    """Qwen2.5 7B has 14.2 GiB in bf16, and DeepSpeed keeps a sixth of it on each of six GPUs."""
    cells = {
        "system": "ms-swift",
        "train_backend": "deepspeed",
        "sharding": "zero3",
        "n_gpus": "6",
        "micro_batch_per_gpu": "1",
    }
    cells |= {"gpus_per_node": "6", "max_response_len": "64", "max_prompt_len": "64", "rollout_tp": "1"}
    sharded = memory.predict(case(SAMPLED, **cells, optim_offload="True"))
    whole = 2 * QWEN_7B / 2**30
    assert sharded.update_range[1] > whole + whole / 6
    assert memory.predict(case(SAMPLED, **cells, lora_rank="8")).update_range[1] < whole + whole / 6


def test_engines_of_verl_have_no_graphs() -> None:
    assert "engine graphs" in memory.predict(case(SAMPLED, system="ms-swift")).update
    assert memory.predict(case(SAMPLED)).update["engine graphs"] == 0


def test_deepep_sends_tokens_in_tables_that_say_so() -> None:
    assert forwards_tokens(row(system="nemo-automodel"))
    assert forwards_tokens(row(system="verl", notes="other: deepep+selective recompute"))
    assert not forwards_tokens(row(system="verl"))
