"""One rank fails, all stop: run a program so that every rank ends soon, with the real error printed once."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from spmdrl.distributed import comm
from spmdrl.errors import UserError

POLL_S = 0.5
GRACE_S = 3.0
_phase = "start-up"


def set_phase(name: str) -> None:
    """Name what this rank is doing, for error messages."""
    global _phase
    _phase = name


def run(program: Callable[[], None], local_rank_flag: int = -1) -> None:
    """Join the process group, run `program` on this rank and leave; on any error end this process and its peers.

    Exit codes: 2 for a UserError (one line), 1 for anything else (traceback) and for a rank whose peer failed.
    The process leaves by `os._exit`: destroying a process group whose peers are gone can block for minutes.
    """
    try:
        comm.init(local_rank_flag)
        watch = _PeerWatch() if comm.world_size() > 1 else None
        program()
        set_phase("leaving")
        comm.barrier()
        if watch:
            watch.stop()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # the exit handlers of the libraries destroy one another's process groups
    except UserError as error:
        cause = error.__cause__
        if cause is not None and getattr(error, "show_cause", False):
            traceback.print_exception(cause, file=sys.stderr)
        _fail(f"error: {error}", code=2)
    except KeyboardInterrupt:
        _fail(f"interrupted in {_phase}", code=130)
    except SystemExit as error:
        if error.code not in (None, 0):
            _fail(f"error: {error.code}", code=error.code if isinstance(error.code, int) else 1)
        raise
    except BaseException:
        _fail(f"failed in {_phase}", code=1, details=traceback.format_exc())


def _fail(message: str, code: int, details: str = "") -> None:
    """Tell the peers, print, and end this process without waiting for anybody."""
    first = _PeerWatch.announce(message)
    where = f"[rank {comm.rank()}] " if comm.world_size() > 1 else ""
    if first:
        sys.stderr.write(f"{details}{where}{message}\n")
    else:
        sys.stderr.write(f"{where}{details.strip().splitlines()[-1] if details else message}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if comm.rank() == 0 and comm.world_size() > 1:
        time.sleep(GRACE_S)  # rank 0 serves the store in which the peers read why they stop
    os._exit(code)


class _PeerWatch(threading.Thread):
    """Polls the rendezvous store for a peer's failure: a rank inside a collective cannot notice it by itself."""

    KEY = "spmdrl/failed"

    def __init__(self) -> None:
        super().__init__(daemon=True, name="peer-watch")
        self._stopped = threading.Event()
        self._store = _own_store()
        self.start()

    def stop(self) -> None:
        self._stopped.set()
        self.join(timeout=2 * POLL_S)

    def run(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                message = self._store.get(self.KEY).decode() if self._store.check([self.KEY]) else None
            except (RuntimeError, dist.DistStoreError):
                message = "rank 0 is gone"
            if message and not self._stopped.is_set():
                time.sleep(GRACE_S / 2)  # leave the failing rank, and an error of our own, time to be printed
                sys.stderr.write(f"[rank {comm.rank()}] stopped in {_phase}: {message}\n")
                sys.stderr.flush()
                os._exit(1)

    @classmethod
    def announce(cls, message: str) -> bool:
        """Record this rank's failure; True when it is the first one of the run."""
        if comm.world_size() == 1:
            return True
        try:
            store = _own_store()
            first = store.add(cls.KEY + "/count", 1) == 1
            if first:
                store.set(cls.KEY, f"rank {comm.rank()}: {message}")
            return first
        except (RuntimeError, dist.DistStoreError):
            return True


def _own_store() -> dist.Store:
    """A connection of our own to the rendezvous store: the group's own client may be inside a blocking wait."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10), wait_for_workers=False)
