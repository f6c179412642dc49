"""Command lines, environments and yaml files that cannot be meant: one line each, before anything is loaded."""

import json

import pytest

COMMAND_LINES = {
    # values
    "--seed": "--seed takes one value, got none",
    "--seed x": "--seed takes a whole number, got 'x'",
    "--seed 1.5": "--seed takes a whole number, got '1.5'",
    "--seed 1e3": "--seed takes a whole number, got '1e3'",
    "--seed=": "--seed takes a whole number, got ''",
    "--seed=1=2": "--seed takes a whole number, got '1=2'",
    "--seed 1 2": "--seed takes one value, got 1 2",
    "--seed -1": "--seed must be from 0 to 2147483647, got -1",
    "--seed 99999999999999999999": "--seed must be from 0 to 2147483647, got 99999999999999999999",
    "--actor_learning_rate nan": "--actor_learning_rate takes a number, got 'nan'",
    "--actor_learning_rate inf": "--actor_learning_rate must be finite, got inf",
    "--actor_learning_rate 1e999": "--actor_learning_rate must be finite, got inf",
    "--actor_learning_rate -1": "--actor_learning_rate must be 0 or more, got -1.0",
    "--temperature inf": "--temperature must be finite, got inf",
    "--temperature 0": "--temperature must be above 0: a greedy choice has no probability to train, got 0.0",
    "--gamma 1.0001": "--gamma must be from 0 to 1, got 1.0001",
    "--adam_betas 0.9": "--adam_betas takes 2 values, got 0.9",
    "--adam_betas 0.9 1": "--adam_betas must be two numbers from 0 to below 1, got 0.9 1",
    "--reward_clip_range 1 -1": "--reward_clip_range must be two numbers, the lower first, got 1 -1",
    "--bf16 yes": "--bf16 takes no value, got 'yes': write --bf16 or --no_bf16",
    "--top_p 1.1": "--top_p must be above 0 and at most 1, got 1.1",
    "--zero_stage 4": "--zero_stage must be 0, 1, 2 or 3, got 4",
    "--engine vlm": "--engine has no 'vlm', only auto, vllm, hf (did you mean vllm?)",
    "--anomaly_ignore x": "--anomaly_ignore has no 'x', only nonfinite, grad_spike,",
    "--anomaly_spike_factor 1": "--anomaly_spike_factor must be above 1, got 1.0",
    # words that are no flags
    "--nosuch": "--nosuch: no flag here",
    "--nosuch --nor_this --seed x": "--nosuch, --nor_this: no flag here; --seed takes a whole number, got 'x'",
    "--Seed 1": "--Seed: no flag here (did you mean --seed?)",
    "---seed 1": "---seed: no flag here (did you mean --seed?)",
    "--": "--: no flag here",
    "--no_seed": "--no_seed: no flag here (did you mean --seed?)",
    # batches and lengths
    "--train_batch_size 0": "--train_batch_size must be at least 1, got 0",
    "--train_batch_size 7": "--train_batch_size 7 does not divide the 4096 samples of a step",
    "--train_batch_size 999999999999 --rollout_batch_size 999999999989": "nearest that does is 999999999989 or",
    "--generate_max_len 999999": "than the 4096 positions of --pretrain model; at most --generate_max_len 3072",
    "--max_len 10": "--max_len 10 leaves no room for a response after --prompt_max_len 1024",
    "--n_samples_per_prompt 1": "group_norm compares the samples of one prompt: it needs --n_samples_per_prompt 2",
    # names of files
    "--pretrain nowhere/at/all": "--pretrain nowhere/at/all: no such directory",
    "--pretrain p.jsonl": "--pretrain p.jsonl: there is no config.json in it",
    "--prompt_data none.jsonl": "--prompt_data none.jsonl: no such file or directory",
    "--prompt_data p.jsonl,none.jsonl": "--prompt_data none.jsonl: no such file or directory",
    "--eval_steps 1 --eval_dataset none.jsonl": "--eval_dataset none.jsonl: no such file or directory",
    "--remote_rm_url none.py": "--remote_rm_url none.py: no such file",
    "--remote_rm_url r.txt": "--remote_rm_url r.txt: takes path.py, which defines reward_func,",
    "--remote_rm_url ftp://x/y": "--remote_rm_url ftp://x/y: a reward server is http://host:port/path",
    "--save_path p.jsonl/x": "p.jsonl is a file",
    "--save_path=": "--save_path is empty: give a directory",
    "--ckpt_path p.jsonl": "--ckpt_path p.jsonl: ",
    "--save_path /dev/null/x": "--save_path /dev/null/x: /dev/null is a file",
    "--config none.yaml": "--config none.yaml: No such file or directory",
    "--config .": "--config .: Is a directory",
    # combinations
    "--stop=": "--stop must be texts that are not empty, got ''",
    "--on_anomaly rollback": "--on_anomaly rollback goes back to a checkpoint: give --save_steps,",
    "--eval_steps 2": "--eval_steps evaluates on held-out prompts: give --eval_dataset,",
    "--lambd 0.5": "--lambd is for a critic, and --advantage_estimator group_norm has none",
    "--vllm_tensor_parallel_size 2": "--vllm_tensor_parallel_size 2 does not divide the 1 rank of this run; valid: 1",
}


@pytest.mark.parametrize("words", COMMAND_LINES)
def test_command_lines(refusal, words):
    assert COMMAND_LINES[words] in refusal(*words.split(" "))


@pytest.mark.parametrize("flag", ["pretrain", "prompt_data", "remote_rm_url", "save_path", "ckpt_path"])
@pytest.mark.parametrize("name", ["x" * 5000 + "/y/z", "a\0b/c/d", "~nobody_of_that_name/a/b"])
def test_names_that_no_file_can_have_are_no_crash(here, refusal, flag, name):
    """Where the name could be one that is made later, it is taken; what is left is one line."""
    try:
        line = refusal(f"--{flag}", name)
    except pytest.fail.Exception:
        assert flag in ("save_path", "ckpt_path")
    else:
        assert line.startswith(f"--{flag} ")


@pytest.mark.parametrize(
    ("variables", "line"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set to 2 in the environment but RANK is not"),
        ({"RANK": "0"}, "RANK is set to 0 in the environment but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "x", "RANK": "0"}, "WORLD_SIZE is 'x' in the environment, not a number"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK 5, LOCAL_RANK 5 and WORLD_SIZE 2 do not fit together"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK 0, LOCAL_RANK 0 and WORLD_SIZE 0 do not fit together"),
    ],
)
def test_environments(refusal, monkeypatch, variables, line):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refusal().startswith(line)


CONFIGS = {
    "{": "model/config.json is not valid JSON",
    "": "model/config.json is not valid JSON",
    '{"a":' * 5000: "model/config.json is not valid JSON",
    "[]": "model/config.json must hold an object, {...}, not a list",
    "null": "model/config.json must hold an object, {...}, not a NoneType",
    '{"max_position_embeddings": 8}': "is more than the 8 positions of --pretrain model",
}


@pytest.mark.parametrize("text", CONFIGS, ids=lambda text: text[:20])
def test_configs_of_models(here, refusal, text):
    (here / "model" / "config.json").write_text(text)
    assert CONFIGS[text] in refusal()


def test_a_damaged_generation_config_is_not_passed_over(here, refusal):
    """transformers goes on without it, and responses without the ids of EOS that are in it."""
    (here / "model" / "generation_config.json").write_text("{x")
    assert refusal() == "--pretrain model: model/generation_config.json is not valid JSON"


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": "many"},
        {"max_position_embeddings": True},
        {"text_config": [1]},
        {"rope_scaling": "x"},
        {"rope_scaling": {"type": ["yarn"], "factor": 2}},
        {"rope_scaling": {"type": "yarn", "factor": 2, "original_max_position_embeddings": "x"}},
        {"num_attention_heads": 0},
    ],
    ids=str,
)
def test_odd_values_in_a_config_are_left_to_the_library_that_knows_them(here, refusal, config):
    (here / "model" / "config.json").write_text(json.dumps(config))
    assert refusal("--seed", "x") == "--seed takes a whole number, got 'x'"
    with pytest.raises(pytest.fail.Exception):
        refusal()


YAMLS = {
    "[1]": "must hold lines such as 'seed: 1', not a list",
    "seed": "must hold lines such as 'seed: 1', not a str",
    "seed: {": "is not yaml: while parsing",
    "seed: 1\nseed2: 2": "run.yaml: seed2: no flag here (did you mean --seed?)",
    "seed: x": "run.yaml: seed takes a whole number, got 'x'",
    "seed: 1.5": "run.yaml: seed takes a whole number, got '1.5'",
    "seed: true": "run.yaml: seed takes a whole number, got True",
    "seed: [1]": "run.yaml: seed takes a whole number, got [1]",
    "seed: {a: 1}": "run.yaml: seed takes a whole number, got {'a': 1}",
    "seed: 2001-01-01": "run.yaml: seed takes a whole number, got datetime.date(2001, 1, 1)",
    "seed: 2001-99-99": "is not yaml: month must be in 1..12",
    "seed: " + "9" * 5000: "is not yaml: Exceeds the limit (4300 digits)",
    "seed: 0x" + "f" * 5000: "run.yaml: seed is too large a number",
    "actor_learning_rate: .nan": "run.yaml: actor_learning_rate takes a number, got 'nan'",
    "actor_learning_rate: .inf": "--actor_learning_rate must be finite, got inf",
    "label_key: !!binary aGk=": "run.yaml: label_key takes text; quote it if it is, got b'hi'",
    "label_key: !!set {a, b}": "run.yaml: label_key takes text; quote it if it is, got {'",
    "1: 2": "run.yaml: 1: no flag here",
    "? [1]\n: 2": "is not yaml: while constructing a mapping",
    "a: &a [*a]": "run.yaml: a: no flag here",
    "seed: !!python/object/apply:os.system [true]": "is not yaml: could not determine a constructor for the tag",
    "[" * 3000: "is not yaml: ",
    "\0": "is not yaml: ",
    "optim:\n  seed: 1": "run.yaml: optim: no flag here",
}


@pytest.mark.parametrize("text", YAMLS, ids=lambda text: text[:20])
def test_yaml_files(here, refusal, text):
    (here / "run.yaml").write_text(text)
    assert YAMLS[text] in refusal("--config", "run.yaml")


def test_a_yaml_file_that_is_not_text(here, refusal):
    (here / "run.yaml").write_bytes(bytes(range(256)))
    assert refusal("--config", "run.yaml") == "--config run.yaml: not a text file"
