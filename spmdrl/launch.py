"""Which rank this process is, read from the variables of whatever launcher started it. Imports nothing heavy."""

import os
import re
import signal
import socket
from collections.abc import Mapping
from pathlib import Path

from spmdrl.errors import UserError

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
FIRST_PORT, NUM_PORTS = 10000, 20000  # for derived ports: below the range that the kernel hands out by itself
DEEPSPEED_PORT = "29500"
HINT = "start with torchrun, deepspeed or srun"
noticed = ""  # name of a signal that keep_notices has kept


def launch_environment(environ: Mapping[str, str], local_rank_flag: int = -1) -> dict[str, str]:
    """The VARIABLES for this process; without a launcher it is one rank alone.

    torchrun's and deepspeed's own win over Slurm's, so that either can run inside a Slurm job. An address or port that
    a launcher gave is kept, but for deepspeed's default port. Raises UserError where variables contradict one another.
    """
    env = {name: environ[name] for name in VARIABLES if environ.get(name)}
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        there, missing = ("RANK", "WORLD_SIZE") if "RANK" in env else ("WORLD_SIZE", "RANK")
        raise UserError(f"{there} is set to {env[there]} in the environment but {missing} is not: {HINT}, or unset it")
    if "RANK" not in env and is_slurm_task(environ):
        env = _from_slurm(environ) | {name: env[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in env}
    elif _is_local_deepspeed(environ) and (launcher := _ancestor("deepspeed.launcher.launch")) is not None:
        env["MASTER_PORT"] = str(FIRST_PORT + launcher % NUM_PORTS)
    env.setdefault("RANK", "0")
    env.setdefault("WORLD_SIZE", "1")
    env.setdefault("LOCAL_RANK", _default_local_rank(environ, env["RANK"], local_rank_flag))
    if _sees_one_gpu(environ) and is_slurm_task(environ) and env["LOCAL_RANK"] == environ.get("SLURM_LOCALID"):
        env["LOCAL_RANK"] = "0"  # also where a batch script exports its tasks' numbers
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    rank, world_size, local_rank = (as_int(env, name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not (0 <= rank < world_size and local_rank >= 0):
        raise UserError(
            f"RANK {rank}, LOCAL_RANK {local_rank} and WORLD_SIZE {world_size} do not fit together: {HINT}"
        )
    if local_rank_flag not in (-1, local_rank):
        raise UserError(
            f"--local_rank {local_rank_flag} contradicts LOCAL_RANK {local_rank} in the environment: "
            "leave the flag to the deepspeed launcher"
        )
    if world_size > 1 and "MASTER_PORT" not in env:
        raise UserError(f"WORLD_SIZE is {world_size} but MASTER_PORT is not set, where the ranks meet: {HINT}")
    env.setdefault("MASTER_PORT", str(free_port()))
    if not 0 < as_int(env, "MASTER_PORT") < 2**16:
        raise UserError(f"MASTER_PORT is {env['MASTER_PORT']}, not a port between 1 and 65535")
    return env


def is_slurm_task(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process. A batch script itself has a task number too, but no step."""
    in_batch_script = environ.get("ENVIRONMENT") == "BATCH" and "SLURM_STEP_ID" not in environ
    return "SLURM_PROCID" in environ and not in_batch_script


def _slurm_num_tasks(environ: Mapping[str, str]) -> str | None:
    return environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")


def _from_slurm(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables of a `srun` task. The port follows from job and step, so that two jobs on a host differ."""
    num_tasks, local_id = _slurm_num_tasks(environ), environ.get("SLURM_LOCALID")
    if num_tasks is None or local_id is None:
        missing = "SLURM_NTASKS" if num_tasks is None else "SLURM_LOCALID"
        raise UserError(f"SLURM_PROCID is set in the environment but {missing} is not: {HINT}")
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    ids = {name: environ.get(name) or "0" for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")}
    port = FIRST_PORT + (as_int(ids, "SLURM_JOB_ID") * 31 + as_int(ids, "SLURM_STEP_ID")) % NUM_PORTS
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": num_tasks,
        "LOCAL_RANK": local_id,
        "MASTER_ADDR": first_host(nodes or "127.0.0.1"),
        "MASTER_PORT": str(port),
    }


def _sees_one_gpu(environ: Mapping[str, str]) -> bool:
    """With `--gpus-per-task=1` each task's only GPU is number 0 to it."""
    return re.fullmatch(r"[^,]+", environ.get("CUDA_VISIBLE_DEVICES", "")) is not None


def first_host(nodes: str) -> str:
    """First host of a Slurm node list: `gpu[03-05,7],login` → `gpu03`, `rack[1-2]n[4,6]` → `rack1n4`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group())


def _is_local_deepspeed(environ: Mapping[str, str]) -> bool:
    """Whether all ranks are deepspeed's on this host, and it was not told a port: then all its runs have the same."""
    return (
        environ.get("CROSS_SIZE") == "1"
        and environ.get("LOCAL_SIZE") == environ.get("WORLD_SIZE")
        and environ.get("MASTER_PORT") == DEEPSPEED_PORT
        and "TORCHELASTIC_RUN_ID" not in environ
    )


def _ancestor(command: str) -> int | None:
    """The nearest ancestor with `command` among its words, which is the same process for all ranks it started."""
    pid = os.getppid()
    try:
        while pid > 1:
            if command.encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:  # no /proc on this system, or not ours to read
        pass
    return None


def _default_local_rank(environ: Mapping[str, str], rank: str, local_rank_flag: int) -> str:
    """Where the launcher gives none. Batch scripts often export RANK=$SLURM_PROCID and no more."""
    if local_rank_flag >= 0:
        return str(local_rank_flag)
    return environ.get("SLURM_LOCALID", rank) if environ.get("SLURM_PROCID") == rank else rank


def as_int(env: Mapping[str, str], name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise UserError(f"{name} is {env[name]!r} in the environment, not a number: {HINT}") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def keep_notices() -> None:
    """Remember SIGUSR1, which would end this process, while libraries load; distributed/preemption.py takes over."""

    def keep(number: int, frame: object) -> None:
        global noticed
        noticed = signal.Signals(number).name

    signal.signal(signal.SIGUSR1, keep)
