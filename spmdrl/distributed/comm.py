"""Process group and collectives. Everything here is called by every rank, in the same order."""

import os
import socket
import subprocess
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.errors import UserError

T = TypeVar("T")
COLLECTIVE_TIMEOUT = timedelta(minutes=60)


def launch_environment(environ: dict[str, str], local_rank_flag: int = -1) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for whatever launcher started this process.

    torchrun's and deepspeed's variables win over Slurm's; without either this is one rank on a free port. An address
    or port that the launcher gave is kept. Raises UserError where the variables contradict one another.
    """
    env = {k: environ[k] for k in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if k in environ}
    if ("RANK" in env) != ("WORLD_SIZE" in env):
        raise UserError(
            "only one of RANK and WORLD_SIZE is set: start with torchrun, deepspeed or srun, or unset both"
        )
    if "RANK" not in env and "SLURM_PROCID" in environ and "SLURM_STEP_ID" in environ:
        env |= _from_slurm(environ, env)
    env.setdefault("RANK", "0")
    env.setdefault("WORLD_SIZE", "1")
    env.setdefault("LOCAL_RANK", str(local_rank_flag) if local_rank_flag >= 0 else env["RANK"])
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in env:
        if env["WORLD_SIZE"] != "1":
            raise UserError(
                f"WORLD_SIZE is {env['WORLD_SIZE']} but MASTER_PORT is not set: use torchrun, deepspeed or srun"
            )
        env["MASTER_PORT"] = str(free_port())
    rank, world, local = (_as_int(env, key) for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    if not 0 <= rank < world or local < 0:
        raise UserError(f"RANK {rank}, LOCAL_RANK {local} and WORLD_SIZE {world} do not fit together")
    if local_rank_flag >= 0 and local_rank_flag != local:
        raise UserError(f"--local_rank {local_rank_flag} contradicts LOCAL_RANK {local} in the environment")
    return env


def _from_slurm(environ: dict[str, str], given: dict[str, str]) -> dict[str, str]:
    """Rank variables of a `srun` task. The port follows from the job and step, so two jobs on a host differ."""
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "localhost"
    job, step = int(environ.get("SLURM_JOB_ID", "0")), int(environ.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "MASTER_ADDR": given.get("MASTER_ADDR") or _first_host(nodes),
        "MASTER_PORT": given.get("MASTER_PORT") or str(20000 + (job * 31 + step) % 20000),
    }


def _first_host(nodes: str) -> str:
    """First host of a Slurm node list such as `gpu[03-05],gpu9`; plain lists need no `scontrol`."""
    if "[" not in nodes:
        return nodes.split(",")[0]
    try:
        listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(
            f"cannot expand the Slurm node list {nodes!r} with scontrol ({error}): set MASTER_ADDR"
        ) from error
    return listed.stdout.split()[0]


def _as_int(env: dict[str, str], key: str) -> int:
    try:
        return int(env[key])
    except ValueError:
        raise UserError(f"{key}={env[key]!r} in the environment is not a number") from None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def init(local_rank_flag: int = -1) -> None:
    """Join the process group: nccl for CUDA tensors and gloo for CPU tensors, or gloo alone without a GPU."""
    os.environ.update(launch_environment(dict(os.environ), local_rank_flag))
    if torch.cuda.is_available():
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise UserError(f"LOCAL_RANK {local} has no GPU: this host shows {count}. Start {count} processes a host")
        torch.cuda.set_device(local)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)


def is_initialized() -> bool:
    return dist.is_initialized()


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


def say(line: str) -> None:
    """Print one line, from the main rank."""
    if is_main():
        print(line, flush=True)


def device() -> torch.device:
    """The device of this rank's models."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def all_reduce_sum(x: Tensor) -> Tensor:
    """Sum over ranks, out of place. Host tensors go over gloo."""
    x = x.clone()
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def all_reduce_max(value: float) -> float:
    x = torch.tensor(float(value), dtype=torch.float64)
    if world_size() > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    return float(x)


def any_rank(flag: bool) -> bool:
    """True on every rank as soon as it is True on one."""
    return all_reduce_max(float(flag)) > 0


def assert_same(name: str, value: int) -> None:
    """Stop every rank when `value` differs between ranks."""
    values = all_gather_object(value)
    assert len(set(values)) == 1, f"{name} differs between ranks: {values}"


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """Every rank's `value`, in rank order."""
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size == 1:
        return [value]
    out: list[Any] = [None] * size
    dist.all_gather_object(out, value, group=group)
    return out


def subgroup(size: int) -> Any:
    """The group of `size` consecutive ranks that this rank is in."""
    assert world_size() % size == 0, f"{world_size()} ranks do not split into groups of {size}"
    mine = None
    for first in range(0, world_size(), size):
        ranks = list(range(first, first + size))
        group = dist.new_group(ranks, backend="gloo")
        mine = group if rank() in ranks else mine
    return mine


def barrier() -> None:
    all_reduce_sum(torch.zeros(1))


def destroy() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
