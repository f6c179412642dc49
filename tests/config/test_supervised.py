"""The supervised command lines: what they refuse, and what their help says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.config.flags import flags_of
from spmdrl.config.parse import read_config
from spmdrl.config.supervised import DPOConfig, KDConfig, KTOConfig, RMConfig, SFTConfig
from spmdrl.config.supervised_checks import RANGES
from spmdrl.errors import UserError
from tests.config.conftest import ROOT

PROGRAMS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "kto": KTOConfig, "kd": KDConfig}


def read(cls, flags):
    return read_config(cls, flags.split())


def refusal(cls, flags):
    with pytest.raises(UserError) as error:
        read(cls, flags)
    return str(error.value)


def test_ranges_name_flags_that_exist():
    known = {name for cls in PROGRAMS.values() for name in flags_of(cls)}
    assert {"learning_rate", "beta", "max_len", "kd_coef", "label_smoothing"} <= set(RANGES) & known


@pytest.mark.parametrize(
    ("cls", "flags", "message"),
    [
        (DPOConfig, "--beta 0", "--beta must be above 0, got 0.0"),
        (DPOConfig, "--label_smoothing 0.5", "--label_smoothing must be from 0 to below 0.5, got 0.5"),
        (DPOConfig, "--ipo --label_smoothing 0.1", "--label_smoothing smooths the sigmoid loss, which --ipo replaces"),
        (RMConfig, "--loss hinge", "--loss has no 'hinge', only sigmoid, logexp"),
        (RMConfig, "--max_len 1", "--max_len must be at least 2, got 1"),
        (RMConfig, "--compute_fp32_loss", "--compute_fp32_loss: no flag here (scores and losses are always fp32"),
        (DPOConfig, "--ref_offload", "--ref_offload: no flag here (the reference model scores all rows before"),
        (SFTConfig, "--ring_attn_size 2", "--ring_attn_size: not supported yet (a sequence stays on one rank"),
        (SFTConfig, "--per_device_train_batch_size 2", "--per_device_train_batch_size: no flag here (it is called"),
        (SFTConfig, "--multiturn --output_key o", "--multiturn learns the turns of the chat template"),
        (
            SFTConfig,
            "--multiturn --apply_chat_template --output_key o",
            "--multiturn takes whole conversations from --input_key: leave --output_key out",
        ),
        (SFTConfig, "--pretrain_mode --apply_chat_template", "--pretrain_mode learns plain texts as they are"),
        (SFTConfig, "--pretrain_mode --input_template {}", "--pretrain_mode learns plain texts as they are"),
        (
            SFTConfig,
            "--input_template {} --apply_chat_template",
            "--input_template and --apply_chat_template both shape the prompt",
        ),
        (SFTConfig, "--zero_stage 0 --adam_offload --output_key o", "--adam_offload needs --zero_stage 1, 2 or 3"),
        (KDConfig, "--kd_coef 2", "--kd_coef must be from 0 to 1, got 2.0"),
    ],
)
def test_what_cannot_be_meant_is_refused(cls, flags, message):
    assert refusal(cls, flags).startswith(message)


def test_the_template_of_old_command_lines_gives_way_to_the_chat_template():
    assert read(SFTConfig, "--output_key o").data.input_template == "User: {}\nAssistant: "
    assert read(SFTConfig, "--apply_chat_template").data.apply_chat_template


def test_held_out_rows_may_be_a_split_of_the_data_set():
    assert read(SFTConfig, "--eval_split validation --eval_on_start").data.eval_split == "validation"


def test_each_program_says_whether_its_frozen_models_rest_in_host_memory():
    assert read(KDConfig, "--teacher_offload").offloads_frozen_models
    assert not any(cls().offloads_frozen_models for cls in PROGRAMS.values())


def test_defaults_are_those_of_the_program():
    assert read(SFTConfig, "--output_key o").optim.max_epochs == 2
    assert read(RMConfig, "").optim.max_epochs == 1
    assert read(RMConfig, "--seed 3").optim.micro_train_batch_size == 1
    assert read(KDConfig, "--max_len 9").data.output_key == "output"
    assert read(DPOConfig, "").tracking.wandb_project == "spmdrl_train_dpo"


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_and_errors_of_the_scripts_come_without_heavy_imports(program, tmp_path, model_dir):
    script = str(ROOT / "cli" / f"train_{program}.py")
    done = subprocess.run([sys.executable, "-X", "importtime", script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, flags=re.M))
    assert not imported & {"torch", "transformers", "numpy", "deepspeed"}
    for flag in flags_of(PROGRAMS[program]):
        assert f"  --{flag}" in done.stdout

    def error(*flags):
        done = subprocess.run([sys.executable, script, *map(str, flags)], capture_output=True, text=True, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
        return done.stderr

    shape = ["--output_key", "output"] if program in ("sft", "kto", "kd") else []
    assert error(*shape).startswith("error: --pretrain is missing: ")
    given = [*shape, "--pretrain", model_dir]
    assert error(*given).startswith("error: --dataset is missing: ")
    given += ["--dataset", Path(__file__)]
    if program == "kd":
        assert error(*given).startswith("error: --teacher_model is missing: ")
        given += ["--teacher_model", model_dir]
    if program in ("sft", "kto"):
        assert error(*given[2:]).startswith("error: --output_key is missing, the column with the response")
    assert error(*given, "--dataset", "no.jsonl") == "error: --dataset no.jsonl: no such file or directory\n"
    assert error(*given, "--dataset", __file__, "--ckpt_path", model_dir).startswith(
        f"error: --ckpt_path {model_dir} would overwrite --pretrain {model_dir}"
    )
    assert error(*given, "--max_len", "4096").startswith("error: --max_len 4096 is more than the 2048 positions of")
    if program in ("dpo", "kto"):
        config = json.loads((model_dir / "config.json").read_text()) | {
            "rope_scaling": {"type": "dynamic", "factor": 2}
        }
        (model_dir / "config.json").write_text(json.dumps(config))
        line = error(*given, "--max_len", "2049")
        assert line.startswith(f"error: --pretrain {model_dir} computes micro-batches with more than 2048 tokens")


@pytest.mark.parametrize("program", PROGRAMS)
def test_only_a_reward_model_is_trained_from_a_model_that_scores_texts(program, tmp_path, model_dir):
    (tmp_path / "scorer").mkdir()
    (tmp_path / "scorer" / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    shape = ["--output_key", "output"] if program in ("sft", "kto", "kd") else []
    words = ["--dataset", __file__, "--pretrain", tmp_path / "scorer", "--save_path", tmp_path / "out", *shape]
    words += ["--teacher_model", model_dir] if program == "kd" else []
    config = read_config(PROGRAMS[program], [*map(str, words)])
    if program == "rm":
        return config.validate(1)
    with pytest.raises(UserError, match=f"--pretrain {tmp_path}/scorer is a LlamaForSequenceClassification, which"):
        config.validate(1)


@pytest.mark.parametrize(
    ("program", "flag"), [("dpo", "ref_pretrain"), ("kto", "ref_pretrain"), ("kd", "teacher_model")]
)
def test_the_other_model_is_not_overwritten(program, flag, tmp_path, model_dir):
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    shape = ["--output_key", "output"] if program == "kto" else []
    words = [*shape, "--pretrain", model_dir, "--dataset", __file__, f"--{flag}", other, "--save_path", other]
    with pytest.raises(UserError, match=f"--save_path {other} would overwrite --{flag} {other}"):
        read_config(PROGRAMS[program], [*map(str, words)]).validate(1)
