"""Equality of mathematical answers by the math-verify package, with a time limit that holds.

math-verify limits its own time by a Python handler of SIGALRM. That works in a main thread only, takes the signal from
whoever else uses it, and cannot stop a long integer operation, for which a response of 10^{10^{10}} is enough. So it
runs in a child process whose alarm has no handler and ends it. `python -m spmdrl.rewards.maths SECONDS` is that child.
"""

import importlib.util
import json
import logging
import resource
import select
import signal
import subprocess
import sys
import threading
from typing import IO

from spmdrl.errors import UserError

TIMEOUT_S = 10.0
START_S = 120.0
MEMORY_LIMIT = 4 * 1024**3


class MathVerifier:
    """Compares answers in a child process, started at the first comparison and again after one that was late."""

    def __init__(self, timeout_s: float = TIMEOUT_S):
        if importlib.util.find_spec("math_verify") is None:
            raise UserError("math-verify is not installed: pip install math-verify")
        self.timeout_s = timeout_s
        self.child: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def equal(self, label: object, response: str) -> bool | None:
        """Whether the response's answer equals the label, or None where that took too long to tell.

        Raises ValueError where the label itself holds no mathematical expression.
        """
        if label is None:
            raise ValueError("no label to compare with: --label_key names the column that holds it")
        with self.lock:
            if self.child is None or self.child.poll() is not None:
                self.child = self._start()
            child = self.child
            reply = _ask(child, json.dumps([str(label), response]), 2 * self.timeout_s)
            if not reply:
                self.close()
        if reply == "no label":
            raise ValueError(f"math-verify finds no expression in the label {label!r}")
        return reply == "equal" if reply else None

    def close(self) -> None:
        if self.child is not None:
            self.child.kill()
            self.child.communicate()
            self.child = None

    def _start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "spmdrl.rewards.maths", str(self.timeout_s)]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8")
        if _ask(child, '["1", "1"]', START_S) != "equal":
            child.kill()
            raise RuntimeError(f"the math-verify process does not work: {' '.join(command)}")
        return child


def _ask(child: "subprocess.Popen[str]", request: str, timeout_s: float) -> str:
    """The child's one line in reply; empty where it does not come in time or the child is gone."""
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(request + "\n")
    child.stdin.flush()
    return child.stdout.readline().strip() if select.select([child.stdout], [], [], timeout_s)[0] else ""


def compare(label: str, response: str) -> str:
    """ "equal", "different" or "no label". No time limit here: those of math-verify are off."""
    from math_verify import parse, verify

    off = {"parsing_timeout": None}
    gold = parse(label, **off) or parse(f"${label}$", **off)
    if not gold:
        return "no label"
    return "equal" if verify(gold, parse(response, **off), timeout_seconds=None) else "different"


def serve(requests: IO[str], replies: IO[str], timeout_s: float) -> None:
    """Answer [label, response] lines until the parent closes its end. A late answer ends this process."""
    import math_verify  # noqa: F401  # before the clock runs

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it would warn that its own time limits are off
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGUSR1):  # Ctrl-C and a notice of a time limit are the parent's
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    for line in requests:
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        reply = compare(*json.loads(line))
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(reply + "\n")
        replies.flush()


if __name__ == "__main__":
    serve(sys.stdin, sys.stdout, float(sys.argv[1]))
