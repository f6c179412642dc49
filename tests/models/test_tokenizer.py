import json
import logging
import re

import pytest

from spmdrl.config import ModelConfig
from spmdrl.errors import UserError
from spmdrl.models.tokenizer import check_same_ids, encode_texts, load_tokenizer
from tests.tiny import make_tokenizer


def test_missing_pad_token_becomes_eos_and_is_logged(tmp_path, caplog):
    """U16: no token is added, so no embedding has to be resized."""
    make_tokenizer(tmp_path, pad=None)
    with caplog.at_level(logging.WARNING):
        tokenizer = load_tokenizer(ModelConfig(pretrain=str(tmp_path)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2 and len(tokenizer) == 320
    assert [r.getMessage().endswith("no pad token: padding with eos (<|im_end|>)") for r in caplog.records] == [True]


def test_own_pad_token_is_kept(tmp_path):
    make_tokenizer(tmp_path, pad="own")
    assert load_tokenizer(ModelConfig(pretrain=str(tmp_path))).pad_token_id == 0


def test_chat_template_from_text_or_file(tmp_path):
    """U3: a base model runs with the flag."""
    make_tokenizer(tmp_path, chat_template=None)
    text = "{{ messages[0].content }}!"
    (tmp_path / "mine.jinja").write_text(text)
    for value in (text, str(tmp_path / "mine.jinja")):
        tokenizer = load_tokenizer(ModelConfig(pretrain=str(tmp_path), tokenizer_chat_template=value))
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    with pytest.raises(
        UserError, match=r"--tokenizer_chat_template 'no.jinja' is neither a Jinja template nor a file"
    ):
        load_tokenizer(ModelConfig(pretrain=str(tmp_path), tokenizer_chat_template="no.jinja"))


@pytest.mark.parametrize(
    "damage",
    [{"tokenizer.json": "{"}, {"tokenizer.json": "{}"}, {"tokenizer.json": None, "tokenizer_config.json": None}],
)
def test_damaged_tokenizer_is_one_line(tmp_path, damage):
    make_tokenizer(tmp_path)
    for name, content in damage.items():
        (tmp_path / name).unlink() if content is None else (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"--pretrain {tmp_path}: the tokenizer files there do not load") as error:
        load_tokenizer(ModelConfig(pretrain=str(tmp_path)))
    assert "\n" not in str(error.value)


def test_missing_model_is_one_line(monkeypatch):
    with pytest.raises(UserError, match="--pretrain /no/such/model is neither a directory here nor"):
        load_tokenizer(ModelConfig(pretrain="/no/such/model"))
    with pytest.raises(UserError, match="--pretrain is missing"):
        load_tokenizer(ModelConfig())


def test_tokenizer_without_pad_and_eos_is_refused(tmp_path):
    make_tokenizer(tmp_path, pad=None)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": None}))
    with pytest.raises(UserError, match="neither a pad nor an eos token"):
        load_tokenizer(ModelConfig(pretrain=str(tmp_path)))


def test_tokenizer_that_appends_eos_does_not_end_the_prompt():
    """A post-processor `<bos> text <eos>` would make the policy continue after the end."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer(bos="tokenizer")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A <|im_end|>", special_tokens=[("<|bos|>", 1), ("<|im_end|>", 2)]
    )
    assert encode_texts(tokenizer, ["a", "<|bos|>a", ""]) == [[1, 68], [1, 68], [1]]
    assert encode_texts(tokenizer, []) == []


# ---- a second model that reads the ids of the first -----------------------------------------------------------------
def other_ids(path, change):
    """A tokenizer in which `change` has edited the vocabulary, token -> id."""
    make_tokenizer(path)
    content = json.loads((path / "tokenizer.json").read_text())
    change(content["model"]["vocab"])
    (path / "tokenizer.json").write_text(json.dumps(content))
    return str(path)


def swap(vocabulary):
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (swap, "'a' is 69 there and 68 here, 2 differ in all"),
        (lambda vocabulary: vocabulary.update({"new": 320}), "'new' is 320 there and none here, 1 differ in all"),
        (lambda vocabulary: vocabulary.pop("~"), "'~' is none there and 97 here, 1 differ in all"),
    ],
)
def test_a_model_that_would_read_other_tokens_is_refused_with_both_names(tmp_path, change, difference):
    config = ModelConfig(pretrain=str(tmp_path / "own"))
    tokenizer = make_tokenizer(tmp_path / "own")
    other = other_ids(tmp_path / "other", change)
    message = (
        f"--teacher_model {other} has other token ids than --pretrain {config.pretrain}, whose ids it would read: "
        f"{difference}"
    )
    with pytest.raises(UserError, match=f"^{re.escape(message)}$"):
        check_same_ids(tokenizer, config, other, "--teacher_model")


def test_a_model_may_call_other_tokens_pad_or_bos_and_have_another_template(tmp_path):
    config = ModelConfig(pretrain=str(tmp_path / "own"), tokenizer_chat_template="{{ messages }}")
    make_tokenizer(tmp_path / "own", pad=None)
    make_tokenizer(tmp_path / "other", pad="own", bos="both", chat_template=None)
    tokenizer = load_tokenizer(config)
    check_same_ids(tokenizer, config, str(tmp_path / "other"), "--critic_pretrain")
    check_same_ids(tokenizer, config, str(config.pretrain), "--pretrain")


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    config = ModelConfig(pretrain=str(tmp_path / "own"))
    tokenizer = make_tokenizer(tmp_path / "own")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match=r"--ref_pretrain .*bare: the tokenizer files .* \(there are none: copy those"):
        check_same_ids(tokenizer, config, str(tmp_path / "bare"), "--ref_pretrain")
