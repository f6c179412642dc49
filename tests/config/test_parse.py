import resource
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Literal

import pytest
import tyro
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmdrl.config import PPOConfig, RolloutConfig, parse_config, save_config, to_flat_dict
from spmdrl.config.flags import build, flags_of, values_of
from spmdrl.config.parse import read_config, read_words, read_yaml
from spmdrl.errors import UserError
from tests.config.conftest import ROOT


def read(*words):
    return read_config(PPOConfig, list(words))


def refusal(*words):
    with pytest.raises(UserError) as error:
        read(*words)
    return str(error.value)


# ---- the command line -------------------------------------------------------------------------------------------
def test_flat_flags_fill_nested_sections():
    config = read(
        "--rollout_batch_size", "256", "--actor_learning_rate", "3e-5", "--label_key", "answer", "--seed", "7"
    )
    assert config.rollout.rollout_batch_size == 256
    assert config.optim.actor_learning_rate == 3e-5
    assert config.data.label_key == "answer"
    assert config.seed == 7
    assert config.rollout.generate_max_len == RolloutConfig().generate_max_len


def test_flags_with_several_values():
    config = read("--adam_betas", "0.8", "0.99", "--reward_clip_range", "-5", "inf", "--stop", "</answer>", "User:")
    assert config.optim.adam_betas == (0.8, 0.99)
    assert config.algo.reward_clip_range == (-5.0, float("inf"))
    assert config.rollout.stop == ("</answer>", "User:")


def test_switches_need_no_value_and_can_be_switched_off():
    assert read("--adam_offload").deepspeed.adam_offload is True
    assert read("--adam_offload", "--no_adam_offload").deepspeed.adam_offload is False
    assert read("--no_advantage_std_norm").algo.no_advantage_std_norm is True


def test_bf16_is_on_off_or_left_to_the_device():
    assert [read(*words).model.bf16 for words in ([], ["--bf16"], ["--no_bf16"])] == [None, True, False]


def test_flash_attn_is_an_attention_kernel():
    assert read("--flash_attn").model.attention == "flash_attention_2"


def test_an_equals_sign_gives_values_that_look_like_flags():
    assert read("--input_template=--{}").data.input_template == "--{}"
    assert read("--local_rank=1").deepspeed.local_rank == 1  # as the deepspeed launcher writes it
    assert read("--top_k", "-1").rollout.top_k == -1


def test_the_last_of_two_equal_flags_counts():
    assert read("--seed", "1", "--seed", "2").seed == 2


def test_none_takes_a_value_back():
    assert read("--rollout_token_cap", "None", "--rollout_correction", "seq-mask-tis").algo.rollout_token_cap is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temprature", "1"], "--temprature: no flag here (did you mean --temperature?)"),
        (["--train-batch-size", "4"], "--train-batch-size: no flag here (did you mean --train_batch_size?)"),
        (["--frobnicate"], "--frobnicate: no flag here"),
        (["-s", "1"], "-s: no flag here"),
        (["train", "--seed", "1"], "'train' comes before any flag; every value follows its --flag"),
        (["--seed"], "--seed takes one value, got none"),
        (["--seed", "1", "2"], "--seed takes one value, got 1 2"),
        (["--seed", "1e3"], "--seed takes a whole number, got '1e3'"),
        (["--l2", "nan"], "--l2 takes a number, got 'nan'"),
        (["--adam_betas", "0.9"], "--adam_betas takes 2 values, got 0.9"),
        (
            ["--adam_offload", "True"],
            "--adam_offload takes no value, got 'True': write --adam_offload or --no_adam_offload",
        ),
        (["--engine", "vlm"], "--engine has no 'vlm', only auto, vllm, hf (did you mean vllm?)"),
        (["--num_generations", "8"], "--num_generations: no flag here (it is called --n_samples_per_prompt)"),
    ],
)
def test_mistakes_are_named_with_the_nearest_that_is_right(words, message):
    assert refusal(*words) == message


def test_everything_wrong_with_the_flags_is_said_at_once():
    message = refusal(
        "--ring_attn_size", "2", "--ring_head_stride", "1", "--vllm_num_engines", "2", "--seeed", "1", "--l2", "x"
    )
    assert message.startswith("--ring_attn_size, --ring_head_stride: not supported yet (")
    assert "; --vllm_num_engines: no flag here (" in message
    assert "; --seeed: no flag here (did you mean --seed?)" in message
    assert message.endswith("; --l2 takes a number, got 'x'")


def test_choices_are_the_keys_of_the_algorithm_tables():
    """The tables are read as text; here they are imported, to see that the text says the same."""
    from spmdrl.algos.advantages import ESTIMATORS
    from spmdrl.algos.corrections import CORRECTIONS
    from spmdrl.algos.kl import KL_ESTIMATORS
    from spmdrl.algos.losses import AGGREGATIONS, POLICY_LOSSES

    flags = flags_of(PPOConfig)
    assert flags["advantage_estimator"].choices == tuple(ESTIMATORS)
    assert flags["policy_loss"].choices == tuple(POLICY_LOSSES)
    assert flags["loss_aggregation"].choices == ("auto", *AGGREGATIONS)
    assert flags["kl_estimator"].choices == tuple(KL_ESTIMATORS)
    assert flags["rollout_correction"].choices == ("auto", *CORRECTIONS)
    for name, estimator in ESTIMATORS.items():
        properties = flags["advantage_estimator"].registered().properties(name)
        assert properties.get("min_samples", 1) == estimator.min_samples
        assert properties.get("needs_critic", False) == estimator.needs_critic


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--adam_betas", ".5", "1e-1", "--stop", "a", "b c", "--top_k", "5", "--reward_clip_range", "-1", "1"],
        ["--adam_offload", "--gradient_checkpointing", "--label_key", "None", "--init_kl_coef", "0"],
        ["--advantage_estimator", "rloo", "--n_samples_per_prompt", "4", "--lr_scheduler", "cosine", "--seed=3"],
        [
            "--eps_clip_low_high",
            "0.2",
            "0.28",
            "--dual_clip",
            "3",
            "--grad_accum_dtype",
            "fp32",
            "--vllm_kv_cache_gb",
            "2",
        ],
    ],
)
def test_tyro_reads_the_same_config(words):
    markers = (tyro.conf.OmitArgPrefixes,)
    assert tyro.cli(PPOConfig, args=words, use_underscores=True, config=markers) == read(*words)


# ---- the yaml file ----------------------------------------------------------------------------------------------
def written(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_the_command_line_wins_over_the_file(tmp_path):
    text = "seed: 1\nl2: 1e-2\nadam_offload: true\nstop: [A, --B]\nadam_betas: [0.5, 0.6]\nlabel_key: null\n"
    path = written(tmp_path, text)
    config = read("--seed", "2", "--config", str(path), "--no_adam_offload")
    assert (config.seed, config.deepspeed.adam_offload) == (2, False)
    assert config.optim.l2 == 0.01  # yaml reads 1e-2 as text
    assert config.rollout.stop == ("A", "--B")
    assert config.optim.adam_betas == (0.5, 0.6)


def test_checks_see_file_and_command_line_together(tmp_path):
    path = written(tmp_path, "advantage_estimator: rloo\n")
    assert "--n_samples_per_prompt" in refusal("--config", str(path))
    assert read("--config", str(path), "--n_samples_per_prompt", "4").algo.advantage_estimator == "rloo"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seeed: 1", "seeed: no flag here (did you mean --seed?)"),
        ("ring_attn_size: 2", "ring_attn_size: not supported yet ("),
        ("flash_attn: true", "flash_attn: a switch without value, short for --attention flash_attention_2"),
        ("train_batch_size: abc", "train_batch_size takes a whole number, got 'abc'"),
        ("train_batch_size: 128.0", "train_batch_size takes a whole number, got '128.0'"),
        ("train_batch_size: true", "train_batch_size takes a whole number, got True"),
        ("train_batch_size: null", "train_batch_size takes a whole number, got None"),
        ("adam_offload: 1", "adam_offload takes true or false, got 1"),
        ("label_key: yes", "label_key takes text; quote it if it is, got True"),
        ("adam_betas: 0.9", "adam_betas takes 2 values, got 0.9"),
        ("adam_betas: [0.9, [1]]", "adam_betas takes a number, got [0.9, [1]]"),
        ("engine: vlm", "engine has no 'vlm', only auto, vllm, hf (did you mean vllm?)"),
        ("optim:\n  l2: 0.1", "optim: no flag here"),
    ],
)
def test_mistakes_in_the_file_name_file_and_key(tmp_path, text, message):
    path = written(tmp_path, text)
    assert refusal("--config", str(path)).startswith(f"{path}: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1\n- 2", "must hold lines such as 'seed: 1', not a list"),
        ("a: [1", "is not yaml: "),
        ("\tx", "is not yaml: "),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text, message):
    path = written(tmp_path, text)
    assert message in refusal("--config", str(path))
    assert f"--config {path}" in refusal("--config", str(path))


def test_a_missing_or_empty_file(tmp_path):
    assert (
        refusal("--config", str(tmp_path / "no.yaml")) == f"--config {tmp_path / 'no.yaml'}: No such file or directory"
    )
    assert read("--config", str(written(tmp_path, "# nothing yet\n"))) == PPOConfig()


def test_the_resolved_config_reads_back_as_itself(tmp_path):
    words = [
        "--bf16",
        "--stop",
        "None",
        "--adam_betas",
        "0",
        "0.999",
        "--l2",
        "1e-05",
        "--eps_clip_low_high",
        "0.2",
        "0.28",
    ]
    config = read(*words, "--advantage_estimator", "rloo", "--n_samples_per_prompt", "4")
    save_config(config, tmp_path / "config.yaml")
    assert read("--config", str(tmp_path / "config.yaml")) == config
    assert set(to_flat_dict(config)) == set(flags_of(PPOConfig)) - {"local_rank"}


@dataclass(frozen=True, kw_only=True)
class Inner:
    number: float = 1.0
    maybe_number: float | None = None
    pair: tuple[float, float] = (0.0, 1.0)
    maybe_pair: tuple[int, int] | None = None
    words: tuple[str, ...] = ()
    maybe_text: str | None = None
    key: str | None = field(default=None, repr=False)


@dataclass(frozen=True, kw_only=True)
class Everything:
    """One field of every shape that a flag can have."""

    inner: Inner = field(default_factory=Inner)
    text: str = "x"
    count: int = 1
    switch: bool = False
    maybe_switch: bool | None = None
    choice: Literal["a", "b"] = "a"

    def validate(self, world_size):
        pass


number = st.floats(allow_nan=False)
text = st.text(st.characters(exclude_categories=["Cs"]))
EVERYTHING = {
    "number": number,
    "maybe_number": st.none() | number,
    "pair": st.tuples(number, number),
    "maybe_pair": st.none() | st.tuples(st.integers(), st.integers()),
    "words": st.lists(text).map(tuple),
    "maybe_text": st.none() | text,
    "text": text,
    "count": st.integers(),
    "switch": st.booleans(),
    "maybe_switch": st.none() | st.booleans(),
    "choice": st.sampled_from("ab"),
}


@settings(max_examples=200, deadline=None)
@given(st.fixed_dictionaries(EVERYTHING))
@example({"text": "yes", "maybe_text": "null", "words": ("1", "~", "- a", "#"), "number": 1e-06})
@example({"text": "None", "maybe_text": "None", "words": ("\x85", "\r\n", " "), "number": float("inf")})
def test_any_config_survives_the_yaml_file(tmp_path_factory, values):
    config = build(Everything, values)
    path = tmp_path_factory.mktemp("yaml") / "config.yaml"
    save_config(config, path)
    assert read_yaml(Everything, path) == values_of(config)


@settings(max_examples=100, deadline=None)
@given(st.fixed_dictionaries(EVERYTHING))
def test_any_config_can_be_given_as_flags(values):
    argv = []
    for name, value in values.items():
        flag = flags_of(Everything)[name]
        if flag.kind is bool and value is not None:
            argv.append(f"--{name}" if value else f"--no_{name}")
        elif flag.num_values == 1 and value is not None and value != "None":
            argv.append(f"--{name}={value}")
        elif flag.num_values == 2 and value is not None:
            argv += [f"--{name}", *map(repr, value)]
    given_flags = {word.partition("=")[0].removeprefix("--").removeprefix("no_") for word in argv if word[:2] == "--"}
    assert read_words(Everything, argv) == {name: values[name] for name in given_flags}


# ---- secrets ----------------------------------------------------------------------------------------------------
def test_the_wandb_key_is_neither_saved_nor_shown(tmp_path):
    config = read("--use_wandb", "KEY123")
    assert config.tracking.use_wandb == "KEY123"
    save_config(config, tmp_path / "config.yaml")
    assert "KEY123" not in (tmp_path / "config.yaml").read_text() + repr(config) + str(to_flat_dict(config))
    assert read("--config", str(tmp_path / "config.yaml")).tracking.use_wandb == "True"
    assert "KEY123" not in refusal("--use_wandb", "KEY123", "KEY456")


def test_what_is_no_key_is_saved_as_it_is(tmp_path):
    for words in (["--use_wandb", "offline"], ["--use_wandb", "1"], []):
        save_config(read(*words), tmp_path / "config.yaml")
        assert read("--config", str(tmp_path / "config.yaml")) == read(*words)


def test_use_wandb_can_be_switched_in_a_file(tmp_path):
    assert read("--config", str(written(tmp_path, "use_wandb: true"))).tracking.use_wandb == "True"
    assert read("--config", str(written(tmp_path, "use_wandb: false"))).tracking.use_wandb is None


def cpu_seconds():
    """CPU time of the processes that were waited for: what a busy machine does not stretch."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# ---- the process ------------------------------------------------------------------------------------------------
def test_help_lists_every_flag_by_section_with_what_it_does(run_cli):
    start = cpu_seconds()
    result = run_cli("--help")
    seconds = cpu_seconds() - start
    sys.stdout.write(f"--help took {seconds:.2f} s of CPU\n")
    assert (result.returncode, result.stderr) == (0, "")
    for flag in flags_of(PPOConfig).values():
        assert f"  --{flag.name}" in result.stdout
    for text in (
        "Rollout: sampling responses.",
        "Prompts of one step, over all ranks. (default: 512)",
        "--bf16, --no_bf16",
    ):
        assert text in result.stdout
    assert seconds < 1  # 0.15 on a slow core; importing torch alone takes 3


@pytest.mark.parametrize(
    "words",
    [["--temprature", "1"], ["--ring_attn_size", "2"], ["--temperature", "0"], ["--config", "a\nb.yaml"], []],
    ids=["typo", "not yet", "range", "line break", "nothing given"],
)
def test_an_error_is_one_line_and_exit_code_2(run_cli, words):
    start = cpu_seconds()
    result = run_cli(*words, WORLD_SIZE="2", RANK="1", LOCAL_RANK="1")
    seconds = cpu_seconds() - start
    sys.stdout.write(f"the error took {seconds:.2f} s of CPU\n")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert seconds < 1


def test_only_one_rank_prints_the_help(run_cli):
    result = run_cli("--help", WORLD_SIZE="2", RANK="1", LOCAL_RANK="1")
    assert (result.returncode, result.stdout) == (0, "")


def test_parsing_imports_nothing_heavy(complete):
    code = (
        "import sys; from spmdrl.config import PPOConfig, parse_config; parse_config(PPOConfig);"
        "heavy = {'torch', 'transformers', 'yaml', 'numpy', 'tyro', 'deepspeed'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code, *complete], capture_output=True, text=True, cwd=ROOT)
    assert (result.returncode, result.stderr) == (0, "")


def test_parse_config_takes_the_words_of_the_process(complete, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_ppo.py", *complete])
    assert parse_config(PPOConfig) == read(*complete)
