"""Every recipe of docs/algorithms.md trains: its flags with smaller sizes, two steps of two optimizer steps each."""

import math

import pytest
import torch

from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.trainer.ppo_trainer import PPOTrainer
from tests.algos.recipes import RECIPES
from tests.trainer.runs import FLAGS, read_jsonl, write_inputs

# Right or wrong by a coin, so that a group of four is rarely all of one kind.
REWARD = """
import zlib

def reward_func(queries, prompts, labels):
    return [float(zlib.crc32(query.encode()) % 2) for query in queries]
"""
SMALLER = {"n_samples_per_prompt": 4, "generate_max_len": 8, "overlong_buffer_len": 4}
PROMPTS = 2  # of one step


def flags_of(words):
    """["--a", "1", "2", "--b"] → {"a": ["1", "2"], "b": []}"""
    flags = {}
    for word in words:
        if word.startswith("--"):
            flags[word[2:]] = []
        else:
            flags[list(flags)[-1]].append(word)
    return flags


def config_of(recipe, inputs, save_path):
    given = flags_of(RECIPES[recipe])
    for name, largest in SMALLER.items():
        if name in given:
            given[name] = [str(min(int(given[name][0]), largest))]
    sizes = {
        "rollout_batch_size": [PROMPTS],
        "generate_max_len": [SMALLER["generate_max_len"]],
        "train_batch_size": [PROMPTS * int(given.get("n_samples_per_prompt", ["1"])[0]) // 2],
        "save_path": [save_path],
        "max_samples": [2 * PROMPTS],
    }
    tests = {name: [value] for name, value in FLAGS.items() if name not in ("advantage_estimator", "bf16")}
    merged = tests | {name: [value] for name, value in inputs.items()} | sizes | given
    if "n_samples_per_prompt" not in given:
        del merged["n_samples_per_prompt"]
    words = [str(word) for name, values in merged.items() for word in (f"--{name}", *values)]
    return read_config(PPOConfig, [*words, "--no_bf16"])


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"), num_prompts=2 * PROMPTS, reward=REWARD)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_trains(tmp_path, one_rank, inputs, recipe):
    config = config_of(recipe, inputs, tmp_path)
    config.validate(world_size=1)
    trainer = PPOTrainer(config)
    before = {name: w.clone() for name, w in iter_weights(trainer.actor, bucket_mb=64)}
    trainer.fit()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert len(rows) == 2 or (config.algo.dynamic_filtering and rows)  # filtering may draw the prompts of both steps
    for row in rows:
        assert all(math.isfinite(value) for value in row.values()), row
        assert ("policy/kl" in row) == (config.algo.init_kl_coef > 0)
        assert ("critic/explained_variance" in row) == config.needs_critic
        assert row["policy/ratio_first_pass"] < 1e-4
    assert any(not torch.equal(before[name], w) for name, w in iter_weights(trainer.actor, bucket_mb=64))
