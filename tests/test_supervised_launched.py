"""A supervised command line on two ranks that is asked to stop: the same command ends as if nothing had been."""

import json
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.launched import ROOT, slurm_tasks, start, start_ranks, torchrun
from tests.trainer.supervised import FLAGS, OWN_FLAGS, write_inputs

pytestmark = pytest.mark.slow


def words(inputs: dict, folder: Path) -> list[str]:
    flags = {**FLAGS, **OWN_FLAGS["dpo"], **inputs, "zero_stage": 3, "max_epochs": 12, "save_path": folder / "out"}
    flags |= {"ckpt_path": folder / "checkpoints", "eval_steps": 10}
    flags = {name: value for name, value in flags.items() if name not in ("teacher_model", "bf16")}
    given = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [str(ROOT / "cli" / "train_dpo.py"), *given, "--no_bf16", "--load_checkpoint"]


def steps_of(folder: Path) -> list[int]:
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if "train/loss" in row]


def test_a_run_that_is_stopped_goes_on_to_the_same_weights(tmp_path):
    inputs = write_inputs(tmp_path / "inputs")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = start_ranks(words(inputs, whole), slurm_tasks(2), tmp_path / "log").wait()[0]
    assert done.code == 0, done.out
    assert steps_of(whole) == list(range(1, 37))  # 12 epochs of 3 steps
    running = start(torchrun(*words(inputs, parts)), tmp_path / "log1")
    running.until("step 3/36 |")
    running.processes[0].send_signal(signal.SIGTERM)
    running.until("checkpoint saved in ")
    running.wait()
    assert 3 <= len(steps_of(parts)) < 36
    resumed = start_ranks(words(inputs, parts), slurm_tasks(2), tmp_path / "log2").wait()[0]
    assert resumed.code == 0, resumed.out
    assert resumed.lines("resuming from "), resumed.out
    assert steps_of(parts) == steps_of(whole)
    expected, found = (load_file(folder / "out" / "model.safetensors") for folder in (whole, parts))
    assert all((expected[name] == found[name]).all() for name in expected)
