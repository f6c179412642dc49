"""Whatever a data file or a yaml file holds, the answer is a result or one line; SPMDRL_FUZZ=2000 looks for longer."""

import json
import os
import string

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from spmdrl.config import PPOConfig, PromptDataConfig
from spmdrl.config.flags import flags_of
from spmdrl.config.parse import read_config
from spmdrl.data.prompts import load_prompts
from spmdrl.errors import UserError
from spmdrl.rewards.function import read_output
from spmdrl.trainer.checkpoint_folder import find

fuzz = settings(
    max_examples=int(os.environ.get("SPMDRL_FUZZ", "60")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
TEXT = st.text(st.characters(exclude_categories=()), max_size=20)
SCALARS = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), TEXT, st.just(10**4200))
ROLES = st.sampled_from(["user", "system", "assistant", "tool", ""])
MESSAGES = st.lists(
    st.fixed_dictionaries({}, optional={"role": ROLES | SCALARS, "content": SCALARS, "tool_calls": SCALARS}),
    max_size=3,
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8
)
CELLS = JSON | MESSAGES | MESSAGES.map(lambda messages: dumped(messages))
ROWS = st.fixed_dictionaries({}, optional={"q": CELLS, "a": JSON}) | JSON
WAYS = st.sampled_from([{}, {"apply_chat_template": True}, {"input_template": "Q: {}"}, {"label_key": "a"}])
FLAGS = st.sampled_from(sorted(flags_of(PPOConfig)))
WORDS = st.text(string.printable, max_size=12) | st.sampled_from(["None", "inf", "-1", "0", "1e400", "true", "a,b"])


def dumped(value):
    try:
        return json.dumps(value)
    except ValueError:  # a whole number of more digits than Python writes
        return "9" * 5000


def answer(function, *args, **kwargs):
    """The result, or None with an error that a person can read in one line, as which the program prints it."""
    try:
        return function(*args, **kwargs)
    except UserError as error:
        assert 0 < len(" ".join(str(error).split())) < 2000, str(error)
        return None


def load(tokenizer, **flags):
    prompts = load_prompts(PromptDataConfig(**{"input_key": "q", **flags}), tokenizer, seed=0)
    assert all(prompt.prompt and prompt.prompt_ids for prompt in prompts)
    return prompts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


@fuzz
@given(rows=st.lists(ROWS, max_size=4), way=WAYS, as_array=st.booleans())
@example(rows=[{"q": "x"}, {"q": [{"role": "user", "content": "x"}]}], way={}, as_array=False)
@example(rows=[{"q": "a\u2028b\x85c"}], way={}, as_array=False)
def test_rows_of_any_shape(folder, tokenizer, rows, way, as_array):
    path = folder / "rows.json"
    lines = [dumped(row) for row in rows]
    path.write_text("[" + ",".join(lines) + "]" if as_array else "\n".join(lines))
    answer(load, tokenizer, prompt_data=str(path), **way)


@fuzz
@given(content=st.binary(max_size=60), suffix=st.sampled_from([".jsonl", ".json", ".csv", ".parquet", ".arrow"]))
@example(content=b"q,a\r\n\x00,1\r", suffix=".csv")
def test_files_of_any_bytes(folder, tokenizer, content, suffix):
    path = folder / f"bytes{suffix}"
    path.write_bytes(content)
    answer(load, tokenizer, prompt_data=str(path))


@fuzz
@given(text=st.text(string.printable, max_size=40), way=WAYS)
def test_text_as_a_cell_or_as_messages_in_json(folder, tokenizer, text, way):
    path = folder / "text.jsonl"
    path.write_text(dumped({"q": text, "a": 1}) + "\n" + dumped({"q": f'[{{"role": {text}', "a": 1}))
    answer(load, tokenizer, prompt_data=str(path), **way)


@fuzz
@given(content=st.dictionaries(FLAGS | TEXT | st.integers(), JSON, max_size=4))
def test_yaml_of_any_shape(folder, content):
    path = folder / "run.yaml"
    try:
        path.write_text(yaml.safe_dump(content))
    except ValueError:  # a whole number of more digits than Python writes
        return
    answer(read_config, PPOConfig, ["--config", str(path)])


@fuzz
@given(content=st.binary(max_size=60) | st.text(string.printable, max_size=60).map(str.encode))
@example(content=b"seed: 0o" + b"7" * 6000)
@example(content=b"seed: 1:" + b"59:" * 3000 + b"1")
@example(content=b"seed: 2001-01-01T99:00:00Z")
@example(content=b"&a [*a, *b]")
def test_yaml_files_of_any_bytes(folder, content):
    path = folder / "bytes.yaml"
    path.write_bytes(content)
    answer(read_config, PPOConfig, ["--config", str(path)])


@fuzz
@given(words=st.lists(FLAGS.map("--{}".format) | WORDS, max_size=5))
def test_command_lines_of_any_words(words):
    answer(read_config, PPOConfig, words)


@fuzz
@given(returned=JSON | st.lists(st.floats() | st.integers(), min_size=2, max_size=2))
def test_rewards_of_any_shape(returned):
    output = answer(read_output, returned, ["row 1", "row 2"], "f in r.py")
    assert output is None or (output.rewards.shape == (2,) and bool(output.rewards.isfinite().all()))


@fuzz
@given(
    manifest=st.binary(max_size=40) | JSON.map(lambda value: dumped(value).encode()),
    latest=st.binary(max_size=40)
    | (JSON | st.fixed_dictionaries({}, optional={"run": JSON, "name": JSON})).map(
        lambda value: dumped(value).encode()
    ),
)
@example(manifest=b'{"format": 1}', latest=b'{"run": ["x"], "name": 3}')
@example(manifest=b"[" * 100_000, latest=b"[" * 100_000)
def test_manifests_and_names_of_the_latest_checkpoint(folder, manifest, latest):
    """Nothing of these is a checkpoint: none is found, or one line says which is not whole."""
    root = folder / "checkpoints"
    (root / "step_000001").mkdir(parents=True, exist_ok=True)
    (root / "step_000001" / "manifest.json").write_bytes(manifest)
    (root / "latest").write_bytes(latest)
    try:
        found, problems = find(root)
    except ValueError as error:
        assert "is not whole" in str(error)
    else:
        assert found == []
        assert len(problems) == 1
