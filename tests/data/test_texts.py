"""Texts of --pretrain_data: their tokens, and an order that depends on the seed alone."""

import pytest

from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.data.texts import load_texts
from spmdrl.errors import UserError
from tests.tiny import make_tokenizer, write_jsonl

EOS, BOS = 2, 1


@pytest.fixture
def stream(tmp_path):
    """stream([texts], "--flag", "value", bos=...): a TextStream over them."""

    def stream(texts, *flags, column="text", bos=None):
        number = len(list(tmp_path.iterdir()))
        data = write_jsonl(tmp_path / f"texts{number}.jsonl", [{column: text} for text in texts])
        key = () if column == "input" else ("--pretrain_key", "text")
        config = read_config(PPOConfig, ["--pretrain_data", data, *key, *flags])
        return load_texts(config, make_tokenizer(bos=bos))

    return stream


def tokens(sample):
    return sample.sequence.tolist()


def test_a_text_has_one_bos_and_ends_in_eos_and_all_but_its_first_token_is_learnt(stream):
    (sample,) = stream(["ab"], bos="tokenizer").take(1)
    assert tokens(sample)[0] == BOS and tokens(sample)[-1] == EOS and len(tokens(sample)) == 4
    assert sample.action_mask.tolist() == [True, True, True]
    (again,) = stream(["ab<|im_end|>"], bos="tokenizer").take(1)
    assert tokens(again) == tokens(sample)


def test_a_long_text_is_cut_at_max_len_and_then_has_no_eos(stream):
    (sample,) = stream(["abcdefgh"], "--max_len", "5", "--prompt_max_len", "4").take(1)
    assert len(tokens(sample)) == 5
    assert EOS not in tokens(sample)


def test_each_pass_takes_every_text_once_in_another_order(stream):
    texts = stream(["aa", "bb", "cc", "dd", "ee", "ff"])
    passes = [[sample.row for sample in texts.take(6)] for _ in range(3)]
    assert all(sorted(rows) == list(range(6)) for rows in passes)
    assert passes[0] != passes[1]


def test_the_order_is_a_function_of_the_seed_and_not_of_how_many_are_taken_at_a_time(stream):
    words = ["aa", "bb", "cc", "dd", "ee"]
    whole = [s.row for s in stream(words, "--seed", "3").take(12)]
    parts = stream(words, "--seed", "3")
    assert [s.row for count in (1, 4, 7) for s in parts.take(count)] == whole
    assert [s.row for s in stream(words, "--seed", "4").take(12)] != whole


def test_a_saved_position_goes_on_where_it_was(stream):
    words = ["aa", "bb", "cc", "dd", "ee"]
    first, second = stream(words), stream(words)
    first.take(7)
    second.load_state_dict(first.state_dict())
    assert [s.row for s in second.take(6)] == [s.row for s in first.take(6)]
    with pytest.raises(UserError, match="num_rows 5, now it is 2"):
        stream(["aa", "bb"]).load_state_dict(first.state_dict())


def test_texts_without_a_next_token_are_passed_over(stream):
    texts = stream(["", "ab", ""])
    assert {sample.row for sample in texts.take(4)} == {1}
    with pytest.raises(UserError, match=r"no 'text' \(--pretrain_key\) has two tokens or more"):
        stream(["", ""]).take(1)


def test_the_column_is_that_of_the_prompts_unless_another_is_named(stream):
    assert len(stream(["ab"], column="input").take(1)) == 1
    with pytest.raises(UserError, match=r"has the column 'text' \(--pretrain_key\); its columns are body"):
        stream(["ab"], column="body")
    with pytest.raises(UserError, match=r"texts\d.jsonl line 1: 'text' \(--pretrain_key\) is .*, expected text"):
        stream([["ab"]])


@pytest.mark.parametrize(
    "flags", ["--ptx_coef 0.1", "--pretrain_split test", "--pretrain_data_probs 1", "--pretrain_key text"]
)
def test_flags_of_the_texts_need_texts(flags):
    with pytest.raises(UserError, match=f"{flags.split()[0]} changes nothing without --pretrain_data"):
        read_config(PPOConfig, flags.split())
