"""The examples that sample and train by turns, word for word, on a tiny model."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.launched import BIN, ROOT
from tests.tiny import make_model, write_jsonl

# The tiny model knows no sums; a reward that each of its answers has in another measure.
REWARD = """
def reward_func(queries, prompts, labels, **columns):
    return [len(set(query[len(prompt):])) for query, prompt in zip(queries, prompts)]
"""
FLAGS = ("--engine", "hf", "--prompt_max_len", "64", "--max_new_tokens", "6", "--n_samples_per_prompt", "3")


@pytest.fixture
def run_example(tmp_path):
    (tmp_path / "reward.py").write_text(REWARD)
    rows = [{"input": f"What is {i} plus {i}?", "label": str(2 * i)} for i in range(6)]
    given = {
        "MODEL": make_model(tmp_path / "model", max_positions=1024),
        "DATA": write_jsonl(tmp_path / "prompts.jsonl", rows),
        "REWARD": f"{tmp_path / 'reward.py'}:reward_func",
        "OUT": str(tmp_path / "out"),
        "RANKS": "1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{BIN}:{os.environ['PATH']}",
    }

    def run_example(name, **environment):
        command = ["bash", str(ROOT / "examples" / name), *FLAGS]
        env = os.environ | given | environment
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=400)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout, Path(given["OUT"])

    return run_example


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_two_rounds_of_dpo_each_on_pairs_of_the_model_before(run_example):
    said, out = run_example("iterative_dpo.sh", LEARNING_RATE="1e-2")
    first, second = (rows_of(out / f"pairs_{i}.jsonl") for i in (1, 2))
    assert {row["input"] for row in first + second} <= {f"What is {i} plus {i}?" for i in range(6)}
    assert all(row["chosen_reward"] > row["rejected_reward"] for row in first + second)
    assert [row["chosen"] for row in first] != [row["chosen"] for row in second]
    assert len(re.findall(r"^mean reward: ", said, re.M)) == 2
    for i in (1, 2):
        assert (out / f"model_{i}" / "model.safetensors").exists()
    used = (out / "model_2" / "config.yaml").read_text()
    assert f"pretrain: {out}/model_1\n" in used
    again, _ = run_example("iterative_dpo.sh")
    assert "mean reward: " not in again  # nothing was done twice


@pytest.mark.slow
def test_fine_tuning_on_the_best_responses(run_example):
    said, out = run_example("rejection_sampling.sh", THRESHOLD="5")
    best = rows_of(out / "best.jsonl")
    assert all(row["reward"] >= 5 for row in best)
    assert f"training: {len(best)} rows from {out}/best.jsonl" in said
    assert (out / "model" / "model.safetensors").exists()
