"""A request to stop reaches every rank at once, all stop at the same safe point, and a second signal ends the run."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.guarded import ends_of, run_guarded, start_guarded, until


class Run:
    """A run of many steps with a safe point in each, which keeps its state and says where it was asked to stop."""

    def __init__(self, folder, step_s=0.01, saved_in="ckpt/step", seconds_to_save=0.0):
        self.folder, self.step_s, self.saved_in, self.seconds_to_save = folder, step_s, saved_in, seconds_to_save

    def __call__(self, rank, failing):
        from spmdrl.distributed import comm, guard, preemption

        try:
            for step in range(1, 10_000):
                guard.set_step(step)
                guard.set_phase("train")
                preemption.safe_point()
                self.write(f"step{rank}", step)
                self.work(rank)
        except preemption.Preempted as error:
            self.write(f"stopped{rank}", step)
            guard.set_phase("save")
            time.sleep(self.seconds_to_save)
            comm.barrier()
            error.saved_in = self.saved_in
            raise

    def work(self, rank):
        time.sleep(self.step_s)

    def write(self, name, text):
        partial = self.folder / f".{name}"
        partial.write_text(str(text))
        partial.replace(self.folder / name)


def read(folder, name):
    return (folder / name).read_text()


def started(folder, program, **options):
    """The ranks of a run that has come to its second step."""
    ranks = start_guarded(folder, program, **options)
    until(lambda: (folder / "step0").exists() and int(read(folder, "step0")) > 1)
    return ranks


@pytest.mark.slow
@pytest.mark.parametrize(("number", "rank"), [("SIGTERM", 1), ("SIGUSR1", 0), ("SIGINT", 2)])
def test_a_signal_on_any_rank_stops_all_at_the_same_safe_point(tmp_path, number, rank):
    ranks = started(tmp_path, Run(tmp_path))
    os.kill(ranks[rank].pid, getattr(signal, number))
    ended = ends_of(ranks, tmp_path)
    assert ended.codes == [75, 75, 75]
    (step,) = {read(tmp_path, f"stopped{i}") for i in range(3)}
    assert ended.errors == [
        f"[rank 0] preempted in train of step {step} ({number}): checkpoint saved in ckpt/step; "
        "start the same command with --load_checkpoint\n",
        "",
        "",
    ]


class Deaf(Run):
    """Rank 0 waits in a collective, in C, for rank 1, which computes until it hears of a request."""

    def work(self, rank):
        from spmdrl.distributed import comm, preemption

        if rank == 0 and not preemption.requested():
            self.write("waits", "")
        deadline = time.monotonic() + 20
        while rank == 1 and not preemption.requested() and time.monotonic() < deadline:
            time.sleep(0.001)
        self.write(f"heard{rank}", time.time())
        comm.barrier()


@pytest.mark.slow
def test_a_rank_in_a_collective_passes_a_signal_on_within_milliseconds(tmp_path):
    ranks = start_guarded(tmp_path, Deaf(tmp_path), world_size=2)
    until((tmp_path / "waits").exists)
    time.sleep(0.5)
    os.kill(ranks[0].pid, signal.SIGTERM)
    sent_at = time.time()
    assert ends_of(ranks, tmp_path).codes == [75, 75]
    assert float(read(tmp_path, "heard1")) - sent_at < 0.5


@pytest.mark.slow
def test_signals_that_come_together_are_one(tmp_path):
    """As from a launcher that passes on what its ranks have got already."""
    ranks = started(tmp_path, Run(tmp_path, seconds_to_save=0.3), world_size=2)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        for rank in ranks:
            os.kill(rank.pid, number)
        time.sleep(0.05)
    assert ends_of(ranks, tmp_path).codes == [75, 75]


@pytest.mark.slow
def test_a_second_signal_ends_all_ranks_at_once(tmp_path):
    ranks = started(tmp_path, Run(tmp_path, seconds_to_save=40.0), world_size=2)
    os.kill(ranks[1].pid, signal.SIGTERM)
    time.sleep(1.5)
    sent_at = time.time()
    os.kill(ranks[1].pid, signal.SIGINT)
    ended = ends_of(ranks, tmp_path)
    assert time.time() - sent_at < 15
    assert ended.codes == [130, 130]
    step = read(tmp_path, "stopped1")
    said = f"stopped by a second signal (SIGINT) in save of step {step}"
    assert ended.errors[1] == f"[rank 1] {said}\n"
    assert ended.errors[0] == f"[rank 0] stopped in save of step {step}: rank 1 {said}\n"


@pytest.mark.slow
def test_slurms_sigterm_after_its_notice_is_not_a_second_signal(tmp_path):
    ranks = started(tmp_path, Run(tmp_path, seconds_to_save=3.0), world_size=1)
    os.kill(ranks[0].pid, signal.SIGUSR1)
    time.sleep(1.5)
    os.kill(ranks[0].pid, signal.SIGTERM)
    ended = ends_of(ranks, tmp_path)
    assert ended.codes == [75]
    assert "(SIGUSR1): checkpoint saved" in ended.errors[0]


def wait_for_ever(rank, failing):
    """Start-up, in which there is nothing to save yet."""
    failing.joinpath(f"up{rank}").write_text("")
    time.sleep(50)


@pytest.mark.slow
def test_before_the_first_safe_point_a_signal_ends_the_run_at_once(tmp_path):
    ranks = start_guarded(tmp_path, wait_for_ever, world_size=2, failing=tmp_path)
    until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
    os.kill(ranks[1].pid, signal.SIGTERM)
    ended = ends_of(ranks, tmp_path)
    assert ended.codes == [143, 143]
    assert ended.errors[1] == "[rank 1] stopped by SIGTERM in start-up\n"
    assert ended.errors[0] == "[rank 0] stopped in start-up: rank 1 stopped by SIGTERM in start-up\n"


@pytest.mark.slow
def test_a_request_that_nobody_answers_with_a_checkpoint_does_not_say_resume(tmp_path):
    ranks = started(tmp_path, Run(tmp_path, saved_in=None), world_size=1)
    os.kill(ranks[0].pid, signal.SIGTERM)
    ended = ends_of(ranks, tmp_path)
    assert ended.codes == [143]
    assert ended.errors[0].endswith(" (SIGTERM): nothing to save\n")


@pytest.mark.slow
def test_a_job_stops_by_itself_before_slurms_time_limit(tmp_path):
    """The job ends 10 s from now and 8 of them are the margin."""
    environ = {"SLURM_JOB_END_TIME": str(int(time.time()) + 10)}
    ended = run_guarded(tmp_path, Run(tmp_path), world_size=2, environ=environ, time_limit_margin_s=8)
    assert ended.codes == [75, 75]
    assert "(the job's time limit): checkpoint saved" in ended.errors[0]


class SlowStart(Run):
    def __call__(self, rank, failing):
        self.write(f"up{rank}", "")
        time.sleep(1.5)
        super().__call__(rank, failing)


@pytest.mark.slow
def test_a_notice_during_start_up_waits_for_one_step(tmp_path):
    """Slurm sends it too early for a job of two minutes; a run that made no step would never get further."""
    ranks = start_guarded(tmp_path, SlowStart(tmp_path), world_size=2)
    until(lambda: (tmp_path / "up0").exists() and (tmp_path / "up1").exists())
    os.kill(ranks[1].pid, signal.SIGUSR1)
    assert ends_of(ranks, tmp_path).codes == [75, 75]
    assert [read(tmp_path, f"stopped{rank}") for rank in range(2)] == ["2", "2"]


class Helper(Run):
    """Every step starts a forked process, which gets a signal: SIGUSR1 is not for it, SIGTERM ends it."""

    def work(self, rank):
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        time.sleep(0.1)
        os.kill(child, signal.SIGUSR1)
        time.sleep(0.1)
        assert os.waitpid(child, os.WNOHANG) == (0, 0)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        self.write(f"helped{rank}", "")


@pytest.mark.slow
def test_a_helper_process_that_is_ended_is_no_request(tmp_path):
    ranks = start_guarded(tmp_path, Helper(tmp_path), world_size=1)
    until(lambda: (tmp_path / "step0").exists() and int(read(tmp_path, "step0")) > 3)
    assert ranks[0].is_alive() and not (tmp_path / "stopped0").exists()
    os.kill(ranks[0].pid, signal.SIGTERM)
    assert ends_of(ranks, tmp_path).codes == [75]


# ---- one process ----------------------------------------------------------------------------------------------------
@pytest.fixture
def asked(monkeypatch):
    """The flag of this process, which a test may set."""
    from spmdrl.distributed import preemption

    flag = threading.Event()
    monkeypatch.setattr(preemption, "_asked", flag)
    monkeypatch.setattr(preemption, "_reason", "")
    monkeypatch.setattr(preemption, "_notice", "")
    monkeypatch.setattr(preemption, "_has_safe_points", False)
    return flag


def test_a_safe_point_passes_without_a_request_and_raises_with_one(asked):
    from spmdrl.distributed import preemption

    preemption.safe_point()
    preemption.request("SIGTERM")
    assert preemption.requested()
    with pytest.raises(preemption.Preempted, match=r"preempted in .* \(SIGTERM\)"):
        preemption.safe_point()


def test_errors_of_code_whose_helpers_a_signal_has_ended_are_excused_only_then(asked):
    from spmdrl.distributed import preemption

    with pytest.raises(ValueError), preemption.excused():
        raise ValueError("the pool is broken")
    asked.set()
    with preemption.excused():
        raise ValueError("the pool is broken")
    with pytest.raises(KeyboardInterrupt), preemption.excused():
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("environ", "margin_s", "at"),
    [
        ({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "5000"}, 120, [4880]),
        ({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1120"}, 120, [1090]),
        ({"SLURM_JOB_END_TIME": "5000"}, 120, [4880]),
        ({"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "5000"}, 0, []),
        ({"SLURM_JOB_END_TIME": ""}, 120, []),
        ({}, 120, []),
    ],
)
def test_the_margin_before_the_jobs_end_is_at_most_a_quarter_of_its_time(monkeypatch, environ, margin_s, at):
    from spmdrl.distributed import guard, preemption

    for name in ("SLURM_JOB_START_TIME", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    asked_for = []
    monkeypatch.setattr(preemption, "notice_at", lambda unix_time, reason: asked_for.append(unix_time))
    guard._notice_before_the_jobs_end(margin_s)
    assert asked_for == at


def test_a_notice_while_libraries_load_is_kept():
    code = (
        "import os, signal; from spmdrl import launch; launch.keep_notices(); os.kill(os.getpid(), signal.SIGUSR1);"
        "print(launch.noticed)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "SIGUSR1\n"), done.stderr
