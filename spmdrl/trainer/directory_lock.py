"""One live run for a directory: a POSIX record lock on a file in it, held by the main rank.

The kernel releases it when the process ends, however it ends, and so does a file server for processes of its clients;
forked children do not have it. It is also released when the process closes any descriptor of the file: nothing else
opens it, and locks of one process on one file share a descriptor.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakValueDictionary

from spmdrl.errors import UserError

LOCK = ".lock"
PATIENCE_S = 10.0  # a process that was killed gives back its memory before its locks
LEASE_S = 120.0  # a file server notices only after a while that another host is gone
BUSY = (errno.EACCES, errno.EAGAIN)


class _Descriptor:
    """Open as long as it is referred to."""

    def __init__(self, number: int):
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone before
        close(self.number)


_held: WeakValueDictionary[tuple[int, int], _Descriptor] = WeakValueDictionary()  # by device and inode


class DirectoryLock:
    """Held from `take` until `release`, or as long as the object lives."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        """say: takes a line for the user."""
        self.path, self.say = folder / LOCK, say
        self._descriptor: _Descriptor | None = None
        self._has_no_locks = False  # the file system; then this one is as good as held

    @property
    def is_held(self) -> bool:
        """Not where the file was removed, or replaced by another run's."""
        return self._has_no_locks or self.keeps_others_out

    @property
    def keeps_others_out(self) -> bool:
        """It is held, on a file system that has locks."""
        return self._descriptor is not None and self._of_this_process() is self._descriptor

    def take(self, *, wait: bool) -> str | None:
        """Take it; who has it, where somebody has. `wait`: for a while, in which a process that has ended loses it.

        Raises OSError where the directory cannot be written.
        """
        start, told = time.monotonic(), False
        while (holder := self._try()) is not None:
            pid, host = holder
            patience = PATIENCE_S if host == socket.gethostname() else LEASE_S
            shown = f"pid {pid} on {host}"
            if not wait or time.monotonic() - start > patience:
                return shown
            if not told:
                self.say(f"{self.path.parent} is in use ({shown}): waiting up to {patience:.0f} s for it")
                told = True
            time.sleep(0.2)
        return None

    def is_left(self) -> bool:
        """Whether a process has had it that has ended since. Never where that cannot be known: the file system has no
        locks, or nothing was ever locked there."""
        if self._of_this_process() is not None or not self.path.is_file():
            return False
        is_free = self._try() is None and self._descriptor is not None
        self.release()
        return is_free

    def release(self, *, remove: bool = False) -> None:
        """remove: the file too."""
        if remove and self.is_held:
            with suppress(OSError):
                self.path.unlink()
        self._descriptor = None

    def _try(self) -> tuple[str, str] | None:
        """Take it; pid and host of whoever has it."""
        if self.is_held:
            return None
        self._descriptor = self._of_this_process()
        if self._descriptor is not None:
            return None
        number = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _read_holder(number)
            os.close(number)
            if error.errno in BUSY:
                return holder
            self._has_no_locks = True
            self.say(f"{self.path}: no locks on this file system ({error.strerror}): nothing keeps other runs out")
            return None
        self._descriptor = _Descriptor(number)
        found = os.fstat(number)
        _held[found.st_dev, found.st_ino] = self._descriptor
        if not self.is_held:  # whoever had it removed the file since it was opened
            return self._try()
        _write_holder(number)
        return None

    def _of_this_process(self) -> _Descriptor | None:
        """What keeps this process's lock on the file."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return _held.get((found.st_dev, found.st_ino))


def in_use(flag: str, folder: Path, holder: str) -> UserError:
    return UserError(
        f"--{flag} {folder} is in use by another run ({holder}): wait until that has ended, or give this one a "
        f"--{flag} of its own"
    )


@contextmanager
def held(folder: Path, flag: str, say: Callable[[str], None]) -> Iterator[None]:
    """Keep other runs out of a directory in the block. No file of this is left after it, no directory that was made
    for it and is empty either. Raises UserError, naming --`flag`, where a run is using it or it cannot be written."""
    is_new, lock = not folder.exists(), DirectoryLock(folder, say)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        holder = lock.take(wait=True)
    except OSError as error:
        raise UserError(f"--{flag} {folder}: cannot write there: {error.strerror or error}") from error
    if holder is not None:
        raise in_use(flag, folder, holder)
    try:
        yield
    finally:
        lock.release(remove=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()


def _write_holder(number: int) -> None:
    with suppress(OSError):  # a full disk: nobody will know who holds it, but it is held
        os.ftruncate(number, 0)
        os.pwrite(number, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n", 0)
        os.fsync(number)  # other clients of a file server see it


def _read_holder(number: int) -> tuple[str, str]:
    try:
        content = json.loads(os.pread(number, 1000, 0))
        return str(content["pid"]), str(content["host"])
    except (OSError, ValueError, KeyError, TypeError):
        return "unknown", "an unknown host"
