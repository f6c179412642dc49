"""Flags that could not act, beside the others or here, are refused by every program that has them."""

import pytest

from spmdrl.config import PPOConfig, preflight
from spmdrl.config.chat import ChatConfig
from spmdrl.config.generate import GenerateConfig
from spmdrl.config.parse import read_config
from spmdrl.config.serve import ServeRMConfig
from spmdrl.config.splits import check_splits
from spmdrl.config.supervised import DPOConfig, KDConfig, KTOConfig, RMConfig, SFTConfig
from spmdrl.errors import UserError

PAIRS, TEXTS = (RMConfig, DPOConfig), (SFTConfig, KTOConfig, KDConfig)
ALL = (PPOConfig, GenerateConfig, *PAIRS, *TEXTS)


def refusal(cls, flags):
    with pytest.raises(UserError) as error:
        read_config(cls, flags.split())
    return str(error.value)


def names(cls):
    return cls.__name__


# ---- what shapes a row ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cls", ALL, ids=names)
def test_a_chat_template_that_nothing_renders_is_refused(cls):
    said = refusal(cls, "--tokenizer_chat_template {{x}}")
    assert said == "--tokenizer_chat_template does nothing without --apply_chat_template; give both or neither"
    read_config(cls, ["--apply_chat_template", "--tokenizer_chat_template", "{{x}}"])


@pytest.mark.parametrize("cls", ALL, ids=names)
def test_one_template_shapes_a_prompt(cls):
    flags = "--input_template Q:{} --apply_chat_template"
    assert refusal(cls, flags).startswith("--input_template and --apply_chat_template both shape the prompt")


@pytest.mark.parametrize("cls", PAIRS, ids=names)
def test_a_template_around_the_prompts_of_pairs_needs_their_column(cls):
    assert refusal(cls, "--input_template Q:{}") == (
        "--input_template goes around a pair's prompt: name the prompt's column with --prompt_key"
    )
    assert read_config(cls, ["--input_template", "Q:{}", "--prompt_key", "p"]).data.input_template == "Q:{}"


@pytest.mark.parametrize(
    ("cls", "remedy"), [(SFTConfig, "leave --output_key out"), (KDConfig, "give --output_key None")], ids=["sft", "kd"]
)
def test_turns_are_learned_where_no_column_has_the_response(cls, remedy):
    """The default of --output_key is a column in distillation."""
    words = "--multiturn --apply_chat_template"
    given = f"{words} --output_key o" if cls is SFTConfig else words
    assert refusal(cls, given) == f"--multiturn takes whole conversations from --input_key: {remedy}"
    assert read_config(cls, f"{words} --output_key None".split()).data.multiturn


@pytest.mark.parametrize("flag", ["--multiturn", "--output_key o", "--input_template Q:{}", "--apply_chat_template"])
@pytest.mark.parametrize("cls", [SFTConfig, KDConfig], ids=names)
def test_plain_texts_have_no_shape(cls, flag):
    said = refusal(cls, f"--pretrain_mode {flag}")
    assert said == f"--pretrain_mode learns plain texts as they are: leave {flag.split()[0]} out"


def test_a_conversation_has_one_template():
    said = refusal(ChatConfig, "--input_template Q:{} --tokenizer_chat_template {{x}}")
    assert said == "--tokenizer_chat_template does nothing with --input_template; drop one of them"
    read_config(ChatConfig, ["--tokenizer_chat_template", "{{x}}"])


# ---- splits ---------------------------------------------------------------------------------------------------------
SPLITS = [
    (PPOConfig, "prompt_split", "prompt_data", ""),
    (PPOConfig, "eval_split", "eval_dataset", "--eval_steps 1"),
    (PPOConfig, "pretrain_split", "pretrain_data", ""),
    (GenerateConfig, "dataset_split", "dataset", ""),
    (SFTConfig, "train_split", "dataset", ""),
    (DPOConfig, "eval_split", "dataset", ""),
    (KTOConfig, "eval_split", "eval_dataset", "--dataset ."),
]


@pytest.mark.parametrize(("cls", "split", "source", "more"), SPLITS, ids=lambda x: x if isinstance(x, str) else "")
def test_a_split_of_what_has_none_is_refused(cls, split, source, more, tmp_path):
    """A file, a saved `Dataset`, or a split that the source's own name chooses already."""
    (tmp_path / "rows.jsonl").write_text("{}\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")

    def check(spec, *words):
        check_splits(read_config(cls, [*more.split(), f"--{source}", spec, *words]))

    one = f"{tmp_path}/rows.jsonl"
    for spec in (one, f"{tmp_path}/saved", f"{tmp_path}/folder@dev", f"{one}, {tmp_path}/folder@dev"):
        with pytest.raises(UserError) as error:
            check(spec, f"--{split}", "other")
        expected = f"--{split} other: there are no splits to choose from in --{source} {spec}; leave it out"
        assert str(error.value) == expected
        check(spec)
    for spec in (f"{tmp_path}/folder", "owner/name", f"{one}, {tmp_path}/folder"):
        check(spec, f"--{split}", "other")


# ---- before anything loads ------------------------------------------------------------------------------------------
@pytest.fixture
def validate(tmp_path, model_dir, complete):
    """validate(cls, *words): the checks of a program's complete command line with these words added."""
    own = {
        PPOConfig: complete,
        GenerateConfig: ["--output_path", str(tmp_path / "out.jsonl")],
        KDConfig: ["--teacher_model", str(model_dir)],
        SFTConfig: ["--output_key", "o"],
        KTOConfig: ["--output_key", "o"],
    }
    data = ["--dataset", str(tmp_path / "prompts.jsonl")]

    def validate(cls, *words):
        given = [*own.get(cls, []), "--pretrain", str(model_dir), *([] if cls in (PPOConfig, ChatConfig) else data)]
        read_config(cls, [*given, *words]).validate(1)

    return validate


@pytest.mark.parametrize("cls", ALL, ids=names)
def test_every_program_looks_at_its_splits(cls, validate):
    data, split = {PPOConfig: ("prompt_data", "prompt_split"), GenerateConfig: ("dataset", "dataset_split")}.get(
        cls, ("dataset", "train_split")
    )
    validate(cls)
    with pytest.raises(UserError, match=f"^--{split} dev: there are no splits to choose from in --{data} "):
        validate(cls, f"--{split}", "dev")


@pytest.mark.parametrize("cls", [*ALL, ChatConfig, ServeRMConfig], ids=names)
def test_every_program_asks_for_flash_attn(cls, validate, model_dir, monkeypatch):
    if cls is ServeRMConfig:
        validate = lambda cls, *words: read_config(cls, ["--reward_pretrain", str(model_dir), *words]).validate(1)  # noqa: E731
    monkeypatch.setattr(preflight, "is_installed", lambda package: package == "flash_attn")
    validate(cls, "--attention", "flash_attention_2")
    monkeypatch.setattr(preflight, "is_installed", lambda package: False)
    with pytest.raises(UserError, match=r"^--attention flash_attention_2 \(--flash_attn\) needs the package "):
        validate(cls, "--attention", "flash_attention_2")
