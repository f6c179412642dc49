"""Invariant 8 and U60 on whole runs: whatever ends one rank, all end within seconds, and the reason is said once."""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from spmdrl.launch import free_port
from tests.launched import (
    BIN,
    ROOT,
    TRAIN,
    Launched,
    Running,
    launch,
    slurm_tasks,
    start_by_hand,
    start_ranks,
    tiny_flags,
    torchrun,
    two_nodes,
    why_no_two_nodes,
)

pytestmark = pytest.mark.slow
LIMIT_S = 15.0
BAD_REWARD = """
import os, pathlib, time

def reward_func(queries, prompts, labels, **columns):
    if os.environ["RANK"] == "{rank}":
        pathlib.Path(r"{failed_at}").write_text(str(time.time()))
        {fails}
    return [0.5] * len(queries)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


def bad_reward(tmp_path: Path, rank: int, fails: str) -> Path:
    """A reward function that fails on one rank, and writes down when."""
    path = tmp_path / "bad_reward.py"
    path.write_text(BAD_REWARD.format(rank=rank, fails=fails, failed_at=tmp_path / "failed_at"))
    return path


def assert_one_reason(run: Launched, tmp_path: Path, failed: int, reason: str, code: str = "") -> None:
    """`failed` printed the traceback and its line, the other rank one line that names it, all of it in time."""
    other = 1 - failed
    assert run.code != 0, run.out
    assert run.ended_at - float((tmp_path / "failed_at").read_text()) < LIMIT_S, run.out
    assert len(run.lines(f"[rank {failed}] error: ", reason, " (in reward of step 1)")) == 1, run.out
    assert (
        len(run.lines(f"[rank {other}] stopped in ", f": rank {failed} failed in reward of step 1: ", reason)) == 1
    ), run.out
    assert len(run.lines(code or reason)) >= 1, run.out


LAUNCHERS = {"torchrun": torchrun(TRAIN), "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", TRAIN]}


@pytest.mark.parametrize(("launcher", "failed"), [("torchrun", 1), ("deepspeed", 0)])
def test_a_reward_function_that_raises_on_one_rank(folder, tmp_path, launcher, failed):
    reward = bad_reward(tmp_path, failed, "raise KeyError('seven')")
    run = launch(
        [*LAUNCHERS[launcher], *tiny_flags(folder, save_path=tmp_path / "out", remote_rm_url=reward)], tmp_path / "log"
    )
    assert_one_reason(run, tmp_path, failed, "raised KeyError: 'seven' on row ")
    assert len(run.lines("raise KeyError('seven')")) == 1, run.out  # the line of user code, in its traceback


def test_a_bad_reward_on_one_rank_without_a_launcher(folder, tmp_path):
    reward = bad_reward(tmp_path, 1, "return [float('nan')] * len(queries)")
    flags = tiny_flags(folder, save_path=tmp_path / "out", remote_rm_url=reward)
    runs = start_ranks([TRAIN, *flags], slurm_tasks(2), tmp_path / "log").wait()
    assert [run.code for run in runs] == [2, 2], runs[0].out
    assert_one_reason(runs[0], tmp_path, 1, "returned nan for row ")
    assert "Traceback" not in runs[0].out


def ranks_variables(rank: int, port: int) -> dict[str, str]:
    """What a launcher tells one of two ranks."""
    variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


BROKEN = """
from spmdrl.rollout.hf_engine import HFEngine
from spmdrl.tracking import Tracker
import os, pathlib, time

def reward_func(queries, prompts, labels, **columns):
    return [0.5] * len(queries)

def broken(*args, **options):
    pathlib.Path(r"{failed_at}").write_text(str(time.time()))
    {fails}

if os.environ["RANK"] == "{rank}":
    {where} = broken
"""


@pytest.mark.parametrize(
    ("failed", "where", "fails", "phase"),
    [
        (1, "HFEngine._generate_batch", "raise RuntimeError('the engine is gone')", "generate of step 1"),
        (0, "Tracker.log", "raise OSError(28, 'No space left on device')", "train of step 1"),
    ],
    ids=["engine", "logging"],
)
def test_whatever_raises_the_phase_and_step_are_named_and_the_port_is_free(
    folder, tmp_path, failed, where, fails, phase
):
    reward, port = tmp_path / "broken.py", free_port()
    at = tmp_path / "failed_at"
    reward.write_text(BROKEN.format(rank=failed, where=where, fails=fails, failed_at=at))
    flags = tiny_flags(folder, save_path=tmp_path / "out", remote_rm_url=reward)
    environments = [ranks_variables(rank, port) for rank in range(2)]
    run, other = start_ranks([TRAIN, *flags], environments, tmp_path / "log").wait()
    assert run.code != 0 and other.code != 0 and run.ended_at - float(at.read_text()) < LIMIT_S, run.out
    assert len(run.lines(f"[rank {failed}] failed in {phase}: ")) == 1, run.out
    assert len(run.lines(f"[rank {1 - failed}] stopped in ", f": rank {failed} failed in {phase}: ")) == 1, run.out
    assert len(run.lines("in broken")) == 1, run.out
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=5)


def test_a_reward_function_that_never_returns_ends_by_phase_timeout(folder, tmp_path):
    reward = bad_reward(tmp_path, 1, "time.sleep(1000)")
    flags = tiny_flags(folder, save_path=tmp_path / "out", remote_rm_url=reward, phase_timeout=5)
    run, other = start_ranks([TRAIN, *flags], slurm_tasks(2), tmp_path / "log").wait()
    assert run.code != 0 and other.code != 0
    assert run.ended_at - float((tmp_path / "failed_at").read_text()) < 6 + LIMIT_S, run.out
    assert len(run.lines("bad_reward.py", "in reward_func")) == 1, run.out
    for rank in range(2):
        words = (f"[rank {rank}] ", " in reward of step 1: ", "no rank has made progress for ", "--phase_timeout 5")
        assert len(run.lines(*words)) == 1, run.out


def test_a_rank_killed_while_the_others_generate(folder, tmp_path):
    flags = tiny_flags(folder, save_path=tmp_path / "out", num_episodes=50, generate_max_len=128)
    running = start_ranks([TRAIN, *flags], slurm_tasks(2), tmp_path / "log")
    running.until("step 1/50 |")
    time.sleep(0.3)
    os.kill(running.processes[1].pid, signal.SIGKILL)
    killed_at = time.time()
    runs = running.wait(timeout_s=300)
    assert [run.code for run in runs] == [1, -9], runs[0].out
    assert runs[0].ended_at - killed_at < LIMIT_S
    words = ("[rank 0] stopped in ", "rank 1 ended without a word in ", "killed, or out of memory?")
    assert len(runs[0].lines(*words)) == 1, runs[0].out
    assert "Traceback" not in runs[0].out


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_whose_processes_are_killed_ends_the_other(folder, tmp_path, killed):
    """Launcher and rank of one node at once, be it the one where the ranks meet."""
    if reason := why_no_two_nodes():
        pytest.skip(reason)
    flags = tiny_flags(folder, save_path=tmp_path / "out", num_episodes=500)
    with two_nodes() as (prefixes, addresses):
        script = str(ROOT / "examples" / "torchrun_two_nodes.sh")
        commands = [[*prefix, "bash", script, str(i), addresses[0], *flags] for i, prefix in enumerate(prefixes)]
        envs = [{"GLOO_SOCKET_IFNAME": "eth0", "NPROC_PER_NODE": "1", "TEST_NODE": str(i)} for i in range(2)]
        running = Running(commands, envs, tmp_path / "log")
        running.until("step 1/500 |")
        for pid in running.members(variable=f"TEST_NODE={killed}"):
            os.kill(pid, signal.SIGKILL)
        killed_at = time.time()
        other = running.wait(timeout_s=300)[1 - killed]
    assert other.code not in (0, -9) and other.ended_at - killed_at < LIMIT_S, other.out
    words = (
        f"[rank {1 - killed}] stopped in ",
        f"rank {killed} ended without a word in ",
        "killed, or out of memory?",
    )
    assert len(other.lines(*words)) == 1, other.out


def test_a_disk_that_refuses_the_model(folder, tmp_path):
    """Files may have 200 KiB here, the model's has more; rank 0 alone writes it."""
    flags = tiny_flags(folder, save_path=tmp_path / "out")
    command = ["bash", "-c", 'ulimit -f 200; exec "$@"', "bash", sys.executable, TRAIN, *flags]
    runs = start_by_hand(command, slurm_tasks(2), tmp_path / "log").wait()
    assert [run.code for run in runs] == [2, 2], runs[0].out
    for rank in range(2):
        assert (
            len(runs[0].lines(f"[rank {rank}] error: --save_path ", "cannot write the model", "File too large")) == 1
        )
    assert "Traceback" not in runs[0].out
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_row_without_the_key_is_one_line_of_each_rank(folder, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1 plus 1?", "label": "2"}\n{"question": "What is 2 plus 2?"}\n')
    flags = tiny_flags(folder, save_path=tmp_path / "out", prompt_data=rows)
    runs = start_ranks([TRAIN, *flags], slurm_tasks(2), tmp_path / "log").wait()
    assert [run.code for run in runs] == [2, 2], runs[0].out
    for rank in range(2):
        assert len(runs[0].lines(f"[rank {rank}] error: ", str(rows), "prompt")) == 1, runs[0].out
    assert "Traceback" not in runs[0].out
