"""Ranks under guard.run, each a fresh process and none with a launcher: nobody but themselves can stop them."""

import multiprocessing
import os
import sys
import time

from spmdrl.launch import free_port

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "spmdrl.distributed.guard"])


class Ended:
    """Exit codes and stderr of the ranks, and the seconds from the time in folder/failed_at to the last one's end."""

    def __init__(self, codes, errors, seconds):
        self.codes, self.errors, self.seconds = codes, errors, seconds


def _rank_process(rank, world_size, port, folder, program, failing, stopping, environ):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port), OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="ERROR", **environ)
    with open(folder / f"rank{rank}.err", "w") as file:
        os.dup2(file.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    import torch

    from spmdrl.config import StoppingConfig
    from spmdrl.distributed import guard

    torch.set_num_threads(1)
    guard.run(lambda: program(rank, failing), stopping=StoppingConfig(**stopping))


def start_guarded(folder, program, *, failing=1, world_size=3, environ=None, **stopping):
    """Start `program(rank, failing)` on every rank; `stopping` are flags."""
    port = free_port()
    arguments = (world_size, port, folder, program, failing, stopping, environ or {})
    ranks = [CONTEXT.Process(target=_rank_process, args=(rank, *arguments)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    return ranks


def ends_of(ranks, folder):
    """Wait until all ranks have ended."""
    try:
        deadline = time.monotonic() + 60
        for rank in ranks:
            rank.join(max(deadline - time.monotonic(), 0.1))
            assert rank.exitcode is not None, f"{rank.name} hangs: {errors_of(folder, len(ranks))}"
        end = time.time()
    finally:
        for rank in ranks:
            rank.kill()
    failed_at = folder / "failed_at"
    seconds = end - float(failed_at.read_text()) if failed_at.exists() else 0.0
    return Ended([rank.exitcode for rank in ranks], errors_of(folder, len(ranks)), seconds)


def run_guarded(folder, program, **options):
    """How every rank of `program` ended."""
    return ends_of(start_guarded(folder, program, **options), folder)


def errors_of(folder, world_size):
    return [(folder / f"rank{rank}.err").read_text() for rank in range(world_size)]


def until(condition, timeout_s=30.0):
    """Wait for a condition; a test that waits in vain fails."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.01)
