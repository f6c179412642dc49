"""Stopping a run where it loses nothing: a request is told to all ranks at once and acted on at the next safe point.

SIGTERM, SIGUSR1 and SIGINT, on any rank, are requests once the program has come to its first safe point. Before, there
is nothing to save: SIGTERM and SIGINT end the run at once. So does a second signal, one that comes more than ECHO_S
after the first, since a signal sent to a launcher and its ranks together reaches a rank twice.

SIGUSR1 is a notice: a SIGTERM may follow (Slurm: `--signal` before the time limit, SIGTERM at it), which then is not
the second signal. A notice that comes during start-up waits for one finished step, or a job with a short time limit
would start for ever.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from spmdrl import launch
from spmdrl.distributed import comm, whereabouts

EXIT_RESUME = 75  # a checkpoint is saved: start the same command again with --load_checkpoint (EX_TEMPFAIL)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
ECHO_S = 1.0

_asked = threading.Event()
_reason = _notice = ""
_tell: Callable[[str], None] | None = None
_has_safe_points = False


class Preempted(BaseException):
    """The run is to stop here, on every rank. Whoever saves the run's state sets `saved_in`, where it goes on by other
    means `resume` too, and raises it on."""

    def __init__(self, reason: str, where: str):
        super().__init__(f"preempted in {where} ({reason})")
        self.saved_in: str | None = None
        self.resume = "start the same command with --load_checkpoint"


def install(tell: Callable[[str], None], stop_now: Callable[[str, int], NoReturn]) -> None:
    """Take over the signals of this process.

    tell: passes a request, with its reason, on to the peers. stop_now: ends this process and its peers with a line and
    an exit code. Both are called in a thread, which hears of a signal even while the main one is in a long call of
    another language.
    """
    global _tell, _notice
    _tell, _notice = tell, launch.noticed
    heard, raised = socket.socketpair()
    raised.setblocking(False)
    signal.set_wakeup_fd(raised.detach(), warn_on_full_buffer=False)
    for number in SIGNALS:
        signal.signal(number, _leave_it_to_the_thread)
    os.register_at_fork(after_in_child=_give_back)
    threading.Thread(target=_listen, args=(heard, stop_now), daemon=True, name="signals").start()


def _leave_it_to_the_thread(number: int, frame: object) -> None:
    """Python calls this when its main thread gets to it; the number has gone through the wakeup socket before."""


def _listen(heard: socket.socket, stop_now: Callable[[str, int], NoReturn]) -> None:
    first: signal.Signals | None = None
    first_at = 0.0
    while numbers := heard.recv(64):
        for number in map(signal.Signals, numbers):
            if number not in SIGNALS:
                continue
            if not _has_safe_points and number != signal.SIGUSR1:
                stop_now(f"stopped by {number.name}", 128 + number)
            now = time.monotonic()
            if first is None or (first == signal.SIGUSR1 != number):
                first, first_at = number, now
                (notice if number == signal.SIGUSR1 else request)(number.name)
            elif now - first_at > ECHO_S:
                stop_now(f"stopped by a second signal ({number.name})", 128 + number)


def _give_back() -> None:
    """A forked child is a helper and no rank: SIGTERM and SIGINT end it, and the notice is not for it. Slurm sends it
    to all processes of a step."""
    with suppress(ValueError):  # not the main thread, so that there are no handlers
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def ignore() -> None:
    """From here on signals do nothing: the run is leaving, and launchers signal whom they find still there."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def request(reason: str) -> None:
    """Ask all ranks to stop at their next safe point."""
    if not _asked.is_set():
        hear(reason)
        if _tell is not None:
            _tell(reason)


def hear(reason: str) -> None:
    """A request that came to a peer."""
    global _reason
    _reason = _reason or reason
    _asked.set()


def notice(reason: str) -> None:
    """A request; during start-up one that waits until the run has made a step."""
    global _notice
    if _has_safe_points:
        request(reason)
    else:
        _notice = reason


def notice_at(unix_time: float, reason: str) -> None:
    """Notice at that time, or at once where it has passed."""
    timer = threading.Timer(max(unix_time - time.time(), 0.0), notice, args=(reason,))
    timer.daemon = True
    timer.start()


def requested() -> bool:
    """Whether a request came to this rank or a peer told of one. Local: ranks may see it some milliseconds apart."""
    return _asked.is_set()


def safe_point() -> None:
    """Raise Preempted on every rank if there is a request on any. A collective."""
    global _has_safe_points
    _has_safe_points = True
    if _notice and whereabouts.steps_begun() > 1:
        request(_notice)
    if comm.any_rank(requested()):
        _asked.wait(1.0)  # the reason is on its way
        raise Preempted(_reason or "asked by a peer", whereabouts.where())


@contextmanager
def excused() -> Iterator[None]:
    """Before a safe point, around code that may have helper processes: launchers send signals to all processes of a
    rank, and an error because helpers have ended is then none of the run's."""
    try:
        yield
    except Exception:
        if not _asked.wait(0.5 if _tell else 0.0):  # the thread that hears of signals may be a moment behind
            raise
