import json

import pytest

from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.config.preflight import is_installed, looks_local, model_positions, read_model_config
from spmdrl.errors import UserError


@pytest.fixture
def validate(complete):
    """validate(flag=value, ..., world_size=1): the checks of a complete command line with these flags changed."""

    def validate(*switches, world_size=1, **changes):
        words = dict(zip(complete[::2], complete[1::2], strict=True)) | {f"--{k}": str(v) for k, v in changes.items()}
        given = [word for flag, value in words.items() if value != "absent" for word in (flag, value)]
        read_config(PPOConfig, [*given, *switches]).validate(world_size)

    return validate


@pytest.fixture
def refusal(validate):
    def refusal(*switches, **changes):
        with pytest.raises(UserError) as error:
            validate(*switches, **changes)
        return str(error.value)

    return refusal


def test_a_complete_command_line_passes(validate):
    validate()
    validate(world_size=7)  # no batch has to divide by the ranks


@pytest.mark.parametrize("flag", ["pretrain", "prompt_data"])
def test_what_has_to_be_given(refusal, flag):
    assert refusal(**{flag: "absent"}).startswith(f"--{flag} is missing: ")


def test_there_is_a_reward(refusal, validate, model_dir, tmp_path):
    message = refusal(remote_rm_url="absent")
    assert all(flag in message for flag in ("--remote_rm_url", "--reward_func", "--reward_pretrain"))
    validate(remote_rm_url="absent", reward_pretrain=model_dir)
    validate(reward_func=f"{tmp_path / 'reward.py'}:reward_func")  # beside the file of --remote_rm_url
    validate(reward_pretrain=f"{model_dir}, owner/name", remote_rm_url="http://localhost:5000/get_reward")


def test_each_reward_model_is_looked_for(refusal, model_dir):
    message = refusal(reward_pretrain=f"{model_dir},./no")
    assert message == "--reward_pretrain ./no: no such directory"


def test_the_default_estimator_is_taken_and_its_critic_looked_for(refusal, validate, model_dir, tmp_path):
    validate(advantage_estimator="absent")
    validate(advantage_estimator="gae", critic_pretrain=model_dir)
    message = refusal(advantage_estimator="gae", critic_pretrain=tmp_path / "no")
    assert message == f"--critic_pretrain {tmp_path / 'no'}: no such directory"


def test_files_that_do_not_exist_are_named(refusal, tmp_path):
    (tmp_path / "empty").mkdir()
    assert refusal(pretrain=tmp_path / "no") == f"--pretrain {tmp_path / 'no'}: no such directory"
    assert refusal(pretrain=tmp_path / "empty") == f"--pretrain {tmp_path / 'empty'}: there is no config.json in it"
    assert refusal(prompt_data="no.jsonl") == "--prompt_data no.jsonl: no such file or directory"
    assert refusal(prompt_data="./no@test") == "--prompt_data ./no: no such file or directory"
    assert refusal(remote_rm_url="no.py") == "--remote_rm_url no.py: no such file"
    assert refusal(remote_rm_url="absent", reward_func="no.py:f") == "--reward_func no.py: no such file"
    for spec in (tmp_path / "prompts.jsonl", "reward:f", "reward"):
        assert "takes path.py, which defines reward_func, or path.py:name" in refusal(remote_rm_url=spec)


def test_an_adapter_is_no_model(refusal, tmp_path):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    assert refusal(pretrain=tmp_path / "adapter").endswith(
        "adapter is a LoRA adapter: make a whole model of it with cli/merge_lora.py"
    )


@pytest.mark.parametrize(
    ("architectures", "is_refused"),
    [
        (["LlamaForSequenceClassification"], True),
        (["BertForTokenClassification"], True),
        (["LlamaForCausalLM"], False),
        ([], False),
        (None, False),
        ("text", False),
    ],
)
def test_a_model_that_scores_texts_is_no_policy(refusal, validate, model_dir, tmp_path, architectures, is_refused):
    """It may be the critic, or the reward model."""
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps({"architectures": architectures}))
    validate(advantage_estimator="gae", critic_pretrain=scorer, reward_pretrain=scorer)
    if not is_refused:
        return validate(pretrain=scorer)
    expected = f"--pretrain {scorer} is a {architectures[0]}, which scores texts (a reward model or critic?) and"
    assert refusal(pretrain=scorer).startswith(expected)


@pytest.mark.parametrize("flag", ["pretrain", "critic_pretrain"])
def test_weights_in_few_bits_are_not_trained(refusal, validate, tmp_path, flag):
    packed = tmp_path / "packed"
    packed.mkdir()
    (packed / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    flags = {"advantage_estimator": "gae", flag: packed}
    assert refusal(**flags).startswith(f"--{flag} {packed} has quantised weights (gptq in its config.json), which ")
    (packed / "config.json").write_text(json.dumps({"quantization_config": None}))
    validate(**flags)


def test_each_of_several_sources_is_looked_for(refusal, validate, tmp_path):
    good = tmp_path / "prompts.jsonl"
    validate(prompt_data=f"{good}, {good}@train,openai/gsm8k@main", prompt_data_probs="0.5,0.2,0.3")
    assert refusal(prompt_data=f"{good},no.csv") == "--prompt_data no.csv: no such file or directory"


def test_a_server_is_no_function(refusal):
    message = refusal(reward_func="http://localhost:5000/get_reward")
    assert message == "--reward_func http://localhost:5000/get_reward: a reward server goes to --remote_rm_url"


def test_save_path_must_be_writable(refusal, tmp_path):
    file = tmp_path / "prompts.jsonl"
    assert refusal(save_path=file / "out") == f"--save_path {file / 'out'}: {file} is a file"


def test_a_link_that_leads_nowhere_is_no_place_to_save(refusal, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    message = refusal(ckpt_path=tmp_path / "link" / "ckpt")
    assert message.endswith(f"{tmp_path / 'link'} is a link to {tmp_path / 'gone'}, which is not there")


@pytest.mark.parametrize("flag", ["save_path", "ckpt_path"])
@pytest.mark.parametrize("other", ["pretrain", "critic_pretrain", "reward_pretrain"])
def test_no_input_is_overwritten(refusal, validate, model_dir, tmp_path, monkeypatch, flag, other):
    """By whatever name: as it is, relative, with a slash at its end, or through a link."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    model_dir.rename(inputs / "own")
    for name in ("own", "other"):
        (inputs / name).mkdir(exist_ok=True)
        (inputs / name / "config.json").write_text("{}")
    (tmp_path / "link").symlink_to(inputs)
    monkeypatch.chdir(tmp_path)
    flags = {"pretrain": inputs / "own", "advantage_estimator": "gae", other: inputs / "other"}
    for place in (inputs / "other", "inputs/other", "inputs/other/", "inputs/../inputs/other", "link/other"):
        message = refusal(**flags, **{flag: place})
        assert message == f"--{flag} {place} would overwrite --{other} {inputs / 'other'}: give another place"
    validate(**flags, **{flag: inputs})  # beside it is not over it
    validate(**flags, **{flag: inputs / "other" / "new"})


def test_parts_of_what_is_saved_overwrite_nothing_either(refusal, model_dir, tmp_path):
    for name in ("ema", "critic"):
        (tmp_path / "run" / name).mkdir(parents=True)
        (tmp_path / "run" / name / "config.json").write_text("{}")
        assert "would overwrite --pretrain" in refusal(pretrain=tmp_path / "run" / name, save_path=tmp_path / "run")


def test_a_hub_name_is_not_the_name_of_the_output_too(refusal, tmp_path, monkeypatch):
    """Once it is made, the directory would be taken for the model."""
    monkeypatch.chdir(tmp_path)
    assert "would overwrite --pretrain owner/name" in refusal(pretrain="owner/name", save_path="./owner/name")


@pytest.mark.parametrize(
    ("name", "is_local"),
    [
        ("Qwen/Qwen2.5-7B", False),
        ("gpt2", False),
        ("/data/model", True),
        ("./model", True),
        ("runs/demo/model", True),
        ("prompts.jsonl", True),
        ("data/prompts.jsonl", True),
        ("", False),
    ],
)
def test_names_that_must_be_on_this_machine(name, is_local):
    assert looks_local(name) == is_local


# ---- the model's config.json ------------------------------------------------------------------------------------
def test_prompt_and_response_must_fit_the_models_positions(refusal, validate):
    validate(prompt_max_len=1024, generate_max_len=1024)
    message = refusal(prompt_max_len=1024, generate_max_len=1025)
    assert message.startswith(
        "--prompt_max_len 1024 + --generate_max_len 1025 is more than the 2048 positions of --pretrain"
    )
    assert message.endswith("at most --generate_max_len 1024")
    assert refusal(prompt_max_len=4096).endswith("lower --prompt_max_len below 2048")
    assert refusal(max_len=3000).startswith("--max_len 3000 is more than the 2048 positions")
    validate(max_len=2000, generate_max_len=9999)


@pytest.mark.parametrize(
    ("config", "positions"),
    [
        ({"n_positions": 1024}, 1024),
        ({"vocab_size": 10}, None),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (  # Llama 3.1 states the extended length itself
            {
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        ({"max_position_embeddings": 2048, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 2048),
    ],
)
def test_positions_of_a_model(config, positions):
    assert model_positions(config) == positions


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        {"rope_scaling": {"type": "su", "original_max_position_embeddings": 300}},
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 300}},
    ],
)
def test_lengths_are_refused_at_which_log_probs_depend_on_the_micro_batch(refusal, validate, tmp_path, rope):
    (tmp_path / "phi").mkdir()
    config = {"max_position_embeddings": 4096, "original_max_position_embeddings": 300, **rope}
    (tmp_path / "phi" / "config.json").write_text(json.dumps(config))
    validate(pretrain=tmp_path / "phi", prompt_max_len=100, max_len=300)
    message = refusal(pretrain=tmp_path / "phi", prompt_max_len=100, max_len=301)
    assert message.startswith(f"--pretrain {tmp_path / 'phi'} computes micro-batches with more than 300 tokens other")


def test_the_critics_positions_bound_the_lengths_too(refusal, tmp_path):
    """The policy has 2048 positions, the critic 512."""
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text('{"max_position_embeddings": 512}')
    message = refusal(advantage_estimator="gae", critic_pretrain=tmp_path / "critic", prompt_max_len=256)
    assert message.endswith(
        f"512 positions of --critic_pretrain {tmp_path / 'critic'}; at most --generate_max_len 256"
    )


def test_a_hub_model_is_looked_up_in_the_local_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_model_config("pretrain", "owner/name") is None
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"text_config": {"n_positions": 7}}))
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("abc\n")
    assert read_model_config("pretrain", "owner/name") == {"n_positions": 7}


def test_a_damaged_config_json_is_named(refusal, model_dir):
    (model_dir / "config.json").write_text("{")
    assert refusal() == f"--pretrain {model_dir}: {model_dir / 'config.json'} is not valid JSON"


def test_tensor_parallel_size_divides_ranks_and_heads(refusal, validate):
    """The model has 6 heads."""
    validate(vllm_tensor_parallel_size=3, world_size=6)
    message = refusal(vllm_tensor_parallel_size=2, world_size=3)
    assert message == "--vllm_tensor_parallel_size 2 does not divide the 3 ranks of this run; valid: 1, 3"
    message = refusal(vllm_tensor_parallel_size=4, world_size=8)
    assert message.startswith("--vllm_tensor_parallel_size 4 does not divide the 6 attention heads of --pretrain")
    assert message.endswith("valid on 8 ranks: 1, 2")


def test_zpg_divides_the_ranks(refusal):
    message = refusal(zpg=2, zero_stage=3)
    assert message == "--zpg 2 does not divide the 1 rank of this run; valid: 1"


# ---- packages ---------------------------------------------------------------------------------------------------
def test_flags_that_need_a_missing_package_name_it(refusal, validate, monkeypatch):
    monkeypatch.setattr("spmdrl.config.preflight.is_installed", lambda package: False)
    assert refusal(use_wandb="True").startswith("--use_wandb needs the package wandb: pip install wandb")
    assert refusal(use_tensorboard="tb").startswith("--use_tensorboard needs the package tensorboard")
    assert refusal(engine="vllm").startswith("--engine vllm needs the package vllm")
    assert refusal(lora_rank=8).startswith("--lora_rank needs the package peft: pip install peft")
    validate(engine="auto")


def test_a_directory_is_no_package(tmp_path, monkeypatch):
    (tmp_path / "logs_of_a_tool").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert not is_installed("logs_of_a_tool")
    assert not is_installed("not_there_at_all")
    assert is_installed("pytest")
