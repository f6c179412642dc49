"""Ranks that notice one another's end: each keeps a connection to rank 0, over which failures are told.

The kernel closes the connections of a process that ends, however it ends (kill -9, out of memory, os._exit), so its
peers know at once, also while they compute and wait for no collective. Nothing is polled: a rank that is slow, or
busy in a long call, is never taken for a dead one.
"""

import json
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

from torch.distributed import Store

from spmdrl.errors import UserError

ADDRESS_KEY = "spmdrl/peers/" + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun may start ranks anew
HELLO_S, ANSWER_S, LEAVE_S = 10.0, 2.0, 10.0
# A host that vanishes closes nothing: silent for a minute it is asked for a sign, and given up after another.
KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


@dataclass(frozen=True)
class Failure:
    """How a rank failed. `raised` is False for one that ended without a word, `stuck` True for a run that hangs."""

    rank: int
    text: str
    code: int = 1
    raised: bool = True
    stuck: bool = False


class Peers:
    """This rank's end of a star: rank 0 has a link to every other rank, the others have one to rank 0.

    `on_failure` is called in a thread of its own with the first failure of another rank, `on_request` with the reason
    for which another rank asks the run to stop at the next safe point.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        on_failure: Callable[[Failure], None],
        on_request: Callable[[str], None] = lambda reason: None,
    ):
        self.rank, self.world_size, self.on_failure, self.on_request = rank, world_size, on_failure, on_request
        self.moved_at = 0.0  # time.monotonic() of the last sign of progress of another rank
        self.phases = dict.fromkeys(range(world_size), "start-up")
        self.failure: Failure | None = None
        self.known = threading.Event()  # set once any rank's failure is known here
        self._links: dict[int, socket.socket] = {}
        self._processes: dict[int, dict[str, Any]] = {}  # of the linked ranks
        self._left: set[int] = set()  # ranks whose end is no failure, or that have ended
        self._lock = threading.Condition(threading.RLock())
        self._was_first, self._answered = True, threading.Event()
        os.register_at_fork(after_in_child=self._close_in_child)

    # ---- meeting ------------------------------------------------------------------------------------------------
    def connect(self, store: Store, timeout_s: float) -> None:
        """Link this rank; rank 0 waits for all others. Raises UserError for ranks that do not come."""
        if self.rank == 0:
            self._welcome(store, time.monotonic() + timeout_s)
        else:
            hello, link, lines = _find_main(json.loads(store.get(ADDRESS_KEY)), self.rank)
            self._add(0, hello, link, lines)

    def _welcome(self, store: Store, deadline: float) -> None:
        token = secrets.token_hex(16)  # keeps out whoever else finds the port
        with _listener(self.world_size) as listener:
            hosts = [os.environ["MASTER_ADDR"], _address_towards(os.environ["MASTER_ADDR"]), socket.gethostname()]
            store.set(ADDRESS_KEY, json.dumps({"hosts": hosts, "port": listener.getsockname()[1], "token": token}))
            while len(self._links) < self.world_size - 1:
                listener.settimeout(max(deadline - time.monotonic(), 0.01))
                try:
                    link, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self.world_size)) - set(self._links))
                    raise UserError(f"of {self.world_size} ranks (WORLD_SIZE) these did not come: {missing}") from None
                lines = link.makefile("r", encoding="utf-8")
                hello = _hello(link, lines)
                if hello.get("token") == token:
                    _send(link, {"welcome": True, **_this_process()})
                    self._add(hello["rank"], hello, link, lines)

    def _add(self, rank: int, hello: dict[str, Any], link: socket.socket, lines: TextIO) -> None:
        link.settimeout(None)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):
                link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        with self._lock:
            self._links[rank] = link
            self._processes[rank] = {name: hello[name] for name in _this_process()}
        _start(self._read, rank, lines)

    # ---- telling ------------------------------------------------------------------------------------------------
    def tell_phase(self, phase: str) -> None:
        self.phases[self.rank] = phase
        self._send_all({"phase": phase})

    def tell_request(self, reason: str) -> None:
        self._send_all({"request": reason})

    def tell_moved(self) -> None:
        """Say that this rank makes progress, or on rank 0 that some rank does."""
        self._send_all({"moved": True})

    def fail(self, text: str, code: int, stuck: bool = False) -> bool:
        """Tell the others that this rank failed; True when it is the first one to."""
        failure = Failure(self.rank, text, code, stuck=stuck)
        if self.rank == 0:
            return self._record(failure)
        self._send(0, {"failed": asdict(failure)})
        self._answered.wait(ANSWER_S)
        return self._was_first

    def leave(self) -> None:
        """Say that this rank's end is no failure. Rank 0 stays until all others have left."""
        self._send_all({"bye": True})
        if self.rank == 0:
            with self._lock:
                self._lock.wait_for(lambda: len(self._left) == self.world_size - 1, LEAVE_S)

    def leave_stuck(self, patience_s: float) -> None:
        """Leave a run that hangs, all together: an end breaks the collectives in which others are to show themselves.

        A rank that does not leave within that time cannot, it is stopped perhaps. Where it is on this machine it is
        killed: by rank 0, or if it is rank 0 by the others, who wait for it longer.
        """
        if self.rank != 0:
            self._send_all({"bye": True})
            patience_s *= 1.5
        with self._lock:
            self._lock.wait_for(lambda: self._links.keys() <= self._left, patience_s)
            silent = self._links.keys() - self._left
        for process in (self._processes[rank] for rank in silent):
            if process["machine"] == _this_process()["machine"]:
                with suppress(OSError):
                    os.kill(process["pid"], signal.SIGKILL)
        if self.rank == 0:
            self._send_all({"bye": True})

    def _send_all(self, message: dict[str, Any], but: int | None = None) -> None:
        for rank in list(self._links):
            if rank != but:
                self._send(rank, message)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        with self._lock, suppress(OSError):  # of a rank that is gone, the thread that reads from it hears too
            _send(self._links[rank], message)

    # ---- hearing ------------------------------------------------------------------------------------------------
    def _read(self, rank: int, lines: TextIO) -> None:
        try:
            for line in lines:
                self._hear(rank, json.loads(line))
        except (OSError, ValueError):
            pass  # the connection broke, perhaps in the middle of a line
        if rank not in self._left:
            text = f"ended without a word in {self.phases[rank]}: killed, or out of memory?"
            self._record(Failure(rank, text, raised=False))
            self._note_left(rank)

    def _note_left(self, rank: int) -> None:
        with self._lock:
            self._left.add(rank)
            self._lock.notify_all()

    def _hear(self, rank: int, message: dict[str, Any]) -> None:
        if "phase" in message:
            self.phases[rank] = message["phase"]
        elif "moved" in message:
            self.moved_at = time.monotonic()
        elif "request" in message:
            if self.rank == 0:
                self._send_all(message, but=rank)
            self.on_request(message["request"])
        elif "bye" in message:
            self._note_left(rank)
        elif "failed" in message:
            was_first = self._record(Failure(**message["failed"]))
            if self.rank == 0:
                self._send(rank, {"first": was_first})
        elif "first" in message:
            self._was_first = message["first"]
            self._answered.set()

    def _record(self, failure: Failure) -> bool:
        """Keep the run's first failure, and pass it on; False when there was one before."""
        with self._lock:
            if self.failure is not None:
                return False
            self.failure = failure
        if self.rank == 0:
            self._send_all({"failed": asdict(failure)}, but=failure.rank)
        self.known.set()
        if failure.rank != self.rank:
            _start(self.on_failure, failure)
        return True

    def _close_in_child(self) -> None:
        """A forked child must not keep the connection of a parent that died."""
        for link in self._links.values():
            os.close(link.detach())


def _start(target: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=target, args=args, daemon=True, name="peers").start()


def _listener(backlog: int) -> socket.socket:
    """A server on a free port of all interfaces, over IPv6 and IPv4 where there are both."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    return socket.create_server(("", 0), family=family, backlog=backlog, dualstack_ipv6=dual)


def _address_towards(host: str) -> str:
    """This host's own address on the way to `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return probe.getsockname()[0]


def _this_process() -> dict[str, Any]:
    """Its id, and where that id is good: in one container, on one host, since its boot."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:  # no /proc on this system
        machine = f"{socket.gethostname()} {os.getpid()}"
    return {"pid": os.getpid(), "machine": machine}


def _find_main(main: dict[str, Any], rank: int) -> tuple[dict[str, Any], socket.socket, TextIO]:
    """Rank 0's welcome and a link to it, by the first of its names that leads to it."""
    problems = []
    for host in dict.fromkeys(main["hosts"]):
        try:
            link = socket.create_connection((host, main["port"]), timeout=HELLO_S)
        except OSError as error:
            problems.append(f"{host}: {error}")
            continue
        lines = link.makefile("r", encoding="utf-8")
        _send(link, {"token": main["token"], "rank": rank, **_this_process()})
        if "welcome" in (hello := _hello(link, lines)):
            return hello, link, lines
        problems.append(f"{host}: no rank 0 there")
    raise UserError(
        f"cannot reach rank 0 on port {main['port']} ({'; '.join(problems)}): ranks need all ports between their hosts"
    )


def _hello(link: socket.socket, lines: TextIO) -> dict[str, Any]:
    """The first message from the other side; nothing from a stranger."""
    link.settimeout(HELLO_S)
    try:
        message = json.loads(lines.readline())
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}


def _send(link: socket.socket, message: dict[str, Any]) -> None:
    link.sendall((json.dumps(message) + "\n").encode())
