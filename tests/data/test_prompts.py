import json
import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmdrl.config import PromptDataConfig
from spmdrl.config.generate import PromptColumnsConfig
from spmdrl.config.supervised import LabelledDataConfig, PairDataConfig, TextDataConfig
from spmdrl.data.rendering import plain_text_note
from spmdrl.errors import UserError
from tests.tiny import BOS, CHAT_TEMPLATE, make_tokenizer, write_jsonl

HI = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
RENDERED = "<|im_start|>system\nbe brief<|im_end|>\n" + HI


@pytest.fixture
def load_cells(load, tmp_path):
    """load_cells(cells, **flags): the prompt set of one row for each cell."""

    def load_cells(cells, **flags):
        return load(write_jsonl(tmp_path / "rows.jsonl", [{"input": cell} for cell in cells]), **flags)

    return load_cells


# ---- columns (U1) ----


def test_key_missing_everywhere_names_file_key_and_columns(load, tmp_path):
    """U1."""
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "hi", "answer": 1}] * 3)
    message = f"no row of {path} has the column 'prompt' (--input_key); its columns are question, answer"
    with pytest.raises(UserError) as error:
        load(path, input_key="prompt")
    assert str(error.value) == message


def test_key_missing_in_one_row_names_the_line(load, tmp_path):
    """U1: row 7 of 10."""
    rows = [{"prompt": "hi", "label": 1}] * 10
    rows[6] = {"question": "hi"}
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError) as error:
        load(path, input_key="prompt", label_key="label")
    assert str(error.value) == f"{path} line 7 has no column 'prompt' (--input_key); it has question"


def test_missing_label_is_named_by_its_flag(load, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"input": "a", "label": 1}, {"input": "b"}])
    with pytest.raises(UserError, match=r"rows.jsonl line 2 has no column 'label' \(--label_key\); it has input"):
        load(path, label_key="label")
    with pytest.raises(
        UserError, match=r"no row of .* has the column 'answer' \(--label_key\); its columns are input, label"
    ):
        load(path, label_key="answer")


def test_key_missing_in_one_of_two_sources_names_that_source(load, tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"input": "a"}] * 9)
    b = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "b"}] * 9)
    with pytest.raises(UserError, match=r"no row of .*b.jsonl has the column 'input'"):
        load(f"{a},{b}", prompt_data_probs="0.5,0.5")


def test_labels_and_columns_are_those_of_the_row(load, tmp_path):
    """Values as in the file, also after filtering has shifted the rows."""
    labels = [1, "01", None, True, 0.5, [1, {"a": []}], {"b": None}]
    rows = [{"input": "" if i == 2 else f"q{i}", "answer": x, "id": i, "note": None} for i, x in enumerate(labels)]
    prompts = load(write_jsonl(tmp_path / "rows.jsonl", rows), label_key="answer")
    kept = [0, 1, 3, 4, 5, 6]
    assert [prompt.row for prompt in prompts] == list(range(6))
    for prompt, i in zip(prompts, kept, strict=True):
        assert (prompt.prompt, prompt.label, prompt.columns) == (f"q{i}", labels[i], {"id": i, "note": None})
        assert type(prompt.label) is type(labels[i])
    assert [prompt.prompt for prompt in prompts[1:3]] == ["q1", "q3"] and prompts[-1].prompt == "q6"


def test_without_label_key_the_label_is_a_column(load, tmp_path):
    prompt = load(write_jsonl(tmp_path / "rows.jsonl", [{"input": "a", "label": 3}]))[0]
    assert prompt.label is None and prompt.columns == {"label": 3}


# ---- what a cell may be (U2) ----


def test_each_form_of_a_chat_prompt_is_rendered(load_cells, tokenizer):
    """U2: text is a user turn; a list and the same list as JSON text are the conversation; the ids contain it."""
    prompts = load_cells(["hi", MESSAGES, json.dumps(MESSAGES), "[1, 2] and [3]"], apply_chat_template=True)
    assert [prompt.prompt for prompt in prompts] == [HI, RENDERED, RENDERED, HI.replace("hi", "[1, 2] and [3]")]
    for prompt in prompts:
        assert tokenizer.decode(prompt.prompt_ids) == prompt.prompt


def test_a_prompt_is_rendered_with_the_tools_of_its_row(load, tmp_path):
    """They remain a column, for reward functions."""
    template = "{% for tool in tools or [] %}[{{ tool.name }}]{% endfor %}" + CHAT_TEMPLATE
    tokenizer = make_tokenizer(chat_template=template)
    rows = [{"input": "hi", "tools": tools} for tools in ([{"name": "sum"}], '[{"name": "sum"}]', None)]
    prompts = load(write_jsonl(tmp_path / "rows.jsonl", rows), tokenizer=tokenizer, apply_chat_template=True)
    assert [prompt.prompt for prompt in prompts] == [f"[sum]{HI}", f"[sum]{HI}", HI]
    assert [prompt.columns for prompt in prompts] == [{"tools": row["tools"]} for row in rows]
    plain = load(write_jsonl(tmp_path / "rows.jsonl", [{"input": "hi", "tools": 5}]), tokenizer=tokenizer)
    assert plain[0].prompt == "hi"


TEXT = "rows are plain text; --pretrain has a chat template, which --apply_chat_template would use"


@pytest.mark.parametrize(
    ("data", "line"),
    [
        (PromptDataConfig(), TEXT),
        (PairDataConfig(prompt_key="prompt"), TEXT),
        (TextDataConfig(), TEXT.replace("text;", r"text in 'User: {}\nAssistant: ';")),
        (LabelledDataConfig(), TEXT.replace("text;", r"text in 'User: {}\nAssistant: ';")),
        (PromptColumnsConfig(), TEXT),
        (PromptDataConfig(apply_chat_template=True), None),
        (PromptDataConfig(input_template="Q: {}"), None),
        (TextDataConfig(input_template=None), None),
        (TextDataConfig(pretrain_mode=True), None),
    ],
    ids=str,
)
def test_a_chat_template_that_nobody_asked_for_is_pointed_at(tokenizer, data, line):
    assert plain_text_note(data, tokenizer) == line
    assert plain_text_note(data, make_tokenizer(chat_template=None)) is None


def test_plain_text_and_input_template(load_cells):
    assert load_cells(["hi"])[0].prompt == "hi"
    assert load_cells(["hi {x}"], input_template="User: {}\nAssistant: ")[0].prompt == "User: hi {x}\nAssistant: "
    assert load_cells(["hi"], input_template="User: {}\\nAssistant: ")[0].prompt == "User: hi\nAssistant: "
    assert load_cells(["hi"], input_template="\\boxed{{}}: {}")[0].prompt == "\\boxed{}: hi"


@pytest.mark.parametrize(
    "cell, message",
    [
        (MESSAGES, "is a list of messages: add --apply_chat_template"),
        (json.dumps(MESSAGES), "is a list of messages: add --apply_chat_template"),
        (12, r"is a number \(12\), expected text"),
        (None, "is null, expected text"),
        (True, r"is a truth value \(True\)"),
        ({"role": "user"}, "is an object"),
        ("half \ud800", "has a character that is not valid Unicode"),
    ],
)
def test_cell_that_is_no_text_is_named_with_its_row(load, tmp_path, cell, message):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"input": "fine"}) + "\n" + json.dumps({"input": cell}) + "\n")
    with pytest.raises(UserError, match=rf"rows.jsonl line 2: 'input' \(--input_key\) {message}"):
        load(path)


@pytest.mark.parametrize(
    "cell, message",
    [
        ([*MESSAGES, {"role": "assistant", "content": "hello"}], "ends with an assistant turn"),
        ([{"role": "user"}], r"message 1 \(user\) has no text in 'content'"),
        ([{"content": "hi"}], "message 1 has no role; it has content"),
        ([MESSAGES], "message 1 is a list"),
        (["hi"], r"message 1 is text \('hi'\), expected an object with role and content"),
        ('[{"role": "user", "content": "hi"}', "starts like a list of messages in JSON but is not valid JSON"),
        (3.5, r"is a number \(3.5\), expected text or a list of messages"),
        ({"role": "user", "content": "hi"}, "is an object"),
    ],
)
def test_bad_conversation_is_named_with_its_row(load_cells, cell, message):
    with pytest.raises(UserError, match=rf"rows.jsonl line 2: 'input' \(--input_key\) {message}"):
        load_cells(["fine", cell], apply_chat_template=True)


def test_mixed_forms_in_one_file_are_each_read_as_what_they_are(load_cells):
    prompts = load_cells(["hi", [{"role": "user", "content": "hi"}]], apply_chat_template=True)
    assert prompts[0].prompt_ids == prompts[1].prompt_ids
    with pytest.raises(UserError, match=r"line 2.*add --apply_chat_template"):
        load_cells(["hi", [{"role": "user", "content": "hi"}]])


def test_keys_that_arrow_fills_with_null_do_not_reach_the_template(load, tmp_path):
    """Parquet gives every message the keys of all messages; a template that tests for a key must not see them."""
    from datasets import Dataset

    messages = [{"role": "system", "content": "s", "name": "n"}, {"role": "user", "content": "hi", "name": None}]
    Dataset.from_list([{"input": messages}]).to_parquet(str(tmp_path / "rows.parquet"))
    template = "{% for m in messages %}{{ m.content }}{{ '!' if 'name' in m }};{% endfor %}"
    prompts = load(
        tmp_path / "rows.parquet", tokenizer=make_tokenizer(chat_template=template), apply_chat_template=True
    )
    assert prompts[0].prompt == "s!;hi;"


@pytest.mark.parametrize("template", ["no place", "", "{x}", "{} and {}", "{", "{0}"])
def test_input_template_without_one_place_for_the_prompt_is_refused(load_cells, template):
    with pytest.raises(UserError, match="--input_template"):
        load_cells(["hi"], input_template=template)


def test_two_ways_to_shape_a_prompt_are_refused(load_cells):
    with pytest.raises(UserError, match="--apply_chat_template and --input_template both"):
        load_cells(["hi"], input_template="{}", apply_chat_template=True)


def test_prompt_data_missing_is_named(load):
    with pytest.raises(UserError, match="--prompt_data is missing"):
        load("")


# ---- chat templates (U3, U4) ----


def test_base_model_without_a_template_is_told_the_flag(load_cells):
    """U3."""
    with pytest.raises(UserError, match=r"no chat template .* --tokenizer_chat_template"):
        load_cells(["hi"], apply_chat_template=True, tokenizer=make_tokenizer(chat_template=None))


def test_prompt_ends_with_the_assistant_header_exactly_once(load_cells, tokenizer):
    """U4."""
    ids = load_cells([MESSAGES], apply_chat_template=True)[0].prompt_ids
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False)["input_ids"]
    starts = [i for i in range(len(ids)) if ids[i : i + len(header)] == header]
    assert starts == [len(ids) - len(header)]


def test_template_that_ignores_the_generation_prompt_is_warned_about_once(load_cells, caplog):
    """U4: the same text with and without it means that the policy may continue the user's turn."""
    template = CHAT_TEMPLATE.replace("add_generation_prompt", "false")
    with caplog.at_level(logging.WARNING):
        load_cells(["a", "b"], apply_chat_template=True, tokenizer=make_tokenizer(chat_template=template))
        assert [r.getMessage().count("without a generation prompt") for r in caplog.records] == [1]
        caplog.clear()
        load_cells(["a", "b"], apply_chat_template=True)
        assert not caplog.records


@pytest.mark.parametrize(
    "template, reason",
    [
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
    ],
)
def test_template_that_refuses_a_conversation_names_the_row(load_cells, template, reason):
    with pytest.raises(
        UserError, match=rf"line 1: 'input' \(--input_key\) is refused by the chat template \({reason}"
    ):
        load_cells([MESSAGES], apply_chat_template=True, tokenizer=make_tokenizer(chat_template=template))


# ---- BOS (U5) ----


@pytest.mark.parametrize("apply_chat_template", [True, False])
@pytest.mark.parametrize(
    "bos, has_bos", [("both", True), ("tokenizer", True), ("template", None), ("unused", False), (None, False)]
)
def test_one_bos_whoever_writes_it(load_cells, bos, has_bos, apply_chat_template):
    """U5. A declared BOS that neither of them writes is not added: the model was not trained with it."""
    wants_bos = apply_chat_template if has_bos is None else has_bos
    prompt = load_cells(["hi"], apply_chat_template=apply_chat_template, tokenizer=make_tokenizer(bos=bos))[0]
    assert prompt.prompt_ids[:1] == ([1] if wants_bos else prompt.prompt_ids[:1])
    assert prompt.prompt_ids.count(1) == int(wants_bos)
    assert prompt.prompt.removeprefix(BOS) == (HI if apply_chat_template else "hi")


def test_bos_in_the_data_is_not_doubled(load_cells):
    """Rows rendered beforehand carry the BOS that the tokenizer adds too."""
    prompts = load_cells([f"{BOS}hi", f"{BOS}{BOS}hi", "hi"], tokenizer=make_tokenizer(bos="tokenizer"))
    assert len({tuple(prompt.prompt_ids) for prompt in prompts}) == 1


# ---- filters (U7, U10) ----


def test_over_long_prompts_are_dropped_and_counted(load_cells, tmp_path):
    """U7: 5, 40 and 400 tokens with a limit of 32; 'x' is one token."""
    prompts = load_cells(["x" * 5, "x" * 40, "x" * 400], prompt_max_len=32)
    assert [len(prompt.prompt_ids) for prompt in prompts] == [5] and prompts.num_too_long == 2
    assert prompts.describe() == f"1 prompts from {tmp_path}/rows.jsonl (2 too long > 32 tokens dropped)"


def test_length_counts_template_and_bos(load_cells):
    """U7: a prompt fits exactly with its template, and no longer with one BOS more."""
    plain = len(load_cells(["hi"], apply_chat_template=True)[0].prompt_ids)
    with_bos = {"tokenizer": make_tokenizer(bos="tokenizer"), "apply_chat_template": True}
    assert len(load_cells(["hi"], prompt_max_len=plain, apply_chat_template=True)) == 1
    assert len(load_cells(["hi"], prompt_max_len=plain + 1, **with_bos)) == 1
    for flags in ({"prompt_max_len": plain - 1, "apply_chat_template": True}, {"prompt_max_len": plain, **with_bos}):
        with pytest.raises(UserError, match="1 too long"):
            load_cells(["hi"], **flags)


def test_empty_prompts_are_dropped_and_counted(load_cells):
    """U10: the template's own text does not make an empty prompt a prompt."""
    empty = ["", "   ", "\n\t"]
    assert load_cells([*empty, "hi"], input_template="User: {}").num_empty == 3
    chat = [*empty, [], "[]", [{"role": "user", "content": " "}], [MESSAGES[0], {"role": "user", "content": ""}], "hi"]
    prompts = load_cells(chat, apply_chat_template=True)
    assert len(prompts) == 1 and prompts.num_empty == 7
    assert prompts.describe().endswith("rows.jsonl (7 empty dropped)")


def test_nothing_left_is_an_error_with_counts(load_cells):
    with pytest.raises(
        UserError, match=r"no prompt is left: 0 prompts from .*rows.jsonl \(2 too long > 4 tokens, 1 empty dropped\)"
    ):
        load_cells(["too long", "much too long", " "], prompt_max_len=4)


def test_max_samples_takes_the_first_rows(load_cells):
    prompts = load_cells(["a", "b", "c"], max_samples=2)
    assert [prompt.prompt for prompt in prompts] == ["a", "b"] and "[2 of 3 rows]" in prompts.describe()


@pytest.mark.parametrize("rank, shown", [("0", True), ("1", False)])
def test_progress_is_shown_on_rank_0_for_many_rows(load_cells, monkeypatch, capsys, rank, shown):
    monkeypatch.setenv("RANK", rank)
    load_cells(["a", "b"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("spmdrl.data.prompts.PROGRESS_ROWS", 2)
    load_cells(["a", "b"])
    assert ("Tokenising prompts: 100%" in capsys.readouterr().err) is shown


# ---- fingerprint (U66) ----


def test_fingerprint_changes_with_content_and_with_nothing_else(load, tmp_path):
    rows = [{"input": "a", "label": 1}, {"input": "b", "label": 2}]
    write = lambda name, rows: write_jsonl(tmp_path / name, rows)  # noqa: E731
    same = load(write("a.jsonl", rows)).fingerprint
    assert same == load(write("b.jsonl", rows)).fingerprint == load(write("a.jsonl", rows), seed=5).fingerprint
    changed = [
        load(write("c.jsonl", [rows[0], {"input": "b", "label": "2"}])),
        load(write("d.jsonl", rows[::-1])),
        load(write("e.jsonl", rows[:1])),
        load(write("f.jsonl", rows), tokenizer=make_tokenizer(bos="tokenizer")),
        load(write("g.jsonl", rows), input_template="Q: {}"),
    ]
    assert len({same, *(prompts.fingerprint for prompts in changed)}) == 6


# ---- any row ----

CELLS = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["user", "assistant", '[{"role": "user"}]']),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(["role", "content", "name"]), v, max_size=3),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cells=st.lists(CELLS, min_size=1, max_size=4), apply_chat_template=st.booleans())
def test_any_cell_is_a_prompt_is_dropped_or_is_a_user_error(load, tmp_path, cells, apply_chat_template):
    path = tmp_path / "fuzz.jsonl"
    path.write_text("".join(json.dumps({"input": cell}) + "\n" for cell in cells))
    try:
        prompts = load(path, apply_chat_template=apply_chat_template)
    except UserError as error:
        assert "fuzz.jsonl" in str(error) and "\n" not in str(error)
    else:
        assert len(prompts) + prompts.num_empty + prompts.num_too_long == len(cells)
        assert all(prompt.prompt_ids and prompt.prompt.strip() for prompt in prompts)
