"""Data files that are none, rows that are no prompts, and settings of both: the line names file, row and column."""

import json

import pytest

from spmdrl.config import PromptDataConfig
from spmdrl.data.prompts import load_prompts

GOOD = '{"q": "hi"}\n'
DEEP = '{"q": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
FILES = {
    # not JSON lines
    ("p.jsonl", ""): "--prompt_data p.jsonl has no rows",
    ("p.jsonl", "\n\n"): "--prompt_data p.jsonl has no rows",
    ("p.jsonl", "hello"): "p.jsonl line 1 is not valid JSON: Expecting value at column 1",
    ("p.jsonl", '{"q": "x",}\n'): "p.jsonl line 1 is not valid JSON: Expecting property name",
    ("p.jsonl", GOOD + '{"q": "hel'): "p.jsonl line 2 is not valid JSON: Unterminated string",
    ("p.jsonl", json.dumps({"q": "x"}, indent=2)): "p.jsonl line 1 is not valid JSON: Expecting property name",
    ("p.jsonl", DEEP): "p.jsonl line 1 is not valid JSON: nested too deeply",
    ("p.jsonl", '{"q": "x", "n": ' + "9" * 5000 + "}"): "p.jsonl line 1 is not valid JSON: Exceeds the limit",
    ("p.jsonl", "\0"): "p.jsonl line 1 is not valid JSON",
    ("p.jsonl", GOOD.encode("utf-16")): "p.jsonl line 1 is not UTF-8 text (invalid start byte at byte 0)",
    ("p.jsonl", b'{"q": "\xe9"}\n'): "p.jsonl line 1 is not UTF-8 text (invalid continuation byte at byte 7)",
    ("p.jsonl", b"\x80\x04\x95\x00."): "p.jsonl line 1 is not UTF-8 text",
    # rows that are no objects
    ("p.jsonl", "5\n"): "p.jsonl line 1 is a number (5), expected an object with the row's columns",
    ("p.jsonl", "null\n"): "p.jsonl line 1 is null, expected an object",
    ("p.json", "[1, 2]"): "p.json line 1 (item 1) is a number (1), expected an object",
    ("p.json", '[{"q": "x"}, ]'): "p.json line 1 is not valid JSON: Expecting value at column 14",
    ("p.json", '[{"q": "x"}'): "p.json line 1: expected ',' or ']' after item 1 of the array",
    ("p.json", '[{"q": "x"}] y'): "p.json line 1: there is text after the end of the array",
    ("p.json", "[]"): "--prompt_data p.json has no rows",
    ("p.json", "[" * 100_000): "p.json line 1 is not valid JSON: nested too deeply",
    # cells that are no prompts
    ("p.jsonl", GOOD + '{"q": 5}\n'): "p.jsonl line 2: 'q' (--input_key) is a number (5), expected text",
    ("p.jsonl", '{"q": null}\n'): "p.jsonl line 1: 'q' (--input_key) is null, expected text",
    ("p.jsonl", '{"q": NaN}\n'): "p.jsonl line 1: 'q' (--input_key) is a number (nan), expected text",
    ("p.jsonl", '{"q": {}}\n'): "p.jsonl line 1: 'q' (--input_key) is an object ({}), expected text",
    (
        "p.jsonl",
        '{"q": ["a"]}\n',
    ): "p.jsonl line 1: 'q' (--input_key) is a list of messages: add --apply_chat_template",
    ("p.jsonl", '{"q": "\\ud800"}\n'): "p.jsonl line 1: 'q' (--input_key) has a character that is not valid Unicode",
    ("p.jsonl", '{"p": "x"}\n'): "no row of p.jsonl has the column 'q' (--input_key); its columns are p",
    ("p.jsonl", GOOD + '{"p": "x"}\n'): "p.jsonl line 2 has no column 'q' (--input_key); it has p",
    ("p.jsonl", '{"q": "  "}\n'): "no prompt is left: 0 prompts from p.jsonl (1 empty dropped)",
    (
        "p.jsonl",
        '{"q": "' + "a" * 10_000 + '"}\n',
    ): "no prompt is left: 0 prompts from p.jsonl (1 too long > 1024 tokens",
    # other kinds of files
    ("p.csv", "q,q\n1,2\n"): "p.csv line 1: the header names a column twice: q, q",
    ("p.csv", "q,a\n1\n"): "p.csv line 2 has 1 cells, the header has 2 (q, a)",
    ("p.csv", 'q\n"x\n'): "p.csv line 2 is not valid CSV: unexpected end of data",
    ("p.csv", "q\n5\n"): "p.csv line 2: 'q' (--input_key) is a number (5), expected text",
    ("p.parquet", b""): "p.parquet is empty",
    ("p.parquet", b"PAR1garbagePAR1"): "p.parquet cannot be loaded: ArrowInvalid: Parquet file size is 15 bytes",
    ("p.arrow", b"hello"): "p.arrow cannot be loaded: ArrowInvalid: File is too small: 5",
    **{
        (f"p{suffix}", b"\x80\x04."): f"p{suffix}: unknown kind of file '{suffix}', expected one of .jsonl, .json,"
        for suffix in (".pkl", ".pickle", ".pt", ".npy", ".xlsx", "")
    },
}
MESSAGES = {
    '[{"content": "x"}]': "message 1 has no role; it has content",
    '[{"role": 1, "content": "x"}]': "message 1 has no role; it has role, content",
    '[{"role": "user", "content": 5}]': "message 1 (user) has no text in 'content'",
    '["x"]': "message 1 is text ('x'), expected an object with role and content",
    '[{"role": "assistant", "content": "x"}]': "ends with an assistant turn, which is what the policy writes",
    "7": "is a number (7), expected text or a list of messages",
}
SETTINGS = {
    ("input_template", "{x}"): "--input_template '{x}' must have {} once",
    ("input_template", "{}{}"): "--input_template '{}{}' must have {} once",
    ("input_template", "{:d}"): "--input_template '{:d}' must have {} once",
    ("input_template", "{!r}"): "--input_template '{!r}' must have {} once",
    ("input_template", "{0.__class__}"): "must have {} once",
    ("input_template", "{"): "--input_template '{': ",
    ("prompt_data_probs", "x"): "--prompt_data_probs 'x' is not a list of numbers such as 0.5,0.5",
    ("prompt_data_probs", "0.5,0.5"): "--prompt_data names 1 source, --prompt_data_probs '0.5,0.5' has 2",
    ("prompt_data_probs", "nan"): "--prompt_data_probs 'nan': the numbers must be zero or more, and not all zero",
    ("prompt_data", "p.jsonl@"): "--prompt_data 'p.jsonl@': expected NAME@SPLIT",
    ("prompt_data", "p.jsonl@dev"): "a single file has no split 'dev'; leave @dev out",
    ("prompt_data", ","): "--prompt_data ',' has an empty name between its commas",
    ("prompt_data", "/dev/null"): "--prompt_data /dev/null: neither a file nor a directory",
    ("prompt_data", "x" * 5000 + ".jsonl"): ": no such file or directory",
}


def load(tokenizer, **flags):
    return load_prompts(PromptDataConfig(**{"prompt_data": "p.jsonl", "input_key": "q"} | flags), tokenizer, seed=0)


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("case", FILES, ids=lambda case: f"{case[0]}-{case[1][:16]}")
def test_files(tmp_path, monkeypatch, tokenizer, line_of, case):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / case[0], case[1])
    assert FILES[case] in line_of(load, tokenizer, prompt_data=case[0])


@pytest.mark.parametrize("cell", MESSAGES)
def test_messages(tmp_path, monkeypatch, tokenizer, line_of, cell):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", f'{{"q": {cell}}}\n')
    expected = f"p.jsonl line 1: 'q' (--input_key) {MESSAGES[cell]}"
    assert line_of(load, tokenizer, apply_chat_template=True).startswith(expected)


@pytest.mark.parametrize("case", SETTINGS, ids=lambda case: " ".join(case)[:40])
def test_settings(tmp_path, monkeypatch, tokenizer, line_of, case):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "p.jsonl", GOOD)
    assert SETTINGS[case] in line_of(load, tokenizer, **dict([case]))


@pytest.mark.parametrize(
    ("file", "content", "line"),
    [
        ("state.json", "{", "cannot be loaded: JSONDecodeError"),
        ("state.json", "{}", "cannot be loaded: KeyError: '_data_files'"),
        ("dataset_info.json", "[]", "cannot be loaded: AttributeError"),
        ("data-00000-of-00001.arrow", "x", "cannot be loaded: ArrowInvalid"),
    ],
)
def test_saved_data_sets(tmp_path, tokenizer, line_of, file, content, line):
    import datasets

    datasets.Dataset.from_dict({"q": ["a"]}).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "saved" / file).write_text(content)
    assert line in line_of(load, tokenizer, prompt_data=str(tmp_path / "saved"))


def test_a_directory_with_code_and_pickles_is_no_data_set(tmp_path, tokenizer, line_of):
    (tmp_path / "data.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "data.pkl").write_bytes(b"\x80\x04.")
    assert "the directory holds no .jsonl" in line_of(load, tokenizer, prompt_data=str(tmp_path))
    assert not (tmp_path / "ran").exists()
