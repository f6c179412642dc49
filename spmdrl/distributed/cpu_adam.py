"""DeepSpeed's Adam for weights and states in host memory, whose C++ is compiled at its first use on a machine.

torch guards the build with a file named `lock` that a killed build leaves behind, and every later start would wait for
it for ever. A lock is taken for abandoned when no process here has it open and none elsewhere can: torch's builder
keeps it open. Runs of this program are kept apart by `flock`, which ends with its process.
"""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spmdrl.distributed import comm
from spmdrl.errors import UserError, first_line

LOCAL_FILE_SYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "f2fs"}
LONGEST_BUILD_S = 900.0  # on a file system that another host may see


def cpu_adam_class() -> Any:
    """DeepSpeedCPUAdam, compiled and loaded; on each host one rank does so before the others."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    is_first = os.environ["LOCAL_RANK"] == "0"
    if is_first:
        _build()
    comm.barrier()
    if not is_first:
        _load()
    return DeepSpeedCPUAdam


def _build() -> None:
    folder = build_folder()
    with building(folder):
        compiles = not any(folder.glob("*.so"))
        if compiles:
            comm.say(f"--adam_offload: compiling DeepSpeed's CPU Adam into {folder}, once: one to five minutes")
        start = time.monotonic()
        try:
            _load()
        except (RuntimeError, ImportError, OSError) as error:
            reason = first_line(error)
            raise UserError(f"--adam_offload: cannot compile its C++ (needs g++ and ninja): {reason}") from error
        if compiles:
            comm.say(f"--adam_offload: compiled in {time.monotonic() - start:.0f} s")


def build_folder() -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("cpu_adam", verbose=False))


def _load() -> None:
    from deepspeed.ops.op_builder import CPUAdamBuilder

    own = str(Path(sys.executable).parent)  # where pip puts ninja, also when this environment is not activated
    if own not in os.environ["PATH"].split(":"):
        os.environ["PATH"] = f"{own}:{os.environ['PATH']}"
    CPUAdamBuilder().load(verbose=False)


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """No other build in `folder` is under way; waits for one that is, and clears away what an interrupted one left."""
    with (folder / "spmdrl.lock").open("w") as own:
        with suppress(OSError):  # a file system without flock
            fcntl.flock(own, fcntl.LOCK_EX)
        lock, told = folder / "lock", False
        while lock.exists():
            if is_abandoned(lock) and is_abandoned(lock, after_s=1.0):  # a builder closes it just before removing it
                lock.unlink(missing_ok=True)
                comm.say(f"removed {lock}, left by a build that was interrupted")
            elif lock.exists() and not told:
                comm.say(f"waiting for another build of the same C++, which holds {lock}")
                told = True
            time.sleep(0.2)
        yield


def is_abandoned(lock: Path, after_s: float = 0.0) -> bool:
    """Whether no process has the lock open, here or, as far as its age tells, on another host."""
    time.sleep(after_s)
    try:
        status = lock.stat()
    except FileNotFoundError:
        return False
    if any(_has_open(process, status) for process in Path("/proc").glob("[0-9]*")):
        return False
    return _is_local(status.st_dev) or time.time() - status.st_mtime > LONGEST_BUILD_S


def _has_open(process: Path, status: os.stat_result) -> bool:
    try:
        return any(_is_file(fd, status) for fd in (process / "fd").iterdir())
    except OSError:  # it ended, or is another user's, who has a folder of his own
        return False


def _is_file(fd: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(fd.stat(), status)
    except OSError:
        return False


def _is_local(device: int) -> bool:
    """Whether it is a disk of this host, by the kind of its mount."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = [line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    except OSError:
        return False
    kinds = {kind.split()[0] for mount, _, kind in mounts if mount.split()[2] == number}
    return bool(kinds) and kinds <= LOCAL_FILE_SYSTEMS
