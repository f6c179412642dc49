"""The command lines of cli/generate.py and cli/chat.py: what they refuse, what their help says."""

import json
import re
import subprocess
import sys

import pytest

from spmdrl.config.chat import ChatConfig
from spmdrl.config.flags import flags_of
from spmdrl.config.generate import GenerateConfig, PromptColumnsConfig
from spmdrl.config.parse import read_config
from spmdrl.config.sections import PromptDataConfig
from spmdrl.errors import UserError
from tests.config.conftest import ROOT

PROGRAMS = {"generate": GenerateConfig, "chat": ChatConfig}
REWARDED = "--reward_func reward.py:f --n_samples_per_prompt 4"


def refusal(cls, flags):
    with pytest.raises(UserError) as error:
        read_config(cls, flags.split())
    return str(error.value)


@pytest.mark.parametrize(
    ("cls", "flags", "message"),
    [
        (GenerateConfig, "--best_of_n 4", "--best_of_n: no flag here (it is called --n_samples_per_prompt)"),
        (GenerateConfig, "--tp_size 2", "--tp_size: no flag here (it is called --vllm_tensor_parallel_size)"),
        (GenerateConfig, "--generate_max_len 2", "--generate_max_len: no flag here (it is called --max_new_tokens)"),
        (GenerateConfig, "--repetition_penalty 2", "--repetition_penalty: not supported yet (tokens are sampled"),
        (GenerateConfig, "--enable_csft", "--enable_csft: not supported yet"),
        (GenerateConfig, "--post_processor csft", "--post_processor has no 'csft', only rs, iter_dpo"),
        (GenerateConfig, "--max_new_tokens 0", "--max_new_tokens must be at least 1, got 0"),
        (GenerateConfig, "--temperature 0", "--temperature must be above 0"),
        (GenerateConfig, "--greedy_sampling --top_p 0.5", "--top_p changes nothing with --greedy_sampling"),
        (
            GenerateConfig,
            "--greedy_sampling --n_samples_per_prompt 2",
            "--greedy_sampling gives the same response 2 times",
        ),
        (
            GenerateConfig,
            "--post_processor rs --n_samples_per_prompt 4",
            "--post_processor rs compares rewards: give --reward_pretrain, --remote_rm_url or --reward_func",
        ),
        (
            GenerateConfig,
            "--post_processor iter_dpo --reward_func r.py:f",
            "--post_processor iter_dpo compares the responses to one prompt: it needs --n_samples_per_prompt 2",
        ),
        (GenerateConfig, f"{REWARDED} --reward_threshold 1", "--reward_threshold changes nothing without"),
        (
            GenerateConfig,
            f"{REWARDED} --post_processor iter_dpo --reward_threshold 1",
            "--reward_threshold changes nothing without --post_processor rs",
        ),
        (GenerateConfig, f"{REWARDED} --normalize_reward", "--normalize_reward is for the models of"),
        (GenerateConfig, f"{REWARDED} --output_key reward", "two of the columns reward, reward, reward_finish_reason"),
        (
            GenerateConfig,
            f"{REWARDED} --post_processor iter_dpo --output_key answer",
            "--output_key names no column with --post_processor iter_dpo",
        ),
        (GenerateConfig, "--chosen_key better", "--chosen_key names no column with --post_processor None"),
        (GenerateConfig, "--input_template {} --apply_chat_template", "--input_template and --apply_chat_template"),
        (ChatConfig, "--apply_chat_template", "--apply_chat_template: no flag here (the chat template is used unless"),
        (ChatConfig, "--ta_prompt x", "--ta_prompt: no flag here (it is called --system_prompt)"),
        (ChatConfig, "--repetition_penalty 0", "--repetition_penalty must be above 0; 1 is none, got 0.0"),
        (ChatConfig, "--greedy_sampling --temperature 0.5", "--temperature changes nothing with --greedy_sampling"),
    ],
)
def test_what_cannot_be_meant_is_refused(cls, flags, message):
    assert refusal(cls, flags).startswith(message)


def test_one_response_is_enough_for_a_threshold():
    flags = "--post_processor rs --reward_func r.py:f --reward_threshold 1"
    assert read_config(GenerateConfig, flags.split()).new_columns == ("output", "reward", "output_finish_reason")


def test_flags_of_prompts_reach_what_renders_them():
    flags = "--input_key q --label_key a --input_template Q:{} --prompt_max_len 9 --max_samples 5"
    config = read_config(GenerateConfig, flags.split())
    shared = flags_of(PromptDataConfig).keys() & flags_of(PromptColumnsConfig).keys()
    assert {"input_key", "label_key", "input_template", "prompt_max_len", "max_samples"} <= shared
    assert all(getattr(config.prompts, name) == getattr(config.data, name) for name in shared)


def test_sampling_flags_reach_the_engine():
    flags = "--n_samples_per_prompt 3 --top_k 5 --stop a b --max_new_tokens 7 --vllm_tensor_parallel_size 2"
    rollout = read_config(GenerateConfig, flags.split()).rollout
    assert (rollout.n_samples_per_prompt, rollout.top_k, rollout.stop) == (3, 5, ("a", "b"))
    assert (rollout.generate_max_len, rollout.vllm_tensor_parallel_size, rollout.temperature) == (7, 2, 1.0)
    assert read_config(GenerateConfig, ["--greedy_sampling"]).rollout.temperature == 0


@pytest.mark.parametrize("program", PROGRAMS)
def test_an_error_is_one_line(program):
    command = [sys.executable, str(ROOT / "cli" / f"{program}.py"), "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done
    assert done.stderr.startswith("error: --pretrain is missing: ")


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_comes_without_heavy_imports(program):
    script = str(ROOT / "cli" / f"{program}.py")
    done = subprocess.run([sys.executable, "-X", "importtime", script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, flags=re.M))
    assert not imported & {"torch", "transformers", "numpy", "deepspeed", "yaml"}
    for flag in flags_of(PROGRAMS[program]):
        assert f"  --{flag}" in done.stdout


def test_what_generation_needs_is_looked_for_before_anything_loads(tmp_path, model_dir):
    def error(*flags):
        with pytest.raises(UserError) as error:
            read_config(GenerateConfig, [*map(str, flags)]).validate(1)
        return str(error.value)

    assert error().startswith("--pretrain is missing: ")
    given = ["--pretrain", model_dir, "--dataset", __file__]
    assert error(*given).startswith("--output_path is missing: ")
    given += ["--output_path", tmp_path / "out.jsonl"]
    assert error(*given, "--dataset", "no.jsonl") == "--dataset no.jsonl: no such file or directory"
    assert error(*given, "--reward_func", "no.py:f") == "--reward_func no.py: no such file"
    assert error(*given, "--reward_pretrain", "./no") == "--reward_pretrain ./no: no such directory"
    assert error(*given, "--vllm_tensor_parallel_size", "2").startswith("--vllm_tensor_parallel_size 2 does not")
    message = error(*given, "--max_new_tokens", "1025")
    assert message.startswith("--prompt_max_len 1024 + --max_new_tokens 1025 is more than the 2048 positions")
    assert message.endswith("at most --max_new_tokens 1024")
    assert error(*given, "--output_path", tmp_path).endswith("is a directory: give a file in it")
    (tmp_path / "out.jsonl").write_text("")
    assert error(*given).endswith("out.jsonl is there already: remove it, or give another")
    (tmp_path / "out.jsonl.partial").write_text("")
    message = error(*given, "--dataset", tmp_path / "out.jsonl")
    assert message.endswith(f"would overwrite --dataset {tmp_path / 'out.jsonl'}: give another place")


def test_what_a_chat_needs_is_looked_for_before_anything_loads(tmp_path, model_dir):
    def error(*flags):
        with pytest.raises(UserError) as error:
            read_config(ChatConfig, [*map(str, flags)]).validate(1)
        return str(error.value)

    assert error("--pretrain", "./no") == "--pretrain ./no: no such directory"
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for damaged in ("{}", "[]", "{", "[" * 5000):
        (adapter / "adapter_config.json").write_text(damaged)
        assert error("--pretrain", adapter).endswith("adapter_config.json in it names no base_model_name_or_path")
    content = {"base_model_name_or_path": "/no/base", "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(content))
    assert "is a LoRA adapter of /no/base, which is not there" in error("--pretrain", adapter)
    (adapter / "adapter_config.json").write_text(json.dumps(content | {"task_type": "SEQ_CLS"}))
    assert error("--pretrain", adapter).endswith(
        "is the adapter of a reward model or critic, which scores texts and writes none: give a causal LM, or the "
        "adapter of one"
    )
    (model_dir / "config.json").write_text(json.dumps({"architectures": ["LlamaForSequenceClassification"]}))
    assert " is a LlamaForSequenceClassification, which scores texts" in error("--pretrain", model_dir)
    output = ["--dataset", __file__, "--output_path", tmp_path / "out.jsonl"]
    with pytest.raises(UserError, match="is a LlamaForSequenceClassification"):
        read_config(GenerateConfig, [*map(str, ("--pretrain", model_dir, *output))]).validate(1)
