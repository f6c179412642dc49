"""examples/pipeline.sh: its data keeps questions apart, its commands are ones that the programs take, and it runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.config.supervised import RMConfig, SFTConfig
from tests.launched import BIN, ROOT, launch
from tests.tiny import make_model

STUB = """#!/usr/bin/env python3
import json, sys
from pathlib import Path
words = sys.argv[1:]
with open({log!r}, "a") as file:
    file.write(json.dumps(words) + "\\n")
folder = Path(words[words.index("--save_path") + 1])
folder.mkdir(parents=True)
names = ("eval/loss", "eval/accuracy", "eval/reward", "policy/kl")
(folder / "metrics.jsonl").write_text("".join(json.dumps(dict.fromkeys(names, x)) + "\\n" for x in (0.25, 0.5)))
"""


def make_data(folder):
    subprocess.run([sys.executable, "examples/make_pipeline_data.py", str(folder)], cwd=ROOT, check=True)
    return {
        path.relative_to(folder).as_posix(): [json.loads(line) for line in path.read_text().splitlines()]
        for path in folder.rglob("*.jsonl")
    }


def test_no_held_out_question_is_trained_on_and_good_answers_are_right(tmp_path):
    data = make_data(tmp_path / "data")
    assert data == make_data(tmp_path / "again")
    prompts = {name: {row.get("prompt", row.get("input")) for row in rows} for name, rows in data.items()}
    held_out = prompts["sft/test.jsonl"] | prompts["pairs/test.jsonl"] | prompts["prompts/test.jsonl"]
    trained = prompts["sft/train.jsonl"] | prompts["pairs/train.jsonl"] | prompts["prompts/train.jsonl"]
    assert len(held_out) == 48
    assert not held_out & trained
    kinds = set()
    for row in data["pairs/train.jsonl"]:
        question, _, result = row["chosen"].removesuffix(".").partition(" is ")
        assert eval(question) == int(result)
        assert row["prompt"] == f"What is {question}?"
        assert row["rejected"] != row["chosen"]
        kinds.add("wrong" if row["rejected"].startswith(question) else row["rejected"].replace(result, ""))
    assert kinds == {"wrong", "", "The answer is .", "Maybe ?"}
    for row in data["sft/train.jsonl"]:
        assert str(eval(row["prompt"].removeprefix("What is ").removesuffix("?"))) in row["answer"]


def test_each_stage_is_a_command_line_that_its_program_takes(tmp_path):
    """With a launcher that only writes down what it is asked for; each stage starts from what the one before saved."""
    log, stub, out = tmp_path / "log", tmp_path / "bin" / "torchrun", tmp_path / "out"
    stub.parent.mkdir()
    stub.write_text(STUB.format(log=str(log)))
    stub.chmod(0o755)
    env = os.environ | {"PATH": f"{stub.parent}:{BIN}:{os.environ['PATH']}", "OUT": str(out)}
    env |= {"MODEL": "some/model", "DATA": str(tmp_path / "data")}
    done = subprocess.run(["bash", "examples/pipeline.sh"], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "rm: accuracy on held-out pairs 0.250 -> 0.500" in done.stdout
    commands = [json.loads(line) for line in log.read_text().splitlines()]
    configs = []
    for cls, words in zip((SFTConfig, RMConfig, PPOConfig), commands, strict=True):
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        configs.append(read_config(cls, words[script + 1 :]))
    sft, rm, ppo = configs
    assert sft.model.pretrain == "some/model"
    assert rm.model.pretrain == ppo.model.pretrain == sft.checkpoint.save_path
    assert ppo.reward.reward_pretrain == rm.checkpoint.save_path
    assert ppo.needs_critic and ppo.algo.init_kl_coef > 0 and ppo.deepspeed.zero_stage == 3


@pytest.mark.slow
def test_the_pipeline_runs_with_four_roles_on_two_ranks(tmp_path):
    make_data(tmp_path / "data")
    model = make_model(tmp_path / "model", "llama")
    env = {"MODEL": model, "DATA": str(tmp_path / "data"), "OUT": str(tmp_path / "out"), "PPO_PROMPTS": "32"}
    done = launch(["bash", "examples/pipeline.sh"], tmp_path / "log", timeout_s=900, **env)
    assert done.code == 0, done.out
    for stage, what in (
        ("sft", "loss of held-out"),
        ("rm", "accuracy on"),
        ("ppo", "reward on"),
        ("ppo", "KL to the"),
    ):
        assert len(done.lines(f"{stage}: {what}")) == 1, done.out
    for stage in ("sft", "rm", "ppo"):
        assert Path(tmp_path, "out", stage, "model.safetensors").exists()
