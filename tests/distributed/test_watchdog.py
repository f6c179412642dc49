"""A run that hangs ends by itself, each rank shows where it is, and a slow one that moves is left alone."""

import os
import signal
import time

import pytest

from tests.guarded import run_guarded

TIMEOUT_S = 2
# A fifth of the timeout for signs that are on their way, the backstop's 5 s, and the time a busy machine takes.
LIMIT_S = 1.2 * TIMEOUT_S + 5 + 10

pytestmark = pytest.mark.slow


class Program:
    """`failing` hangs as `hang` says in phase `reward` of step 3; the others wait for it."""

    def __init__(self, folder, hang):
        self.folder, self.hang = folder, hang

    def __call__(self, rank, failing):
        from spmdrl.distributed import comm, guard

        comm.barrier()
        guard.set_step(3)
        time.sleep(TIMEOUT_S / 4)  # the watchdogs note that start-up is over
        guard.set_phase("reward")
        if rank == failing:
            (self.folder / "failed_at").write_text(str(time.time()))
            self.hang()
        guard.set_phase("advantages")
        comm.barrier()


def sleep_for_ever():
    time.sleep(1000)


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def search_for_ever():
    """A pattern with exponential backtracking: no other thread of this process gets to run."""
    import re

    re.match(r"(a+)+$", "a" * 40 + "b")


def move_slowly():
    """Three times the timeout, with signs of progress."""
    from spmdrl.distributed import whereabouts

    for _ in range(30):
        time.sleep(TIMEOUT_S / 10)
        whereabouts.beat()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_sleeps_for_ever_ends_the_run_and_all_show_where_they_are(tmp_path, failing):
    ended = run_guarded(tmp_path, Program(tmp_path, sleep_for_ever), failing=failing, phase_timeout=TIMEOUT_S)
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < LIMIT_S
    for rank, error in enumerate(ended.errors):
        phase, call = ("reward", "in sleep_for_ever") if rank == failing else ("advantages", "in barrier")
        assert call in error and error.count("most recent call first") > 1, error
        line = error.splitlines()[-1]
        assert line.startswith(f"[rank {rank}] ") and f" in {phase} of step 3: " in line, line
        assert "no rank has made progress for " in line and f"(--phase_timeout {TIMEOUT_S})" in line


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_is_stopped_is_killed_by_the_others(tmp_path, failing):
    """SIGSTOP stops its watchdog too."""
    program = Program(tmp_path, stop_itself)
    ended = run_guarded(tmp_path, program, failing=failing, world_size=2, phase_timeout=TIMEOUT_S)
    other = 1 - failing
    assert (ended.codes[failing], ended.codes[other]) == (-signal.SIGKILL, 1)
    assert ended.seconds < LIMIT_S + 12
    assert "in barrier" in ended.errors[other]
    line = ended.errors[other].splitlines()[-1]
    assert line.startswith(f"[rank {other}] stuck in advantages of step 3: no rank has made progress for ")


def test_a_rank_in_which_no_thread_gets_to_run_ends_too(tmp_path):
    ended = run_guarded(tmp_path, Program(tmp_path, search_for_ever), world_size=2, phase_timeout=TIMEOUT_S)
    assert ended.codes == [1, 1]
    assert ended.seconds < LIMIT_S
    assert "in search_for_ever" in ended.errors[1]
    assert "stuck in advantages of step 3" in ended.errors[0]


def test_a_slow_rank_that_moves_is_left_alone(tmp_path):
    ended = run_guarded(tmp_path, Program(tmp_path, move_slowly), world_size=2, phase_timeout=TIMEOUT_S)
    assert ended.codes == [0, 0]
    assert ended.errors == ["", ""]
