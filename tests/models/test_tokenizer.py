import json
import logging

import pytest

from spmdrl.config import ModelConfig
from spmdrl.errors import UserError
from spmdrl.models.tokenizer import encode_texts, load_tokenizer
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
