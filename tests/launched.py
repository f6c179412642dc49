"""Start the command line as users do, under a wall clock: a run that hangs, or leaves a process behind, fails.

`start`, `launch` and `start_by_hand` start processes, `start_ranks` forks ranks that have imported the libraries
already: tests/zygote.py says when to use which.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests import zygote
from tests.tiny import make_model, write_jsonl
from tests.zygote import LAUNCHERS_VARIABLES, ROOT

BIN = Path(sys.executable).parent
TRAIN = str(ROOT / "cli" / "train_ppo.py")
MEET = str(ROOT / "tests" / "programs" / "meet.py")  # a start without training
MARK = "SPMDRL_TEST_RUN"  # in the environment of every process of a run, by which what it leaves behind is found
REWARD = """
def reward_func(queries, prompts, labels, **columns):
    return [len(set(query[len(prompt):])) / 10 for query, prompt in zip(queries, prompts)]
"""
TINY_FLAGS = {
    "engine": "hf",
    "input_key": "prompt",
    "label_key": "label",
    "advantage_estimator": "group_norm",
    "n_samples_per_prompt": 2,
    "rollout_batch_size": 4,
    "train_batch_size": 8,
    "micro_train_batch_size": 2,
    "prompt_max_len": 64,
    "generate_max_len": 8,
    "actor_learning_rate": 1e-3,
}


def tiny_flags(folder: Path, **flags: object) -> list[str]:
    """The command line of a run of one step on a tiny model. Model and data in `folder` are made once and shared."""
    if not (folder / "model").exists():
        make_model(folder / "model")
        rows = [{"prompt": f"What is {i} plus {i}?", "label": str(2 * i)} for i in range(4)]
        write_jsonl(folder / "prompts.jsonl", rows)
        (folder / "reward.py").write_text(REWARD)
    files = {
        "pretrain": folder / "model",
        "prompt_data": folder / "prompts.jsonl",
        "remote_rm_url": folder / "reward.py",
    }
    if "save_path" in flags:
        files["ckpt_path"] = Path(str(flags["save_path"]), "ckpt")
    return [word for name, value in {**TINY_FLAGS, **files, **flags}.items() for word in (f"--{name}", str(value))]


@dataclass
class Launched:
    code: int
    out: str  # stdout and stderr of all ranks
    ended_at: float  # of the last of the run's commands, as time.time()

    def lines(self, *words: str) -> list[str]:
        return [line for line in self.out.splitlines() if all(word in line for word in words)]


Process = subprocess.Popen | zygote.Forked


def _start_process(command: Sequence[str], env: dict[str, str], out: int) -> Process:
    return subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=out, start_new_session=True)


def _fork(command: Sequence[str], env: dict[str, str], out: int) -> Process:
    return zygote.start(command, env, ROOT, out, out)


class Running:
    """One command, or several that make up a run, such as ranks started by hand."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[dict[str, str]],
        log: Path,
        start: Callable[[Sequence[str], dict[str, str], int], Process] = _start_process,
    ):
        self.mark, self.log, self.start = uuid.uuid4().hex, log, time.monotonic()
        base = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS_VARIABLES)}
        base |= {"OMP_NUM_THREADS": "1", "PATH": f"{BIN}:{os.environ['PATH']}", MARK: self.mark}
        with log.open("w") as file:
            self.processes = [
                start(command, base | env, file.fileno()) for command, env in zip(commands, environments, strict=True)
            ]
        self.sessions = {process.pid for process in self.processes}

    def wait(self, timeout_s: float = 240) -> list[Launched]:
        """How each command ended. Whatever is still there afterwards is killed, and fails the test."""
        hanging = False
        for process in self.processes:
            try:
                process.wait(max(self.start + timeout_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                hanging = True
        ended_at = time.time()
        left = self.members(within_s=0 if hanging else 5)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        out = self.log.read_text()
        assert not hanging, f"hangs:\n{out}"
        assert not left, f"left processes {left} behind:\n{out}"
        return [Launched(process.wait(), out, ended_at) for process in self.processes]

    def members(self, within_s: float = 0, variable: str = "") -> list[int]:
        """Process ids of the run; with `within_s`, those that do not end by themselves in that time, and with
        `variable` those that have this NAME=value in their environment."""
        deadline = time.monotonic() + within_s
        while True:
            found = [int(p.name) for p in Path("/proc").glob("[0-9]*") if self._is_member(p, variable)]
            if not found or time.monotonic() >= deadline:
                return found
            time.sleep(0.1)

    def _is_member(self, process: Path, variable: str) -> bool:
        try:
            state, _, _, session = (process / "stat").read_text().rpartition(")")[2].split()[:4]
            environ = (process / "environ").read_bytes()  # of a forked one, that of whom it was forked from
            is_ours = f"{MARK}={self.mark}".encode() in environ or int(session) in self.sessions
            return state != "Z" and is_ours and variable.encode() in environ
        except OSError:
            return False

    def until(self, text: str, timeout_s: float = 120) -> None:
        """Wait until the run has printed `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.log.read_text():
            assert time.monotonic() < deadline, f"never printed {text!r}:\n{self.log.read_text()}"
            assert self.members(), f"ended without printing {text!r}:\n{self.log.read_text()}"
            time.sleep(0.05)


def start(command: Sequence[str], log: Path, **env: str) -> Running:
    return Running([command], [env], log)


def launch(command: Sequence[str], log: Path, *, timeout_s: float = 240, **env: str) -> Launched:
    return start(command, log, **env).wait(timeout_s)[0]


def start_by_hand(command: Sequence[str], environments: Sequence[dict[str, str]], log: Path) -> Running:
    """The same command once for each of these environments, as `srun` does, and nobody to stop the others."""
    return Running([command] * len(environments), environments, log)


def start_ranks(words: Sequence[str], environments: Sequence[dict[str, str]], log: Path) -> Running:
    """`python words`, a script and its flags, by hand too, in forks that need not import the libraries."""
    return Running([words] * len(environments), environments, log, _fork)


def slurm_tasks(num_tasks: int, job: int | None = None) -> list[dict[str, str]]:
    """What `srun` would tell the tasks of a step on this host; the job's number decides where they meet."""
    job = random.SystemRandom().randrange(10**9) if job is None else job
    common = {"SLURM_NTASKS": str(num_tasks), "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0"}
    common["SLURM_JOB_NODELIST"] = "localhost"
    return [{**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(num_tasks)]


def torchrun(*words: str, ranks: int = 2) -> list[str]:
    return [str(BIN / "torchrun"), "--nproc_per_node", str(ranks), *words]


def assert_trained(run: Launched, folder: Path, *, ranks: int) -> None:
    """The run went through its step on that many ranks and left a model and its metrics."""
    assert run.code == 0, run.out
    assert run.lines(f"over {ranks} rank"), run.out
    assert len(run.lines("step 1/1 | reward ")) == 1, run.out
    assert (folder / "model.safetensors").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 1


@contextmanager
def two_nodes() -> Iterator[tuple[list[list[str]], list[str]]]:
    """Two network namespaces joined by a cable; the command prefix and address of each."""
    names = [f"spmdrl{os.getpid()}n{i}" for i in range(2)]
    links, addresses = [f"sp{os.getpid()}v{i}" for i in range(2)], ["10.231.7.1", "10.231.7.2"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip(names, links, addresses, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "link", "set", link, "name", "eth0")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield [["ip", "netns", "exec", name] for name in names], addresses
    finally:
        for name in names:
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


def why_no_two_nodes() -> str:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "network namespaces need root and iproute2"
    try:
        with two_nodes():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.decode().strip()}"
