"""Whole runs that are asked to stop through their launcher, and go on from where they were."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from tests.launched import BIN, TRAIN, Running, launch, start, tiny_flags, torchrun

pytestmark = pytest.mark.slow
STEPS = 5
SLOW_REWARD = """
import time

def reward_func(queries, prompts, labels, **columns):
    time.sleep(0.7)
    return [len(set(query[len(prompt):])) / 10 for query, prompt in zip(queries, prompts)]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


def flags_of(folder: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "slow_reward.py").write_text(SLOW_REWARD)
    places = {"save_path": tmp_path / "out", "ckpt_path": tmp_path / "ckpt"}
    flags = tiny_flags(folder, num_episodes=STEPS, remote_rm_url=tmp_path / "slow_reward.py", **places)
    return [*flags, "--load_checkpoint"]


def logged_steps(tmp_path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]


def assert_saved(running: Running, *reasons: str) -> str:
    """Rank 0 says once where it stopped, for one of these reasons, and what to do; nobody complains. Returns all
    output."""
    running.until("checkpoint saved in ")
    deadline = time.monotonic() + 15  # the deepspeed command itself is gone before its ranks
    while running.members() and time.monotonic() < deadline:
        time.sleep(0.1)
    running.wait()
    out = running.log.read_text()
    (line,) = [line for line in out.splitlines() if "preempted in " in line]
    assert line.startswith("[rank 0] preempted in ") and any(f"({reason})" in line for reason in reasons), out
    assert line.endswith("; start the same command with --load_checkpoint"), out
    assert "] stopped" not in out and "] failed" not in out, out
    return out


def test_sigterm_to_torchrun_saves_and_the_same_command_goes_on(folder, tmp_path):
    command = torchrun(TRAIN, *flags_of(folder, tmp_path))
    running = start(command, tmp_path / "log")
    running.until(f"step 2/{STEPS} |")
    running.processes[0].send_signal(signal.SIGTERM)
    assert_saved(running, "SIGTERM")
    assert len(logged_steps(tmp_path)) < STEPS
    run = launch(command, tmp_path / "log2")
    assert run.code == 0, run.out
    assert logged_steps(tmp_path) == list(range(1, STEPS + 1))


def test_ctrl_c_reaches_the_deepspeed_launcher_and_its_ranks_and_saves_once(folder, tmp_path):
    """In a terminal the launcher, which passes it on as SIGTERM, and the ranks get it."""
    command = [str(BIN / "deepspeed"), "--num_gpus", "2", TRAIN, *flags_of(folder, tmp_path)]
    running = start(command, tmp_path / "log")
    running.until(f"step 2/{STEPS} |")
    os.killpg(running.processes[0].pid, signal.SIGINT)
    assert_saved(running, "SIGINT", "SIGTERM")  # of two that are pending a busy rank handles the later one first
