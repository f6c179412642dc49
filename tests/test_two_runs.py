"""Whole runs in one --save_path and --ckpt_path: one at a time, none blocked by a dead one, and none trained again."""

import random
import signal
import sys

import pytest

from tests.launched import TRAIN, slurm_tasks, start_by_hand
from tests.test_stopping import STEPS, flags_of, logged_steps

pytestmark = pytest.mark.slow


def test_one_lives_one_is_refused_and_whoever_comes_after_a_kill_or_the_end_goes_on(tmp_path):
    flags = [*flags_of(tmp_path, tmp_path), "--save_steps", "1"]

    def start(log):
        job = random.SystemRandom().randrange(10**9)  # decides the port
        return start_by_hand([sys.executable, TRAIN, *flags], slurm_tasks(2, job=job), tmp_path / log)

    first = start("first")
    first.until(f"step 2/{STEPS} |")
    for process in first.processes:
        process.send_signal(signal.SIGSTOP)  # or it could be at its end before the second one is at its beginning
    for process in start("second").wait():
        assert process.code == 2, process.out
    for rank in (0, 1):
        (line,) = process.lines(f"[rank {rank}] ")
        pid = first.processes[0].pid
        assert f"error: --save_path {tmp_path / 'out'} is in use by another run (pid {pid} on " in line

    for process in first.processes:
        process.kill()
    third = start("third").wait()[0]
    assert third.code == 0, third.out
    assert third.lines("resuming from ")
    assert logged_steps(tmp_path) == list(range(1, STEPS + 1))

    fourth = start("fourth").wait()[0]
    assert fourth.code == 0, fourth.out
    assert len(fourth.lines(f"this run is finished, its model is in {tmp_path / 'out'}; ")) == 1
    assert not fourth.lines("step ", " | ")
