import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run_cli(tmp_path):
    """run_cli("--flag", "value", RANK="1"): the real script in a process of its own, without a launcher around it."""

    def run_cli(*words, **environment):
        launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_STEP_ID")
        env = {name: value for name, value in os.environ.items() if name not in launcher} | environment
        command = [sys.executable, str(ROOT / "cli" / "train_ppo.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=60)

    return run_cli


@pytest.fixture
def model_dir(tmp_path):
    """A model directory as far as the command line looks: 2048 positions and 6 attention heads."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"max_position_embeddings": 2048, "num_attention_heads": 6}))
    return path


@pytest.fixture
def complete(tmp_path, model_dir):
    """Flags that pass every check, to which a test adds the ones it is about."""
    (tmp_path / "prompts.jsonl").write_text('{"input": "1 + 1 ="}\n')
    (tmp_path / "reward.py").write_text("def reward_func(queries, prompts, labels): ...\n")
    flags = {
        "pretrain": model_dir,
        "prompt_data": tmp_path / "prompts.jsonl",
        "remote_rm_url": tmp_path / "reward.py",
        "save_path": tmp_path / "out",
        "advantage_estimator": "group_norm",
        "n_samples_per_prompt": 8,
    }
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]
