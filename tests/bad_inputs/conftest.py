import json

import pytest

from spmdrl.config import PPOConfig, parse_config
from spmdrl.errors import UserError
from tests.tiny import make_model, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return make_tokenizer()


@pytest.fixture(scope="session")
def good_model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("models") / "good", "llama")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A working directory with a model as far as the command line looks, prompts and a reward function, and no
    launcher around it."""
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"max_position_embeddings": 4096}))
    (tmp_path / "p.jsonl").write_text('{"input": "1 + 1 ="}\n')
    (tmp_path / "r.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    return tmp_path


FLAGS = {
    "pretrain": "model",
    "prompt_data": "p.jsonl",
    "remote_rm_url": "r.py",
    "save_path": "out",
    "ckpt_path": "ckpt",
    "advantage_estimator": "group_norm",
    "n_samples_per_prompt": "8",
}


@pytest.fixture
def refusal(here, capsys):
    """refusal("--seed", "x"): the one line that the program says to these flags beside good ones; it exits with 2."""

    def refusal(*words):
        argv = [word for name, value in FLAGS.items() for word in (f"--{name}", value)]
        with pytest.raises(SystemExit) as exit:
            parse_config(PPOConfig, [*argv, *words])
        said = capsys.readouterr()
        assert exit.value.code == 2
        assert said.out == ""
        assert said.err.startswith("error: ")
        assert said.err.endswith("\n")
        assert said.err.count("\n") == 1
        return said.err.removeprefix("error: ").rstrip("\n")

    return refusal


@pytest.fixture
def line_of():
    """line_of(function, ...): what the UserError says that the function raises, which is one line."""

    def line_of(function, *args, **kwargs):
        with pytest.raises(UserError) as error:
            function(*args, **kwargs)
        assert "\n" not in str(error.value)
        return str(error.value)

    return line_of
