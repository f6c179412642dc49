"""One rank fails, all stop: run a program so that every rank ends within seconds, with the real error printed once."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import NoReturn

from spmdrl.distributed import comm
from spmdrl.distributed.peers import Failure, Peers
from spmdrl.errors import UserError

PATIENCE_S = 1.0  # for the cause of an error that may only be its consequence
GRACE_S = 2.0  # for the others' last lines, and for launchers to see first who failed first
TOLD_CHARS = 500

_phase = "start-up"
_peers: Peers | None = None
_ending = threading.Lock()  # whoever takes it prints this rank's last line and ends the process


def set_phase(name: str) -> None:
    """Name what this rank is doing, for error messages."""
    global _phase
    if _peers and name != _phase:
        _peers.tell_phase(name)
    _phase = name


def run(program: Callable[[], None], local_rank_flag: int = -1) -> NoReturn:
    """Join the process group, run `program` on this rank and leave; on any error end this process and its peers.

    Exit codes: 2 for a UserError (one line), 1 for any other error (traceback), and the failed rank's for its peers.
    The process leaves by `os._exit`: the libraries' exit handlers wait for process groups whose members are gone.
    """
    try:
        _join(local_rank_flag)
        program()
        set_phase("leaving")
        comm.barrier()
        if _peers:
            _peers.leave()
        _exit(0)
    except UserError as error:
        shown = error.__cause__ if getattr(error, "show_cause", False) else None
        details = "".join(traceback.format_exception(shown)) if shown else ""
        _fail(f"failed in {_phase}: {error}", code=2, details=details, line=f"error: {error}")
    except KeyboardInterrupt:
        _fail(f"interrupted in {_phase}", code=130)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) and error.code else 1
        _fail(f"failed in {_phase}: sys.exit({error.code!r}) before the end of the run", code=code)
    except BaseException as error:
        if isinstance(error, RuntimeError) and _peers and _peers.known.wait(2 * PATIENCE_S):
            _wait_for_the_end()  # a collective failed because a peer did
        summary = traceback.format_exception_only(error)[-1]
        _fail(f"failed in {_phase}: {summary}", code=1, details=traceback.format_exc())


def _join(local_rank_flag: int) -> None:
    global _peers
    store = comm.meet(local_rank_flag)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        peers = Peers(rank, world_size, _stop)
        peers.connect(store, comm.MEETING_TIMEOUT.total_seconds())
        _peers = peers
    comm.join(store)


def _fail(text: str, *, code: int, details: str = "", line: str | None = None) -> NoReturn:
    """Tell the peers, print, and end this process without waiting for anybody."""
    if not _ending.acquire(blocking=False):
        _wait_for_the_end()
    first = _peers is None or _peers.fail(_one_line(text)[:TOLD_CHARS], code)
    sys.stderr.write(f"{details if first else ''}{_prefix()}{_one_line(line or text)}\n")
    if _peers:
        time.sleep(GRACE_S)
    _exit(code)


def _stop(failure: Failure) -> None:
    """End this process because of a peer's failure; runs in a thread, whatever the main one is doing."""
    if failure.raised:
        time.sleep(PATIENCE_S)  # an error of our own, often the same one, may be on its way
    if _ending.acquire(blocking=False):
        sys.stderr.write(f"{_prefix()}stopped in {_phase}: rank {failure.rank} {failure.text}\n")
        time.sleep(GRACE_S)
        _exit(failure.code)


def _wait_for_the_end() -> NoReturn:
    while True:  # until _stop has ended this process
        time.sleep(60)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _prefix() -> str:
    return f"[rank {os.environ.get('RANK', '0')}] " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
