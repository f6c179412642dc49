"""Run a function on several real ranks (gloo), each in a fresh process, under a wall clock."""

import multiprocessing
import os
import pickle
import queue
import traceback
from collections.abc import Callable
from typing import Any

from spmdrl.launch import free_port


def _main(fn: Callable, rank: int, world_size: int, port: int, results: Any, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    import torch

    from spmdrl.distributed import comm

    torch.set_num_threads(1)
    try:
        comm.init()
        results.put((rank, pickle.dumps(fn(*args)), None))  # bytes: no shared memory that dies with the rank
        comm.barrier()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))


def run_ranks(world_size: int, fn: Callable, *args: Any, timeout: float = 600) -> list[Any]:
    """`fn(*args)` on every rank; the picklable results in rank order. An error on a rank fails the test at once."""
    context = multiprocessing.get_context("spawn")
    results, port = context.Queue(), free_port()
    processes = [
        context.Process(target=_main, args=(fn, rank, world_size, port, results, args), daemon=True)
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    out: dict[int, Any] = {}
    try:
        while len(out) < world_size:
            try:
                rank, value, error = results.get(timeout=timeout)
            except queue.Empty:
                raise AssertionError(f"ranks {sorted(set(range(world_size)) - set(out))} hang") from None
            assert error is None, f"rank {rank}:\n{error}"
            out[rank] = pickle.loads(value)
    finally:
        for process in processes:
            process.join(timeout=10 if len(out) == world_size else 0)
            if process.is_alive():
                process.kill()
    return [out[rank] for rank in range(world_size)]
