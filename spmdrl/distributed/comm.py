"""Process group and collectives. Everything here is called by every rank, in the same order.

That ranks have met in a collective is a sign of progress of them all.
"""

import functools
import os
import socket
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from spmdrl.distributed import whereabouts
from spmdrl.errors import UserError
from spmdrl.launch import launch_environment

T = TypeVar("T")
MEETING_TIMEOUT = timedelta(minutes=10)  # from the first rank's start to the last one's
COLLECTIVE_TIMEOUT = timedelta(minutes=60)


def meet(local_rank_flag: int = -1) -> dist.Store:
    """Complete the launcher's variables and wait for the other ranks at MASTER_ADDR:MASTER_PORT.

    Returns the store in which ranks find one another's addresses. One rank alone needs no port.
    """
    os.environ.update(launch_environment(os.environ, local_rank_flag))
    if os.environ["WORLD_SIZE"] == "1":
        return dist.HashStore()
    where = f"MASTER_ADDR:MASTER_PORT {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        store, _, _ = next(dist.rendezvous("env://", timeout=MEETING_TIMEOUT))
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(f"{where} is taken by another program: give the launcher another port") from None
        raise UserError(
            f"the {os.environ['WORLD_SIZE']} ranks (WORLD_SIZE) did not meet at {where} within "
            f"{MEETING_TIMEOUT.total_seconds():.0f} s: {str(error).splitlines()[0]}"
        ) from None
    store.set_timeout(COLLECTIVE_TIMEOUT)
    return store


def join(store: dist.Store, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
    """Make the process group: nccl for CUDA tensors and gloo for CPU tensors, or gloo alone without a GPU."""
    if torch.cuda.is_available():
        local, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= count:
            raise UserError(f"LOCAL_RANK {local} has no GPU: this host shows {count}. Start {count} processes a host")
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=store,
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timeout,
    )
    _share_cores()


def _share_cores() -> None:
    """Each rank of a host computes with its share of the cores, unless OMP_NUM_THREADS, which torchrun sets, says."""
    num_ranks = all_gather_object(socket.gethostname()).count(socket.gethostname())
    if "OMP_NUM_THREADS" not in os.environ and num_ranks > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    if not torch.cuda.is_available():
        say_idle_cores()


@functools.cache
def say_idle_cores() -> None:
    """What computes on the host does so on one core of many where torchrun has set that, as it does unless told."""
    share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1" and share > 1:
        say(
            f"each rank computes on 1 of its {share} cores: torchrun sets OMP_NUM_THREADS=1 where it is not set; with "
            f"OMP_NUM_THREADS={share} before the command it takes all"
        )


def init(local_rank_flag: int = -1) -> None:
    """Meet the other ranks and join them in a process group."""
    join(meet(local_rank_flag))


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
    whereabouts.beat()
    return x


def all_reduce_max(value: float) -> float:
    x = torch.tensor(float(value), dtype=torch.float64)
    if world_size() > 1:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
    whereabouts.beat()
    return float(x)


def any_rank(flag: bool) -> bool:
    """True on every rank as soon as it is True on one."""
    return all_reduce_max(float(flag)) > 0


def all_gather_object(value: T, group: Any = None) -> list[T]:
    """Every rank's `value`, in rank order."""
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size == 1:
        return [value]
    out: list[Any] = [None] * size
    dist.all_gather_object(out, value, group=group)
    whereabouts.beat()
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
