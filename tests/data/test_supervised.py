"""Supervised sets: what is learned of a row, token for token, and what is said of rows that cannot be used."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.config.supervised import DatasetConfig, LabelledDataConfig, PairDataConfig, TextDataConfig
from spmdrl.data import rendering
from spmdrl.data.supervised import (
    LabelledRows,
    PairRows,
    TextRows,
    build_set,
    load_eval_rows,
    load_train_rows,
    make_shape,
)
from spmdrl.errors import UserError
from spmdrl.models.tokenizer import Marked, encode_marked, encode_texts, pad_token_apart_from
from tests.tiny import BOS, CHAT_TEMPLATE, EOS, make_tokenizer, write_jsonl

TOKENIZER = make_tokenizer()
END_IDS = [2]
# The same conversation, with the assistant's text between marks, as the authors of some templates put them.
MARKED_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Drops what earlier assistant turns said, as templates of reasoning models do with their thoughts.
REWRITING_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}", "{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}{% endif %}"
)


def user(text):
    return {"role": "user", "content": text}


def bot(text):
    return {"role": "assistant", "content": text}


TALK = [user("Hello"), bot("Hi!"), user("What is 1 plus 1?"), bot("2")]


def built(tmp_path, rows, config, renderer, tokenizer=TOKENIZER, group_size=1, **options):
    data = config(dataset=write_jsonl(tmp_path / "rows.jsonl", rows), **options)
    render = renderer(data, make_shape(data, tokenizer, END_IDS))
    return build_set(load_train_rows(data, seed=1), render, data, tokenizer, group_size=group_size, end_ids=END_IDS)


def texts(tmp_path, rows, **options):
    return built(tmp_path, rows, TextDataConfig, TextRows, **options)


def pairs(tmp_path, rows, **options):
    return built(
        tmp_path, rows, PairDataConfig, lambda c, s: PairRows(c, s, with_margin=False), group_size=2, **options
    )


def labelled(tmp_path, rows, **options):
    return built(tmp_path, rows, LabelledDataConfig, LabelledRows, group_size=2, **options)


def shown(sample, tokenizer=TOKENIZER):
    """(all of it, what is learned), as text."""
    learned = sample.sequence[1:][sample.action_mask]
    return tokenizer.decode(sample.sequence), tokenizer.decode(learned)


def all_shown(rows, tokenizer=TOKENIZER):
    return [shown(sample, tokenizer) for sample in rows.samples(range(len(rows)))]


# ---- texts and exchanges --------------------------------------------------------------------------------------------
def test_a_response_and_its_end_are_learned_in_the_template_of_old_command_lines(tmp_path):
    rows = texts(tmp_path, [{"input": "Hello", "output": "Hi!"}], output_key="output")
    assert all_shown(rows) == [(f"User: Hello\nAssistant: Hi!{EOS}", f"Hi!{EOS}")]


def test_every_token_of_a_plain_text_is_learned(tmp_path):
    rows = texts(tmp_path, [{"input": "of numbers"}], pretrain_mode=True)
    (sample,) = rows.samples([0])
    assert TOKENIZER.decode(sample.sequence) == f"of numbers{EOS}"
    assert sample.action_mask.all()
    assert rows.counts.num_tokens == len(sample.sequence) - 1


@pytest.mark.parametrize("prompt", ["Hello", [user("Hello")], json.dumps([user("Hello")])], ids=str)
@pytest.mark.parametrize("response", ["Hi!", [bot("Hi!")], [user("Hello"), bot("Hi!")]], ids=str)
def test_prompt_and_response_are_text_or_messages_and_rendered_once(tmp_path, prompt, response):
    rows = texts(tmp_path, [{"input": prompt, "output": response}], output_key="output", apply_chat_template=True)
    text = f"<|im_start|>user\nHello{EOS}\n<|im_start|>assistant\nHi!{EOS}"
    assert all_shown(rows) == [(text, f"Hi!{EOS}")]


def test_the_prompt_of_a_row_has_the_ids_that_it_has_in_a_rollout(tmp_path):
    """'Assistant: ' ends in a space that would join the response's first word if both were encoded at once."""
    rows = texts(tmp_path, [{"input": "Hello", "output": "the answer is 2"}], output_key="output")
    (sample,) = rows.samples([0])
    (prompt,) = encode_texts(TOKENIZER, ["User: Hello\nAssistant: "])
    assert sample.sequence.tolist()[: len(prompt)] == prompt
    assert not sample.action_mask[: len(prompt) - 1].any()
    assert sample.action_mask[len(prompt) - 1 :].all()


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(max_examples=200, deadline=None)
@given(st.lists(words, min_size=1, max_size=5), st.sampled_from([None, "tokenizer", "template", "unused"]))
def test_marked_parts_are_learned_to_the_character_and_nothing_else(pieces, bos):
    """Every second piece is learned; what is in front of the first has the ids that it has alone."""
    tokenizer = make_tokenizer(bos=bos)
    text, parts = "", []
    for number, piece in enumerate(pieces):
        if number % 2 and piece:
            parts.append((len(text), len(text) + len(piece)))
        text += piece
    (encoded,) = encode_marked(tokenizer, [Marked(text, tuple(parts))])
    learned = [i for i, is_learned in zip(encoded.ids, encoded.mask, strict=True) if is_learned]
    assert len(encoded.ids) == len(encoded.mask)
    assert tokenizer.decode(learned) == "".join(text[a:b] for a, b in parts)
    before = text[: parts[0][0]] if parts else text
    assert encoded.ids[: len(encode_texts(tokenizer, [before])[0])] == encode_texts(tokenizer, [before])[0]


@pytest.mark.parametrize("bos", [None, "template", "tokenizer", "both", "unused"])
def test_there_is_one_bos_whoever_writes_it(tmp_path, bos):
    tokenizer = make_tokenizer(bos=bos)
    options = {"apply_chat_template": True, "tokenizer": tokenizer}
    kept = texts(tmp_path, [{"input": "Hello", "output": "Hi!"}], output_key="output", **options)
    pair = pairs(tmp_path, [{"prompt": "Hello", "chosen": "Hi!", "rejected": "No"}], prompt_key="prompt", **options)
    for sample in [*kept.samples([0]), *pair.samples([0])]:
        text, learned = shown(sample, tokenizer)
        assert text.count(BOS) == (bos not in (None, "unused"))
        assert text.startswith(BOS) or BOS not in text
        assert text.count("<|im_start|>assistant") == 1
        assert learned in (f"Hi!{EOS}", f"No{EOS}")


# ---- conversations --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED_TEMPLATE], ids=["by prefixes", "by marks"])
def test_every_assistant_turn_is_learned_with_its_end_and_nothing_between(tmp_path, template):
    tokenizer = make_tokenizer(chat_template=template)
    rows = texts(tmp_path, [{"input": TALK}], apply_chat_template=True, multiturn=True, tokenizer=tokenizer)
    ((text, learned),) = all_shown(rows, tokenizer)
    assert text == tokenizer.apply_chat_template(TALK, tokenize=False).removesuffix("\n")
    assert learned == f"Hi!{EOS}2{EOS}"


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, MARKED_TEMPLATE], ids=["by prefixes", "by marks"])
def test_without_multiturn_the_last_turn_is_learned(tmp_path, template):
    tokenizer = make_tokenizer(chat_template=template)
    rows = texts(tmp_path, [{"input": TALK}], apply_chat_template=True, tokenizer=tokenizer)
    assert all_shown(rows, tokenizer)[0][1] == f"2{EOS}"


def test_a_template_that_rewrites_earlier_turns_is_refused_where_it_matters(tmp_path):
    tokenizer = make_tokenizer(chat_template=REWRITING_TEMPLATE)
    options = {"apply_chat_template": True, "tokenizer": tokenizer}
    rows = texts(tmp_path, [{"input": TALK}], **options)
    assert all_shown(rows, tokenizer)[0][1] == f"2{EOS}"
    with pytest.raises(UserError, match=r"rows.jsonl line 1: 'input' \(--input_key\) message 2 cannot be told apart"):
        texts(tmp_path, [{"input": TALK}], multiturn=True, **options)


def test_a_system_message_is_never_learned(tmp_path):
    talk = [{"role": "system", "content": "Be brief."}, *TALK]
    rows = texts(tmp_path, [{"input": talk}], apply_chat_template=True, multiturn=True)
    assert all_shown(rows)[0][1] == f"Hi!{EOS}2{EOS}"


# ---- pairs ----------------------------------------------------------------------------------------------------------
CHAT = f"<|im_start|>user\nHello{EOS}\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "prompt_key"),
    [
        ({"prompt": "Hello", "chosen": "Hi!", "rejected": "No"}, "prompt"),
        ({"prompt": [user("Hello")], "chosen": [bot("Hi!")], "rejected": [bot("No")]}, "prompt"),
        ({"prompt": "Hello", "chosen": [user("Hello"), bot("Hi!")], "rejected": [user("Hello"), bot("No")]}, "prompt"),
        ({"chosen": [user("Hello"), bot("Hi!")], "rejected": [user("Hello"), bot("No")]}, None),
    ],
    ids=["texts", "messages", "whole conversations with a prompt", "whole conversations"],
)
def test_both_sides_have_the_prompt_once_and_learn_their_response(tmp_path, row, prompt_key):
    rows = pairs(tmp_path, [row], prompt_key=prompt_key, apply_chat_template=True)
    assert all_shown(rows) == [(f"{CHAT}Hi!{EOS}", f"Hi!{EOS}"), (f"{CHAT}No{EOS}", f"No{EOS}")]


def test_turns_that_both_sides_share_are_their_prompt(tmp_path):
    chosen, rejected = [*TALK, user("And 2?"), bot("4")], [*TALK, user("And 3?"), bot("6")]
    rows = pairs(tmp_path, [{"chosen": chosen, "rejected": rejected}], apply_chat_template=True)
    assert [learned for _, learned in all_shown(rows)] == [f"4{EOS}", f"6{EOS}"]


def test_one_side_may_be_the_beginning_of_the_other(tmp_path):
    rows = pairs(tmp_path, [{"chosen": TALK, "rejected": TALK[:2]}], apply_chat_template=True)
    assert [learned for _, learned in all_shown(rows)] == [f"Hi!{EOS}2{EOS}", f"Hi!{EOS}"]


def test_texts_without_a_prompt_column_share_a_beginning_of_whole_words(tmp_path):
    row = {"chosen": "Human: Hello Assistant: 123", "rejected": "Human: Hello Assistant: 124"}
    rows = pairs(tmp_path, [row])
    assert [learned for _, learned in all_shown(rows)] == [f" 123{EOS}", f" 124{EOS}"]
    assert [text for text, _ in all_shown(rows)] == [f"{row['chosen']}{EOS}", f"{row['rejected']}{EOS}"]


def test_pairs_with_nothing_to_compare_are_left_out_and_counted(tmp_path):
    good = {"prompt": "Hello", "chosen": "Hi!", "rejected": "No"}
    bad = [good | {"rejected": "Hi!"}, good | {"chosen": " "}, good | {"prompt": ""}, good | {"prompt": "x" * 99}]
    rows = pairs(tmp_path, [good, *bad], prompt_key="prompt", apply_chat_template=True, max_len=40)
    assert len(rows) == 1
    assert rows.dropped == {"empty": 2, "with two equal responses": 1, "without room for a response": 1}
    reasons = "2 empty, 1 with two equal responses, 1 without room for a response"
    assert rows.describe() == f"1 row from {tmp_path}/rows.jsonl ({reasons} dropped)"


def test_pairs_that_come_out_equal_are_left_out_too(tmp_path):
    """By a template that strips what it is given, or because they differ only beyond --max_len."""
    stripping = make_tokenizer(chat_template=CHAT_TEMPLATE.replace("message['content']", "message['content'] | trim"))
    rows = [{"prompt": "Hello", "chosen": "Hi! ", "rejected": text} for text in ("Hi!", "No", "Hi!" + "x" * 50)]
    rows.append({"prompt": "Hello", "chosen": "x" * 50 + "a", "rejected": "x" * 50 + "b"})
    kept = pairs(tmp_path, rows, prompt_key="prompt", apply_chat_template=True, max_len=40, tokenizer=stripping)
    assert [learned for _, learned in all_shown(kept)][:2] == [f"Hi!{EOS}", f"No{EOS}"]
    assert (len(kept), kept.dropped) == (2, {"with two equal responses": 2})


# ---- responses that hold their prompts too --------------------------------------------------------------------------
@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("kind", ["pair", "exchange", "labelled"])
def test_a_set_whose_responses_begin_with_their_prompts_is_refused(tmp_path, kind, chat):
    """As older sets of pairs have them. One row in ten may be another one; so few rows that it may be chance pass."""
    build = {"pair": pairs, "exchange": texts, "labelled": labelled}[kind]
    keys = {"prompt_key": "input"} if kind == "pair" else {"output_key": "output"}

    def rows(num_repeating, num_others=0):
        out = [(f"Q{i}? ", f"Q{i}? yes", f"Q{i}? no") for i in range(num_repeating)]
        out += [(f"Q{i}?", "yes", "no") for i in range(num_others)]
        return [{"input": q, "output": a, "chosen": a, "rejected": b, "label": 1} for q, a, b in out]

    for content in (rows(10), rows(9, 1) * 2):
        with pytest.raises(UserError) as error:
            build(tmp_path, content, apply_chat_template=chat, **keys)
        repeating = 10 if content == rows(10) else 18
        where = f"{tmp_path}/rows.jsonl line 1: the response begins with its prompt, and so it is in {repeating} of "
        assert str(error.value).startswith(f"{where}{len(content)} rows: the prompt would come twice. Cut it off")
        assert ("leave --prompt_key out" in str(error.value)) == (kind == "pair" and not chat)
    for content in (rows(9), rows(8, 2) * 2):
        assert len(build(tmp_path, content, apply_chat_template=chat, **keys)) == len(content)


def test_one_side_that_begins_with_the_prompt_is_an_answer(tmp_path):
    rows = [{"prompt": f"Q{i}?", "chosen": f"Q{i}? Let me see", "rejected": "no"} for i in range(10)]
    assert len(pairs(tmp_path, rows, prompt_key="prompt")) == 10


def test_the_template_around_a_prompt_is_part_of_it(tmp_path):
    rows = [{"input": f"{i}", "output": f"User: {i}\nAssistant: yes"} for i in range(10)]
    with pytest.raises(UserError, match="line 1: the response begins with its prompt"):
        texts(tmp_path, rows, output_key="output")


# ---- tools ----------------------------------------------------------------------------------------------------------
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"city": "text"}}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
# As a template of a model with tools: their list in front, calls in JSON after what an assistant says.
SAID = (
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message.get('tool_calls', []) %}call {{ call['function'] | tojson }}{% endfor %}"
)
TOOL_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\nSAID<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
).replace("SAID", SAID)
MARKED_TOOL_TEMPLATE = TOOL_TEMPLATE.replace(
    SAID,
    "{% if message['role'] == 'assistant' %}{% generation %}SAID{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}".replace("SAID", SAID),
)
ASKED = [user("How is Oslo?"), {"role": "assistant", "content": None, "tool_calls": [CALL]}]
ANSWERED = [*ASKED, {"role": "tool", "content": "rain"}, bot("Wet")]
SYSTEM = f"<|im_start|>system\n{json.dumps(WEATHER)}{EOS}\n"
CALLED = f"call {json.dumps(CALL['function'])}{EOS}"


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, MARKED_TOOL_TEMPLATE], ids=["by prefixes", "by marks"])
@pytest.mark.parametrize("tools", [[WEATHER], json.dumps([WEATHER])], ids=["list", "JSON"])
def test_the_template_sees_the_tools_of_a_row_and_calls_are_learned(tmp_path, template, tools):
    tokenizer = make_tokenizer(chat_template=template)
    rows = [{"input": ANSWERED, "tools": tools}, {"input": ASKED, "tools": None}, {"input": ASKED}]
    kept = texts(tmp_path, rows, apply_chat_template=True, multiturn=True, tokenizer=tokenizer, max_len=500)
    (text, learned), *others = all_shown(kept, tokenizer)
    asked = f"<|im_start|>user\nHow is Oslo?{EOS}\n<|im_start|>assistant\n"
    assert text.startswith(f"{SYSTEM}{asked}{CALLED}\n<|im_start|>tool\n")
    assert learned == f"{CALLED}Wet{EOS}"
    assert [learned for _, learned in others] == [CALLED] * 2
    assert all(text.startswith("<|im_start|>user") for text, _ in others)


def test_tools_reach_every_kind_of_row(tmp_path):
    options = {"apply_chat_template": True, "tokenizer": make_tokenizer(chat_template=TOOL_TEMPLATE), "max_len": 500}
    row = {"tools": [WEATHER], "label": 1, "input": "How is Oslo?", "output": ASKED[1:]}
    row |= {"chosen": ASKED[1:], "rejected": "Dry", "talk": ASKED}
    sets = [
        texts(tmp_path, [row], output_key="output", **options),
        labelled(tmp_path, [row], output_key="output", **options),
        labelled(tmp_path, [row], input_key="talk", **options),
        pairs(tmp_path, [row], prompt_key="input", **options),
    ]
    for rows in sets:
        for text, learned in all_shown(rows, options["tokenizer"]):
            assert text.startswith(SYSTEM)
            assert learned in (CALLED, f"Dry{EOS}")


def test_keys_that_arrow_fills_with_null_are_not_shown_to_the_template(tmp_path):
    """It gives every struct of a column the keys of all."""
    from datasets import Dataset

    other = {"type": "function", "function": {"name": "time", "parameters": {"zone": "text"}}}
    Dataset.from_list([{"input": ASKED, "tools": [WEATHER, other]}]).to_parquet(tmp_path / "rows.parquet")
    tokenizer = make_tokenizer(chat_template=TOOL_TEMPLATE)
    data = TextDataConfig(dataset=f"{tmp_path}/rows.parquet", apply_chat_template=True)
    render = TextRows(data, make_shape(data, tokenizer, END_IDS))
    rows = build_set(load_train_rows(data, seed=1), render, data, tokenizer, group_size=1, end_ids=END_IDS)
    ((text, learned),) = all_shown(rows, tokenizer)
    assert text.startswith(f"<|im_start|>system\n{json.dumps(WEATHER)}{json.dumps(other)}{EOS}")
    assert learned == CALLED


def test_calls_and_tools_that_no_template_renders_are_not_left_out_silently(tmp_path, caplog):
    with pytest.raises(UserError, match=r"line 1: 'input' \(--input_key\) has tool calls, which the chat template"):
        texts(tmp_path, [{"input": ASKED}], apply_chat_template=True)
    rendering._warn_once.cache_clear()
    assert len(texts(tmp_path, [{"input": TALK, "tools": [WEATHER]}] * 3, apply_chat_template=True)) == 3
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("Rows have tools, which the chat template of ")


@pytest.mark.parametrize("tools", ["weather", 5, ["weather"], {"name": "weather"}, "{}"])
def test_a_column_of_that_name_that_holds_something_else_is_named(tmp_path, tools):
    tokenizer = make_tokenizer(chat_template=TOOL_TEMPLATE)
    with pytest.raises(UserError, match=r"\(--input_key\) comes with a column 'tools' that is .*, expected a list"):
        texts(tmp_path, [{"input": ANSWERED, "tools": tools}], apply_chat_template=True, tokenizer=tokenizer)


# ---- lengths --------------------------------------------------------------------------------------------------------
def test_a_cut_sequence_ends_in_eos_but_does_not_learn_it(tmp_path):
    row = {"prompt": "Hello", "chosen": "abcdefghij", "rejected": "xyz"}
    rows = pairs(tmp_path, [row], prompt_key="prompt", max_len=9)
    cut, whole = rows.samples([0])
    assert len(cut.sequence) == 9
    assert cut.sequence[-1] == whole.sequence[-1] == TOKENIZER.eos_token_id
    assert not cut.action_mask[-1]
    assert whole.action_mask[-1]
    assert shown(cut)[1] == "abcdefghij"[: int(cut.action_mask.sum())]
    assert rows.describe().endswith("; 1 of 2 sequences cut at --max_len 9")


# ---- labels ---------------------------------------------------------------------------------------------------------
def test_a_labelled_response_comes_with_anothers_response_to_the_same_prompt(tmp_path):
    """The next row has the same prompt, so the response of the one after it is taken; the last wraps around."""
    cells = [("Hello", "Hi!", True), ("Hello", "No", 0), ("1 plus 1", "2", 1)]
    rows = labelled(
        tmp_path,
        [{"input": a, "output": b, "label": c} for a, b, c in cells],
        output_key="output",
        input_template="{} = ",
    )
    assert all_shown(rows) == [
        (f"Hello = Hi!{EOS}", f"Hi!{EOS}"),
        (f"Hello = 2{EOS}", f"2{EOS}"),
        (f"Hello = No{EOS}", f"No{EOS}"),
        (f"Hello = 2{EOS}", f"2{EOS}"),
        (f"1 plus 1 = 2{EOS}", f"2{EOS}"),
        (f"1 plus 1 = Hi!{EOS}", f"Hi!{EOS}"),
    ]
    assert rows.targets["label"].tolist() == [1, 1, 0, 0, 1, 1]


def test_messages_in_json_are_of_the_same_prompt_as_their_list_is(tmp_path):
    talks = [[user("Hello"), bot("Hi!")], [user("Hello"), bot("No")], [user("1 plus 1"), bot("2")]]
    rows = labelled(
        tmp_path, [{"input": cell, "label": 1} for cell in map(json.dumps, talks)], apply_chat_template=True
    )
    assert [learned for _, learned in all_shown(rows)][1::2] == [f"2{EOS}", f"2{EOS}", f"Hi!{EOS}"]


@pytest.mark.parametrize("cells", [(True, False), (1, 0), (1.0, 0.0), ("true", "False"), ("1", " 0")], ids=str)
def test_labels_may_be_spelled(tmp_path, cells):
    rows = [{"input": str(i), "output": "b", "label": cell} for i, cell in enumerate(cells)]
    assert labelled(tmp_path, rows, output_key="output").targets["label"].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(("yes", "no"), [("true", "false"), ("True", "False"), ("TRUE", "FALSE"), ("1", "0")])
def test_labels_of_a_csv_file(tmp_path, yes, no):
    (tmp_path / "rows.csv").write_text(f"input,output,label\na,b,{yes}\nc,d,{no}\n")
    data = LabelledDataConfig(dataset=f"{tmp_path}/rows.csv", output_key="output")
    render = LabelledRows(data, make_shape(data, TOKENIZER, END_IDS))
    rows = build_set(load_train_rows(data, seed=1), render, data, TOKENIZER, group_size=2, end_ids=END_IDS)
    assert rows.targets["label"].tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize(
    ("bad", "options", "message"),
    [
        ({"input": [{"text": "a"}]}, {"apply_chat_template": True}, "'input' (--input_key) message 1 has no role"),
        ({"input": "b", "output": 5}, {"output_key": "output"}, "'output' (--output_key) is a number (5)"),
        ({"input": "b", "output": None}, {"output_key": "output"}, "'output' (--output_key) is null"),
    ],
)
def test_a_bad_row_is_not_said_to_be_the_one_that_borrows_its_response(tmp_path, bad, options, message):
    fine = {"input": TALK if "output_key" not in options else "a", "output": "b", "label": True}
    with pytest.raises(UserError) as error:
        labelled(tmp_path, [fine, bad | {"label": False}], **options)
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl line 2: {message}"), error.value


# ---- what is wrong with a row ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        ({"input": "a"}, {"output_key": "output"}, "has no column 'output' (--output_key); it has input"),
        ({"input": 5, "output": "b"}, {"output_key": "output"}, "'input' (--input_key) is a number"),
        ({"input": "a", "output": None}, {"output_key": "output"}, "'output' (--output_key) is null, expected text"),
        (
            {"input": [user("a")], "output": "b"},
            {"output_key": "output"},
            "'input' (--input_key) is a list of messages: add --apply_chat_template",
        ),
        (
            {"input": TALK[:3]},
            {"apply_chat_template": True},
            "'input' (--input_key) does not end with an assistant turn, which is what is learned",
        ),
        (
            {"input": "Hello"},
            {"apply_chat_template": True},
            "which is what is learned; name a response in a column of its own with --output_key",
        ),
        (
            {"input": "a", "output": [user("b")]},
            {"apply_chat_template": True, "output_key": "output"},
            "'output' (--output_key) ends with a user turn, expected the assistant's",
        ),
        (
            {"input": "a", "output": [{"content": "b"}]},
            {"apply_chat_template": True, "output_key": "output"},
            "'output' (--output_key) message 1 has no role; it has content",
        ),
    ],
)
def test_a_bad_cell_is_named_with_its_file_line_and_column(tmp_path, row, options, message):
    fine = {"input": TALK if "output_key" not in options else "a", "output": "b"}
    with pytest.raises(UserError) as error:
        texts(tmp_path, [fine, row], **options)
    assert str(error.value).startswith(f"{tmp_path}/rows.jsonl line 2"), error.value
    assert message in str(error.value)


def test_bad_pairs_and_labels_are_named_too(tmp_path):
    with pytest.raises(UserError, match=r"line 1: 'chosen' \(--chosen_key\) has no prompt in front of it"):
        pairs(tmp_path, [{"chosen": "a", "rejected": "b"}], apply_chat_template=True)
    for label in (2, "yes", None, "0.5", 10**400):
        with pytest.raises(UserError, match=r"line 1: 'label' \(--label_key\) is .*, expected true or false, 1 or 0"):
            labelled(tmp_path, [{"input": "a", "output": "b", "label": label}], output_key="output")


def test_a_margin_may_be_spelled(tmp_path):
    """As in a column of CSV whose cells are not all written as Python writes numbers."""
    (tmp_path / "rows.csv").write_text("prompt,chosen,rejected,margin\na,b,c,1.50\na,d,e,2\n")
    data = PairDataConfig(dataset=f"{tmp_path}/rows.csv", prompt_key="prompt")
    render = PairRows(data, make_shape(data, TOKENIZER, END_IDS), with_margin=True)
    rows = build_set(load_train_rows(data, seed=1), render, data, TOKENIZER, group_size=2, end_ids=END_IDS)
    assert rows.targets["margin"].tolist() == [1.5, 1.5, 2, 2]


@pytest.mark.parametrize("margin", ["much", "", None, float("nan"), float("inf"), "nan", -(10**400)])
def test_a_margin_is_a_finite_number(tmp_path, margin):
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    with pytest.raises(UserError, match=r"line 1: 'margin' \(--margin_loss\) is .*, expected a number"):
        built(tmp_path, [row], PairDataConfig, lambda c, s: PairRows(c, s, with_margin=True), prompt_key="prompt")


def test_a_set_without_a_usable_row_is_refused_with_the_reasons(tmp_path):
    with pytest.raises(UserError, match=r"no row is left: 0 rows from .*rows.jsonl \(1 empty dropped\)"):
        texts(tmp_path, [{"input": "a", "output": ""}], output_key="output")


# ---- splits ---------------------------------------------------------------------------------------------------------
def test_held_out_rows_come_from_their_own_flag_or_from_the_split_of_the_data_set(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [{"input": "a"}] * 3)
    write_jsonl(folder / "test.jsonl", [{"input": "b"}] * 2)
    one = write_jsonl(tmp_path / "one.jsonl", [{"input": "c"}])

    def held_out(**options):
        rows = load_eval_rows(DatasetConfig(**options), seed=1)
        return None if rows is None else [row["input"] for row in rows]

    assert held_out(dataset=str(folder)) == ["b", "b"]
    assert held_out(dataset=str(folder), eval_split="train") == ["a", "a", "a"]
    assert held_out(dataset=str(folder), eval_dataset=one) == ["c"]
    assert held_out(dataset=one) is None
    (folder / "test.jsonl").unlink()
    assert held_out(dataset=str(folder)) is None
    with pytest.raises(UserError, match="has no split 'validation'"):
        held_out(dataset=str(folder), eval_split="validation")


def test_what_is_trained_on_whole_is_not_held_out(tmp_path):
    """A file beside a directory with splits, and a split that its own name chooses."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for split in ("train", "test"):
            write_jsonl(tmp_path / name / f"{split}.jsonl", [{"input": f"{name} {split}"}])
    one = write_jsonl(tmp_path / "one.jsonl", [{"input": "one"}])
    held_out = load_eval_rows(DatasetConfig(dataset=f"{one}, {tmp_path}/a, {tmp_path}/b@train"), seed=1)
    assert held_out is not None and [row["input"] for row in held_out] == ["a test"]


def test_the_fingerprint_tells_data_templates_and_lengths_apart(tmp_path):
    row = {"input": "Hello", "output": "Hi! of numbers"}
    same = {texts(tmp_path, [row], output_key="output").fingerprint for _ in range(2)}
    others = [
        texts(tmp_path, [row], output_key="output", input_template="{}"),
        texts(tmp_path, [row], output_key="output", max_len=16),
        texts(tmp_path, [row, row], output_key="output"),
    ]
    assert len(same) == 1
    assert len({*same, *(other.fingerprint for other in others)}) == 4


def test_a_pad_token_that_ends_no_response_is_found_among_the_special_ones():
    tokenizer = make_tokenizer(pad="eos")
    assert pad_token_apart_from(tokenizer, END_IDS) == 0
    assert tokenizer.pad_token == "<|endoftext|>"
    assert pad_token_apart_from(make_tokenizer(pad="own"), END_IDS) == 0
