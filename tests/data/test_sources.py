import csv
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spmdrl.data.sources import load_rows, parse_probs
from spmdrl.errors import UserError
from tests.tiny import write_jsonl

ROWS = [
    {"input": "What is 1 plus 1?", "label": 2, "tags": ["sum", {"level": 1}]},
    {"input": "Wie heißt 世界?", "label": "01", "tags": []},
    {"input": "third", "label": None, "tags": None},
]


def rows_of(spec, probs="1.0", *, split="train", max_samples=1e6, seed=0):
    return load_rows(str(spec), probs, split=split, max_samples=max_samples, seed=seed)


def inputs_of(spec, probs="1.0", **kwargs):
    return [row["input"] for row in rows_of(spec, probs, **kwargs)]


def numbered(prefix, count):
    return [{"input": f"{prefix}{i}"} for i in range(count)]


# ---- every kind of source (U9) ----


@pytest.mark.parametrize("kind", ["lines", "array", "pretty", "lines_in_json", "array_in_jsonl", "windows"])
def test_json_rows_keep_the_values_of_the_file(tmp_path, kind):
    """U9: an int stays an int, '01' stays text, null and nested values are as written."""
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
    name, text = {
        "lines": ("rows.jsonl", lines),
        "array": ("rows.json", json.dumps(ROWS)),
        "pretty": ("rows.json", json.dumps(ROWS, indent=2, ensure_ascii=False) + "\n\n"),
        "lines_in_json": ("rows.json", lines),
        "array_in_jsonl": ("rows.jsonl", json.dumps(ROWS)),
        "windows": ("rows.jsonl", "\ufeff" + lines.replace("\n", "\r\n")),
    }[kind]
    (tmp_path / name).write_bytes(text.encode())
    rows = rows_of(tmp_path / name)
    assert list(rows) == ROWS
    assert [rows[i] for i in (2, 0, 1)] == [ROWS[2], ROWS[0], ROWS[1]]


def test_parquet_rows_keep_their_types(tmp_path):
    from datasets import Dataset

    rows = [
        {"input": "a", "label": 7, "turns": [{"role": "user", "content": "x"}]},
        {"input": "b", "label": None, "turns": []},
    ]
    Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    loaded = rows_of(tmp_path / "rows.parquet")
    assert list(loaded) == rows and loaded[1] == rows[1]
    assert loaded.where(1).endswith("rows.parquet row 2")


def test_csv_columns_are_numbers_only_where_nothing_is_lost(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(
        'input,count,code,ratio,mixed,ok\r\n"two\nlines, ""quoted""",1,01,0.5,1,True\r\n\r\nplain,-2,7,2.25,,False\r\n'
    )
    rows = rows_of(path)
    assert list(rows) == [
        {"input": 'two\nlines, "quoted"', "count": 1, "code": "01", "ratio": 0.5, "mixed": "1", "ok": True},
        {"input": "plain", "count": -2, "code": "7", "ratio": 2.25, "mixed": "", "ok": False},
    ]
    assert rows.where(1).endswith("rows.csv line 5")


@pytest.mark.parametrize("spec, expected", [("", "train"), ("@train", "train"), ("@test", "test")])
def test_saved_dataset_dict_gives_one_split(tmp_path, spec, expected):
    from datasets import Dataset, DatasetDict

    splits = {name: Dataset.from_list(numbered(name, 2)) for name in ("train", "test")}
    DatasetDict(splits).save_to_disk(str(tmp_path / "saved"))
    assert inputs_of(f"{tmp_path}/saved{spec}") == [f"{expected}0", f"{expected}1"]
    with pytest.raises(UserError, match="no split 'dev', it has: train, test"):
        rows_of(f"{tmp_path}/saved@dev")


def test_saved_dataset_gives_plain_values_whatever_format_it_was_saved_with(tmp_path):
    from datasets import Dataset

    Dataset.from_list([{"input": "a", "label": 3}]).with_format("numpy").save_to_disk(str(tmp_path / "saved"))
    row = rows_of(tmp_path / "saved")[0]
    assert row == {"input": "a", "label": 3} and type(row["label"]) is int


@pytest.mark.parametrize(
    "files",
    [
        {"train": "train.jsonl", "test": "test.jsonl"},
        {"train": "data/train-00000-of-00001.jsonl", "test": "data/test-00000-of-00001.jsonl"},
        {"train": "train/rows.jsonl", "test": "test/rows.jsonl"},
        {"train": "gsm8k_train.jsonl", "test": "gsm8k_eval.jsonl"},
    ],
)
def test_directory_splits_are_not_merged(tmp_path, files):
    """U9: train and test files of one directory are two splits."""
    for split, name in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_jsonl(tmp_path / name, numbered(split, 2))
    assert inputs_of(tmp_path) == ["train0", "train1"]
    assert inputs_of(f"{tmp_path}@test") == ["test0", "test1"]
    assert inputs_of(tmp_path, split="test") == ["test0", "test1"]


def test_directory_without_split_names_is_all_train(tmp_path):
    write_jsonl(tmp_path / "b.jsonl", numbered("b", 1))
    write_jsonl(tmp_path / "a.jsonl", numbered("a", 2))
    assert inputs_of(tmp_path) == ["a0", "a1", "b0"]
    assert inputs_of(f"{tmp_path}@b") == ["b0"]


def test_hub_name_is_loaded_with_datasets(monkeypatch):
    import datasets

    data = {"train": datasets.Dataset.from_list(numbered("hub", 2))}
    monkeypatch.setattr(datasets, "load_dataset", lambda name: data)
    assert inputs_of("someone/prompts") == ["hub0", "hub1"]


def test_hub_failure_is_one_line(monkeypatch):
    import datasets

    def unreachable(name):
        raise ConnectionError("Couldn't reach the Hub\nmore lines")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"someone/prompts .*Couldn't reach the Hub more lines") as error:
        rows_of("someone/prompts")
    assert "\n" not in str(error.value)


# ---- mixtures ----


def test_two_sources_mix_by_probability_until_one_is_used_up(tmp_path):
    """Each source's rows come once and in order; the shorter source ends the mixture."""
    a, b = (
        write_jsonl(tmp_path / "a.jsonl", numbered("a", 1000)),
        write_jsonl(tmp_path / "b.jsonl", numbered("b", 100)),
    )
    mixed = inputs_of(f"{a},{b}", "0.5,0.5")
    from_a, from_b = ([x for x in mixed if x[0] == k] for k in "ab")
    assert from_b == [f"b{i}" for i in range(100)] and from_a == [f"a{i}" for i in range(len(from_a))]
    assert 60 < len(from_a) < 140  # mean 100, standard deviation 14
    assert mixed == inputs_of(f"{a},{b}", "2,2") and mixed != inputs_of(f"{a},{b}", "0.5,0.5", seed=1)
    assert inputs_of(f"{a},{b}", "0.5,0.5", max_samples=10) == mixed[:10]
    assert "b.jsonl [100 of 100 rows]" in rows_of(f"{a},{b}", "0.5,0.5").name


def test_mixture_names_the_right_file_and_keeps_types_apart(tmp_path):
    a = write_jsonl(tmp_path / "a.jsonl", [{"input": "a", "label": i} for i in range(20)])
    b = write_jsonl(tmp_path / "b.jsonl", [{"input": "b", "label": str(i), "extra": 1} for i in range(20)])
    rows = rows_of(f"{a},{b}", "0.5,0.5")
    for index, row in enumerate(rows):
        assert rows[index] == row
        assert type(row["label"]) is (int if row["input"] == "a" else str)
        assert rows.where(index) == f"{a if row['input'] == 'a' else b} line {int(row['label']) + 1}"


@pytest.mark.parametrize(
    "probs, message",
    [
        ("1.0", "names 2 sources, --prompt_data_probs '1.0' has 1; give one number for each, such as 0.5,0.5"),
        ("0.5,0.2,0.3", "has 3"),
        ("0.5,half", "is not a list of numbers"),
        ("0.5,", "is not a list of numbers"),
        ("1.5,-0.5", "zero or more"),
        ("nan,1", "zero or more"),
        ("inf,1", "zero or more"),
        ("0,0", "not all zero"),
    ],
)
def test_bad_probabilities_are_refused(probs, message):
    with pytest.raises(UserError, match=message):
        parse_probs(probs, 2, flag="--prompt_data")


def test_one_source_has_no_probability(tmp_path):
    """0.5 of it is not what would be read."""
    one = write_jsonl(tmp_path / "rows.jsonl", numbered("x", 2))
    assert inputs_of(one, "1") == ["x0", "x1"]
    with pytest.raises(UserError, match=r"'0[.]5': every row comes from the one source"):
        rows_of(one, "0.5")


def test_path_with_a_comma_or_an_at_sign_is_one_file(tmp_path):
    for name in ("a,b.jsonl", "a@b.jsonl"):
        assert inputs_of(write_jsonl(tmp_path / name, numbered("x", 1))) == ["x0"]


# ---- what can be wrong ----


def test_blank_lines_are_skipped_and_lines_still_counted(tmp_path):
    """U9: a trailing blank line is no row; a blank line in between does not shift the line numbers."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"input": "a"}\n\n  \n{"input": "b"}\n\n')
    rows = rows_of(path)
    assert [row["input"] for row in rows] == ["a", "b"] and rows.where(1) == f"{path} line 4"


@pytest.mark.parametrize(
    "name, content",
    [
        ("r.jsonl", ""),
        ("r.jsonl", "\n\n"),
        ("r.json", "[]"),
        ("r.json", ""),
        ("r.csv", ""),
        ("r.csv", "input,label\n"),
    ],
)
def test_file_without_rows_is_refused(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=f"--prompt_data .*{name} has no rows"):
        rows_of(tmp_path / name)


@pytest.mark.parametrize(
    "name, content, message",
    [
        (
            "r.jsonl",
            '{"input": "a"}\n{"input": "b"\n{"input": "c"}\n',
            r"r.jsonl line 2 is not valid JSON: .* column 14",
        ),
        ("r.jsonl", '{"input": "a"}\n\n[1, 2]\n', r"r.jsonl line 3 is a list \(\[1, 2\]\), expected an object"),
        ("r.jsonl", '{"input": "a"}\n"text"\n', "r.jsonl line 2 is text"),
        ("r.json", '[{"input": "a"},\n {"input": }\n]', "r.json line 2 is not valid JSON"),
        ("r.json", '[{"input": "a"}\n {"input": "b"}]', "r.json line 2: expected ',' or ']' after item 1"),
        ("r.json", '[{"input": "a"},\n', "r.json line 2 is not valid JSON"),
        ("r.json", '[{"input": "a"}]\n{}', "r.json line 2: there is text after the end of the array"),
        ("r.json", '[{"input": "a"},\n 5]', r"r.json line 2 \(item 2\) is a number \(5\)"),
        ("r.json", '{\n "input": "a"\n}', "r.json line 1 is not valid JSON"),
        ("r.csv", "input,label\na,1\nb\n", r"r.csv line 3 has 1 cells, the header has 2 \(input, label\)"),
        ("r.csv", 'input,label\na,1\n"b,2\n', "r.csv line 3 is not valid CSV"),
        ("r.csv", "input,input\na,1\n", "names a column twice"),
        ("r.txt", "hello", "unknown kind of file '.txt'"),
        ("r.parquet", "", "is empty"),
        ("r.parquet", "not parquet", "r.parquet cannot be loaded"),
    ],
)
def test_malformed_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message) as error:
        list(rows_of(tmp_path / name))
    assert "\n" not in str(error.value)


def test_text_in_another_encoding_is_named(tmp_path):
    (tmp_path / "r.jsonl").write_bytes('{"input": "a"}\n{"input": "é"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match=r"r.jsonl line 2 is not UTF-8"):
        list(rows_of(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("spec", ["rows.jsonl", "/no/such/dir", "./nothing", "a/b/c", "rows.parquet@test"])
def test_missing_file_is_not_looked_for_on_the_hub(spec):
    with pytest.raises(UserError, match="no such file or directory"):
        rows_of(spec)


def test_directory_and_name_errors(tmp_path):
    with pytest.raises(UserError, match=r"the directory holds no \.jsonl"):
        rows_of(tmp_path)
    path = write_jsonl(tmp_path / "rows.jsonl", numbered("x", 1))
    with pytest.raises(UserError, match="a single file has no split 'test'"):
        rows_of(f"{path}@test")
    assert inputs_of(f"{path}@train") == ["x0"]
    with pytest.raises(UserError, match="empty name between its commas"):
        rows_of(f"{path},,{path}", "1,1,1")
    with pytest.raises(UserError, match="--max_samples must be at least 1"):
        rows_of(path, max_samples=0)


def test_file_that_changes_during_the_run_is_an_error(tmp_path):
    """Offsets into another content would hand out a label of another row."""
    path = write_jsonl(tmp_path / "rows.jsonl", numbered("x", 3))
    rows = rows_of(path)
    write_jsonl(path, numbered("longer", 3))
    with pytest.raises(UserError, match="was changed while it was in use"):
        rows[0]


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=4), v, max_size=3), max_leaves=6
)
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(
    rows=st.lists(st.dictionaries(st.text(max_size=5), VALUES, max_size=4), min_size=1, max_size=5),
    as_array=st.booleans(),
)
def test_any_json_row_comes_back_equal(tmp_path, rows, as_array):
    path = tmp_path / "fuzz.json"
    path.write_text(json.dumps(rows) if as_array else "\n".join(map(json.dumps, rows)))
    assert json.dumps(list(rows_of(path))) == json.dumps(rows)


@FUZZ
@given(
    cells=st.lists(
        st.tuples(*[st.text(st.characters(codec="utf-8"), max_size=6) | st.integers().map(str)] * 2), min_size=1
    )
)
def test_any_csv_cell_comes_back_as_written(tmp_path, cells):
    """Whatever type a column gets, its text is that of the file."""
    path = tmp_path / "fuzz.csv"
    with open(path, "w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([("input", "label"), *cells])
    assert [tuple(map(str, row.values())) for row in rows_of(path)] == cells


@FUZZ
@given(
    content=st.binary(max_size=40)
    | st.text(alphabet='{}[]":,\\ \nainput01"\'é\ud800', max_size=40).map(
        lambda t: t.encode("utf-8", "surrogatepass")
    ),
    suffix=st.sampled_from([".json", ".jsonl", ".csv"]),
)
def test_any_bytes_give_rows_or_a_user_error(tmp_path, content, suffix):
    path = tmp_path / f"fuzz{suffix}"
    path.write_bytes(content)
    try:
        rows = list(rows_of(path))
    except UserError as error:
        assert "fuzz" in str(error)
    else:
        assert rows and all(isinstance(row, dict) for row in rows)
