"""Fresh ranks in milliseconds: Python programs forked from a process that has imported the libraries and done no more.

Importing torch, transformers and DeepSpeed takes a rank 10 to 15 s of a core, a run on a tiny model one. `start` gives
a program what a new interpreter has right after these imports, with a session, an environment, a working directory,
streams, a `__main__` and exit handlers of its own. There are two such parents, for even and for odd ranks, so that the
ranks of a pair have different hash seeds, as processes of their own do.

Start a rank here where a test is about what it computes, says or saves, and how it ends. Start a process
(tests/launched.py, subprocess) where a test is about the start: launchers, what is imported or printed by then,
variables that libraries read while they are imported, memory, refused command lines, GPUs.
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
PRELOADED = (
    "spmdrl.trainer.ppo_trainer",
    "spmdrl.trainer.supervised_trainer",
    "deepspeed.runtime.engine",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "peft",
    "matplotlib.backends.backend_agg",
)
LAUNCHERS_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "SLURM_", "TORCHELASTIC_", "OMP_NUM_THREADS")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS_VARIABLES)}
MAX_BYTES = 1 << 17  # of a job


class Forked:
    """A running program, with pid, returncode, poll, wait, kill and send_signal as `subprocess.Popen` has them."""

    def __init__(self, report: int, log: IO[str]):
        self._report, self._log = report, log
        self.returncode: int | None = None

    @cached_property
    def pid(self) -> int:
        return self._read()

    def _read(self) -> int:
        word = os.read(self._report, 16)
        if not word:
            self._log.seek(0)
            raise RuntimeError(f"the process that forks ranks has ended:\n{self._log.read()}")
        return int(word)

    def poll(self) -> int | None:
        return self._poll(0)

    def wait(self, timeout: float | None = None) -> int:
        code = self._poll(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return code

    def _poll(self, timeout: float | None) -> int | None:
        self.pid  # noqa: B018 (comes first in the report)
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._read())
            os.close(self._report)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(command: Sequence[str], env: Mapping[str, str], cwd: Path, out: int = 1, err: int = 2) -> Forked:
    """Run `python *command`, a script and its words, with this environment and these open files as its streams."""
    parents = [_parent(number) for number in range(2)]
    channel, log = parents[int(env.get("RANK") or env.get("SLURM_PROCID") or 0) % 2]
    job = {"argv": list(command), "env": dict(env), "cwd": str(cwd)}
    report, reports = os.pipe()
    socket.send_fds(channel, [json.dumps(job).encode()], [out, err, reports])
    os.close(reports)
    return Forked(report, log)


@cache
def _parent(number: int) -> tuple[socket.socket, IO[str]]:
    """The socket to one of the processes that fork, and what it printed. It ends with this process."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = tempfile.TemporaryFile("w+", prefix=f"zygote{number}")  # noqa: SIM115 (as long as the process)
    with there:
        subprocess.Popen(
            [sys.executable, "-m", "tests.zygote", str(there.fileno()), *PRELOADED],
            env=ENVIRONMENT | {"OMP_NUM_THREADS": "1"},  # what no test has changed
            cwd=ROOT,
            stdout=log,
            stderr=log,
            pass_fds=[there.fileno()],
            start_new_session=True,
        )
    return here, log


# ---- in the process that forks --------------------------------------------------------------------------------------
def _serve(channel: socket.socket, imported: Mapping[str, str]) -> list[str]:
    """Fork a process for each job until nobody asks any more. Returns in these alone, with the command they are."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, files, _, _ = socket.recv_fds(channel, MAX_BYTES, 3)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _become(json.loads(message), imported, *files)
        for file in files:
            os.close(file)


def _become(job: dict[str, Any], imported: Mapping[str, str], out: int, err: int, report: int) -> list[str]:
    """Fork once more: the keeper reports the child's number and how it ended, and the child becomes the job."""
    pid = os.fork()
    if pid:
        os.close(out)
        os.close(err)
        os.write(report, f"{pid:<16}".encode())
        os.write(report, f"{os.waitpid(pid, 0)[1]:<16}".encode())
        os._exit(0)
    os.close(report)
    os.setsid()
    for stream, file in enumerate((out, err), start=1):
        os.dup2(file, stream)
        os.close(file)
    os.chdir(job["cwd"])
    os.environ.clear()
    os.environ.update({**imported, **job["env"]})
    return job["argv"]


def _main() -> None:
    channel, before = socket.socket(fileno=int(sys.argv[1])), dict(os.environ)
    for name in sys.argv[2:]:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads after the imports, and a fork has one"
    sys.stdout.flush()
    sys.argv = _serve(channel, {name: value for name, value in os.environ.items() if before.get(name) != value})
    sys.modules["numpy"].random.seed()  # Python's own is seeded anew in a fork, torch's is a constant
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    _main()
