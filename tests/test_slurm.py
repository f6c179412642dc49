"""A real Slurm, of one node on this machine, runs the example batch script: `srun` with nothing but SLURM_* set.

SPMDRL_LONG_TESTS=1 adds the test that takes ten minutes: a job whose time limit is a third of its work.
"""

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launched import BIN, ROOT, Launched, assert_trained, tiny_flags

pytestmark = pytest.mark.slow
SCRIPT = ROOT / "examples" / "slurm" / "train_ppo.sbatch"
SLURM_UP = Path(os.environ.get("SPMDRL_SHARED", ROOT.parent / "shared")) / "tools" / "slurm-up"
SLURM_CONF, MUNGE_PID = Path("/etc/slurm/slurm.conf"), Path("/run/munge/munged.pid")


def is_running(pid_file: Path) -> bool:
    return pid_file.exists() and Path(f"/proc/{pid_file.read_text().strip()}").exists()


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """A cluster for these tests, stopped afterwards. Never touches a machine that belongs to one."""
    if os.geteuid() != 0 or not SLURM_UP.exists():
        pytest.skip("starting Slurm needs root and ../shared/tools/slurm-up")
    if SLURM_CONF.exists() and "ClusterName=local" not in SLURM_CONF.read_text():
        pytest.skip(f"{SLURM_CONF} is another cluster's")
    had_munge = is_running(MUNGE_PID)
    home = tmp_path_factory.mktemp("slurm")
    env = {**os.environ, "SLURM_HOME": str(home), "DEBIAN_FRONTEND": "noninteractive"}
    env.pop("OMP_NUM_THREADS", None)  # `nproc`, which counts the node's CPUs for it, believes this variable
    started = subprocess.run([str(SLURM_UP)], env=env, capture_output=True, text=True, timeout=280)
    try:
        if started.returncode or "idle" not in started.stdout:
            pytest.skip(f"no Slurm here: {(started.stderr or started.stdout).strip()[-300:]}")
        requeue_soon(env)
        yield
    finally:
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--user=root"], capture_output=True)
        subprocess.run([str(SLURM_UP), "stop"], env=env, capture_output=True)
        if not had_munge and is_running(MUNGE_PID):
            os.kill(int(MUNGE_PID.read_text()), 15)


def requeue_soon(env: dict[str, str]) -> None:
    """Start the cluster anew so that a requeued job waits for 5 s and not for 120: as long as its credentials."""
    subprocess.run([str(SLURM_UP), "stop"], env=env, check=True, capture_output=True)
    with SLURM_CONF.open("a") as file:
        file.write("AuthInfo=cred_expire=5\nSchedulerParameters=sched_interval=5\n")
    until(lambda: not any(is_running(Path(env["SLURM_HOME"], f"{name}.pid")) for name in ("slurmctld", "slurmd")))
    for daemon in ("slurmctld", "slurmd"):
        subprocess.run([daemon], env=env, check=True, capture_output=True)
    until(lambda: "idle" in subprocess.run(["sinfo", "-h", "-o", "%t"], capture_output=True, text=True).stdout)


def sbatch(log: Path, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess:
    """Submit the example script with two tasks."""
    options = ["--nodes=1", "--ntasks-per-node=2", "--overcommit", f"--output={log}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"))}
    env |= {"PYTHON": str(BIN / "python"), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["sbatch", *options, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s
    )


def submit(log: Path, *flags: str) -> Launched:
    """Run the example script and wait for the job's end."""
    done = sbatch(log, "--wait", str(SCRIPT), *flags)
    assert log.exists(), done.stderr
    return Launched(done.returncode, log.read_text(), time.time())


class Job:
    """A submitted job, which may go through the queue more than once."""

    def __init__(self, log: Path, *words: str):
        done = sbatch(log, "--parsable", *words)
        assert done.returncode == 0, done.stderr
        self.id, self.log = done.stdout.strip(), log

    def until_said(self, text: str) -> None:
        until(lambda: self.log.exists() and text in self.log.read_text(), 180, self._show)

    def until_ended(self, timeout_s: float = 180) -> dict[str, str]:
        """What Slurm says of the job at its end."""
        ends = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        until(lambda: self.info()["JobState"] in ends, timeout_s, self._show)
        return self.info()

    def info(self) -> dict[str, str]:
        shown = subprocess.run(["scontrol", "show", "job", "-o", self.id], capture_output=True, text=True, check=True)
        return dict(re.findall(r"(\w+)=(\S*)", shown.stdout))

    def _show(self) -> str:
        return f"{self.info()}\n{self.log.read_text() if self.log.exists() else ''}"


def until(condition: Callable[[], bool], timeout_s: float = 30, show: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {show()}"
        time.sleep(0.2)


def slow_flags(tmp_path: Path, *, steps: int, seconds: float) -> list[str]:
    """Flags of a run of `steps` steps of so many seconds, in folders of its own."""
    (tmp_path / "slow.py").write_text(
        "import time\n\n\ndef reward_func(queries, prompts, labels, **columns):\n"
        f"    time.sleep({seconds})\n    return [len(query) / 100 for query in queries]\n"
    )
    places = {"save_path": tmp_path / "out", "ckpt_path": tmp_path / "ckpt", "remote_rm_url": tmp_path / "slow.py"}
    return tiny_flags(tmp_path, num_episodes=steps, **places)


def assert_unbroken(job: Job, tmp_path: Path, *, steps: int, timeout_s: float = 180) -> Launched:
    """The job is done, each step was made once, and every stop said that it was saved."""
    info = job.until_ended(timeout_s)
    run = Launched(0, job.log.read_text(), time.time())
    assert (info["JobState"], info["ExitCode"]) == ("COMPLETED", "0:0"), run.out
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert "Traceback" not in run.out
    return run


def test_the_example_batch_script_trains(slurm, tmp_path):
    run = submit(tmp_path / "log", *tiny_flags(tmp_path, save_path=tmp_path / "out"))
    assert_trained(run, tmp_path / "out", ranks=2)


def test_a_wrong_flag_ends_the_job_with_one_line_a_task(slurm, tmp_path):
    run = submit(tmp_path / "log", *tiny_flags(tmp_path / "none", train_batch_size="eight"))
    assert run.code == 2
    assert len(run.lines("error: --train_batch_size")) == 2
    assert "Traceback" not in run.out


@pytest.mark.timeout(400)
def test_a_job_that_is_signalled_and_requeued_goes_on_by_itself(slurm, tmp_path):
    """`scancel --signal` reaches the ranks, and the script requeues; `scontrol requeue` ends the script too."""
    job = Job(tmp_path / "log", str(SCRIPT), *slow_flags(tmp_path, steps=6, seconds=1.0))
    job.until_said("step 2/6 |")
    subprocess.run(["scancel", "--signal=TERM", job.id], check=True)
    job.until_said("step 4/6 |")
    subprocess.run(["scontrol", "requeue", job.id], check=True)
    run = assert_unbroken(job, tmp_path, steps=6)
    assert len(run.lines("preempted in ", "(SIGTERM): checkpoint saved in ")) == 2, run.out
    assert job.info()["Restarts"] == "2"


@pytest.mark.timeout(2500)
@pytest.mark.skipif(not os.environ.get("SPMDRL_LONG_TESTS"), reason="ten minutes and more: set SPMDRL_LONG_TESTS=1")
def test_a_job_with_a_time_limit_of_a_third_of_its_work_is_done_after_requeues(slurm, tmp_path):
    job = Job(tmp_path / "log", "--time=2", str(SCRIPT), *slow_flags(tmp_path, steps=36, seconds=10.0))
    run = assert_unbroken(job, tmp_path, steps=36, timeout_s=2400)
    assert len(run.lines("preempted in ", ": checkpoint saved in ")) >= 3, run.out
