"""A real Slurm, of one node on this machine, runs the example batch script: `srun` with nothing but SLURM_* set."""

import os
import shutil
import subprocess
import time
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
        yield
    finally:
        if shutil.which("scancel"):
            subprocess.run(["scancel", "--user=root"], capture_output=True)
        subprocess.run([str(SLURM_UP), "stop"], env=env, capture_output=True)
        if not had_munge and is_running(MUNGE_PID):
            os.kill(int(MUNGE_PID.read_text()), 15)


def submit(log: Path, *flags: str) -> Launched:
    """Run the example script with two tasks and wait for the job's end."""
    options = ["--wait", "--nodes=1", "--ntasks-per-node=2", "--overcommit", f"--output={log}"]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"))}
    env |= {"PYTHON": str(BIN / "python"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["sbatch", *options, str(SCRIPT), *flags], env=env, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert log.exists(), done.stderr
    return Launched(done.returncode, log.read_text(), time.time())


def test_the_example_batch_script_trains(slurm, tmp_path):
    run = submit(tmp_path / "log", *tiny_flags(tmp_path, save_path=tmp_path / "out"))
    assert_trained(run, tmp_path / "out", ranks=2)


def test_a_wrong_flag_ends_the_job_with_one_line_a_task(slurm, tmp_path):
    run = submit(tmp_path / "log", *tiny_flags(tmp_path / "none", train_batch_size="eight"))
    assert run.code == 2
    assert len(run.lines("error: --train_batch_size")) == 2
    assert "Traceback" not in run.out
