"""One rank fails, all stop: run a program so that every rank ends within seconds, with the real error printed once."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from spmdrl.config import StoppingConfig
from spmdrl.distributed import comm, preemption, watchdog, whereabouts
from spmdrl.distributed.peers import Failure, Peers
from spmdrl.distributed.preemption import EXIT_RESUME, Preempted
from spmdrl.errors import UserError

PATIENCE_S = 1.0  # for the cause of an error that may only be its consequence
STUCK_PATIENCE_S = watchdog.BACKSTOP_S + 3.0  # for the others' stacks
GRACE_S = 2.0  # for the others' last lines, and for launchers to see first who failed first
TOLD_CHARS = 500

_peers: Peers | None = None
_ending = threading.Lock()  # whoever takes it prints this rank's last line and ends the process


def set_phase(name: str) -> None:
    """Name what this rank is doing, for error messages."""
    whereabouts.enter(name)
    _tell_where()


def set_step(step: int) -> None:
    """Number of the step that begins, for error messages."""
    whereabouts.begin_step(step)
    _tell_where()


def _tell_where() -> None:
    if _peers and whereabouts.where() != _peers.phases[_peers.rank]:
        _peers.tell_phase(whereabouts.where())


def run(program: Callable[[], None], local_rank_flag: int = -1, stopping: StoppingConfig | None = None) -> NoReturn:
    """Join the process group, run `program` on this rank and leave; on any error end this process and its peers.

    Exit codes: 2 for a UserError (one line), 1 for any other error (traceback) or a run that hangs, EXIT_RESUME for a
    run that was asked to stop and saved a checkpoint, 128 + signal for one that a signal ended without, and the failed
    rank's for its peers. The process leaves by `os._exit`: the libraries' exit handlers wait for process groups whose
    members are gone.
    """
    try:
        preemption.install(lambda reason: _peers.tell_request(reason) if _peers else None, _stop_now)
        _join(local_rank_flag, stopping or StoppingConfig())
        _leave(*_run(program))
    except UserError as error:
        shown = error.__cause__ if getattr(error, "show_cause", False) else None
        details = "".join(traceback.format_exception(shown)) if shown else ""
        where = f" (in {whereabouts.where()})" if whereabouts.steps_begun() else ""
        line = f"error: {error}{where}"
        _fail(f"failed in {whereabouts.where()}: {error}", code=2, details=details, line=line)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) and error.code else 1
        _fail(f"failed in {whereabouts.where()}: sys.exit({error.code!r}) before the end of the run", code=code)
    except BaseException as error:
        if isinstance(error, RuntimeError) and _peers and _peers.known.wait(2 * PATIENCE_S):
            _wait_for_the_end()  # a collective failed because a peer did
        summary = traceback.format_exception_only(error)[-1]
        _fail(f"failed in {whereabouts.where()}: {summary}", code=1, details=traceback.format_exc())


def _join(local_rank_flag: int, stopping: StoppingConfig) -> None:
    global _peers
    store = comm.meet(local_rank_flag)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size > 1:
        peers = Peers(rank, world_size, _stop, preemption.hear)
        peers.connect(store, comm.MEETING_TIMEOUT.total_seconds())
        _peers = peers
    if stopping.phase_timeout:
        watchdog.Watchdog(stopping.phase_timeout, _peers, _stop_stuck(stopping.phase_timeout)).start()
    comm.join(store, max(comm.COLLECTIVE_TIMEOUT, timedelta(seconds=2 * stopping.phase_timeout)))
    _notice_before_the_jobs_end(stopping.time_limit_margin_s)


def _notice_before_the_jobs_end(margin_s: float) -> None:
    """Where Slurm, or a batch script, says when the job ends; at most a quarter of its time before."""
    start, end = (os.environ.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    if start.isdigit() and end.isdigit():
        margin_s = min(margin_s, (int(end) - int(start)) / 4)
    if margin_s and end.isdigit():
        preemption.notice_at(int(end) - margin_s, "the job's time limit")


def _run(program: Callable[[], None]) -> tuple[int, str]:
    """Exit code of a program that comes to its end or is preempted, and what there is to say."""
    try:
        program()
    except Preempted as error:
        preemption.ignore()
        if error.saved_in is None:
            return 143, f"{error}: nothing to save"
        return EXIT_RESUME, f"{error}: checkpoint saved in {error.saved_in}; {error.resume}"
    set_phase("leaving")
    return 0, ""


def _leave(code: int, line: str) -> NoReturn:
    """End this process when all ranks have come here; rank 0 says `line`, and is the last to go."""
    comm.barrier()
    if line and comm.is_main():
        sys.stderr.write(f"{_prefix()}{line}\n")
    if _peers:
        _peers.leave()
    _exit(code)


def _stop_now(text: str, code: int) -> NoReturn:
    _fail(f"{text} in {whereabouts.where()}", code=code)


def _stop_stuck(timeout_s: float) -> Callable[[float], None]:
    def stop(still_s: float) -> None:
        where = whereabouts.where()
        cause = f"no rank has made progress for {still_s:.0f} s (--phase_timeout {timeout_s})"
        _fail(f"stuck in {where}: {cause}; threads above", code=1, details=watchdog.stacks(), stuck=True)

    return stop


def _fail(text: str, *, code: int, details: str = "", line: str | None = None, stuck: bool = False) -> NoReturn:
    """Tell the peers, print, and end this process without waiting for anybody."""
    if not _ending.acquire(blocking=False):
        _wait_for_the_end()
    first = _peers is None or _peers.fail(_one_line(text)[:TOLD_CHARS], code, stuck)
    sys.stderr.write(f"{details if first or stuck else ''}{_prefix()}{_one_line(line or text)}\n")
    _end(code, stuck)


def _stop(failure: Failure) -> None:
    """End this process because of a peer's failure; runs in a thread, whatever the main one is doing."""
    if failure.raised and not failure.stuck:
        time.sleep(PATIENCE_S)  # an error of our own, often the same one, may be on its way
    if _ending.acquire(blocking=False):
        details = watchdog.stacks() if failure.stuck else ""
        where = whereabouts.where()
        sys.stderr.write(f"{details}{_prefix()}stopped in {where}: rank {failure.rank} {failure.text}\n")
        _end(failure.code, failure.stuck)


def _end(code: int, stuck: bool) -> NoReturn:
    """Exit when the others have had time for their last lines."""
    if _peers and stuck:
        _peers.leave_stuck(STUCK_PATIENCE_S)
    elif _peers:
        time.sleep(GRACE_S)
    _exit(code)


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
