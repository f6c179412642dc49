"""Ends a run that hangs: no rank has shown progress for a while.

Ranks wait for one another, so one that hangs soon makes all stand still, while a slow one that moves keeps the others
from being suspected. Every rank watches for itself, so that it does not matter which one hangs, and hears over its
peers' connections that others move.
"""

import faulthandler
import os
import threading
import time
from collections.abc import Callable

from spmdrl.distributed import whereabouts
from spmdrl.distributed.peers import Peers

MAX_TICK_S = 30.0
START_UP_S = 1800.0  # at least: loading models and starting an engine show no progress
BACKSTOP_S = 5.0  # later, a thread that needs no interpreter ends a process whose others cannot run


class Watchdog:
    """Calls `on_stuck(seconds)` in its thread once no rank has moved for `timeout_s`, or up to a third more, within a
    step; before the first, START_UP_S at least."""

    def __init__(self, timeout_s: float, peers: Peers | None, on_stuck: Callable[[float], None]):
        self.timeout_s, self.tick_s = timeout_s, min(timeout_s / 10, MAX_TICK_S)
        self.peers, self.on_stuck = peers, on_stuck

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="watchdog").start()

    @property
    def limit_s(self) -> float:
        """With what a sign of a peer may take to get here."""
        timeout_s = self.timeout_s if whereabouts.steps_begun() else max(self.timeout_s, START_UP_S)
        return timeout_s + 2 * self.tick_s

    def _watch(self) -> None:
        seen, moved_at = whereabouts.beats(), time.monotonic()
        while (left_s := moved_at + self.limit_s - time.monotonic()) > 0:
            faulthandler.dump_traceback_later(left_s + BACKSTOP_S, exit=True, file=2)
            time.sleep(self.tick_s)
            if whereabouts.beats() != seen:
                seen, moved_at = whereabouts.beats(), time.monotonic()
                self._pass_on()
            elif self.peers and self.peers.moved_at > moved_at:
                moved_at = self.peers.moved_at
                if self.peers.rank == 0:
                    self._pass_on()
        faulthandler.cancel_dump_traceback_later()
        self.on_stuck(time.monotonic() - moved_at)

    def _pass_on(self) -> None:
        if self.peers:
            self.peers.tell_moved()


def stacks() -> str:
    """Where every thread of this process is. Reads no source file: a disk may be what hangs."""
    with os.fdopen(os.memfd_create("stacks"), "r+") as file:
        faulthandler.dump_traceback(file=file, all_threads=True)
        file.seek(0)
        return file.read()
