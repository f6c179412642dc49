"""Run a function on several real ranks (gloo), each a process of its own, under a wall clock."""

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from spmdrl.launch import free_port
from tests import zygote

PROGRAM = str(Path(__file__).parent / "programs" / "rank.py")


def run_ranks(world_size: int, fn: Callable, *args: Any, timeout: float = 600) -> list[Any]:
    """`fn(*args)` on every rank; the picklable results in rank order. An error on a rank fails the test at once."""
    env = os.environ | {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "job").write_bytes(pickle.dumps((fn, args)))
        ranks = [
            zygote.start([PROGRAM, name], env | {"RANK": str(i), "LOCAL_RANK": str(i), "OMP_NUM_THREADS": "1"}, here)
            for i in range(world_size)
        ]
        try:
            _wait(ranks, folder, timeout)
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        return [pickle.loads((folder / f"result{i}").read_bytes()) for i in range(world_size)]


def _wait(ranks: Sequence[zygote.Forked], folder: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    codes: list[int | None] = [None]
    while any(code != 0 for code in codes):
        codes = [rank.poll() for rank in ranks]
        for i, code in enumerate(codes):
            error = folder / f"error{i}"
            assert not code, f"rank {i}:\n{error.read_text() if error.exists() else f'ended with exit code {code}'}"
        assert time.monotonic() < deadline, f"ranks {[i for i, code in enumerate(codes) if code is None]} hang"
        time.sleep(0.02)
