"""Another process that holds the lock of a directory: `python -m tests.trainer.lock_holder DIR`, until stdin ends."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spmdrl.trainer.directory_lock import DirectoryLock

ROOT = Path(__file__).parents[2]


@contextmanager
def held_elsewhere(folder: Path) -> Iterator[subprocess.Popen]:
    """The process that holds it in the block."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.trainer.lock_holder", str(folder)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "None\n"
            yield process
        finally:
            process.kill()


def is_free_for_others(folder):
    """As another process finds it."""
    child = os.fork()
    if not child:
        try:
            fcntl.lockf(os.open(folder / ".lock", os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    lock = DirectoryLock(Path(sys.argv[1]), print)
    sys.stdout.write(f"{lock.take(wait=False)}\n")
    sys.stdout.flush()
    sys.stdin.read()
