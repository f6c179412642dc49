"""Kill a run of two ranks again and again at random moments, resume it each time, and compare what comes out with the
run that nobody touched: weights of actor and critic, metrics but for times, and samples must be the same, bit for bit.

    python tests/kill_test.py --kills 100

Exit code 0 when all of it holds.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.launched import TRAIN, Running, slurm_tasks, start_ranks
from tests.trainer.runs import REWARD, write_inputs

EXIT_RESUME = 75
PATIENCE_S = 120.0  # for a run that was killed to end, on a busy machine
FLAGS = {
    "input_key": "question",
    "label_key": "answer",
    "advantage_estimator": "gae",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 4,
    "micro_train_batch_size": 2,
    "micro_rollout_batch_size": 2,
    "prompt_max_len": 48,
    "generate_max_len": 8,
    "actor_learning_rate": 1e-3,
    "critic_learning_rate": 1e-3,
    "kl_target": 0.05,
    "num_episodes": 4,
    "save_steps": 1,
    "max_ckpt_num": 2,
}
SWITCHES = ("load_checkpoint", "save_value_network", "normalize_reward", "no_bf16")
KINDS = [
    *((signal.SIGKILL, who) for who in ("one", "all")),
    *((signal.SIGTERM, who) for who in ("one", "all")),
    (signal.SIGUSR1, "one"),
    (signal.SIGINT, "all"),
]


@dataclass
class Job:
    """The command line of a run, and where it writes."""

    inputs: dict[str, Any]
    folder: Path
    engine: str
    zero_stage: int

    def start(self) -> Running:
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = {**FLAGS, **self.inputs, "engine": self.engine, "zero_stage": self.zero_stage}
        flags |= {"save_path": self.folder / "out", "ckpt_path": self.folder / "ckpt"}
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words += [f"--{name}" for name in SWITCHES]
        return start_ranks([TRAIN, *words], slurm_tasks(2), self.folder / f"log-{time.time():.3f}")

    def outcome(self) -> dict[str, Any]:
        out = self.folder / "out"
        weights = {name: _hash(out / name) for name in ("model.safetensors", "critic/model.safetensors")}
        return {**weights, "metrics": _rows(out / "metrics.jsonl"), "samples": _rows(out / "samples.jsonl")}


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _rows(path: Path) -> list[dict[str, Any]]:
    """Without times and speeds."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in row.items() if not name.startswith(("time/", "perf/"))} for row in rows]


def wait(running: Running) -> list[int]:
    """Exit codes of both ranks, which must come soon and leave no process behind."""
    return [ended.code for ended in running.wait(time.monotonic() - running.start + PATIENCE_S)]


MET = " prompts from "  # what a run prints soon after its ranks have met


@dataclass
class Pace:
    """Seconds until the ranks have met, from then to the end of the first step, and of a step."""

    meet_s: float
    start_s: float
    step_s: float


def run_through(job: Job) -> tuple[dict[str, Any], Pace]:
    """The run that nobody touches."""
    running = job.start()
    running.until(MET, timeout_s=300)
    met = time.monotonic()
    running.until("step 1/", timeout_s=300)
    first = time.monotonic()
    codes = wait(running)
    assert codes == [0, 0], f"the run itself failed with {codes}:\n{running.log.read_text()}"
    outcome = job.outcome()
    num_steps = len(outcome["metrics"])
    return outcome, Pace(met - running.start, first - met, (time.monotonic() - first) / num_steps)


def kill_somewhere(running: Running, pace: Pace, dice: random.Random) -> tuple[signal.Signals, str] | None:
    """Kill at a random moment: mostly while it trains and saves, also in the start. None where it had ended before."""
    number, who = dice.choice(KINDS)
    if dice.random() < 0.1:
        who = "all"  # a rank alone would wait for the other
        moment = running.start + dice.uniform(0.1, 1) * pace.meet_s
    else:
        running.until(MET, timeout_s=300)
        num_steps = dice.randrange(4)
        while len(_steps(running)) < num_steps and _is_alive(running):
            time.sleep(0.01)
        moment = time.monotonic() + dice.uniform(0, pace.step_s if num_steps else pace.start_s)
    while time.monotonic() < moment and _is_alive(running):
        time.sleep(0.01)
    chosen = running.processes if who == "all" else [dice.choice(running.processes)]
    alive = [process for process in chosen if process.poll() is None]
    for process in alive:
        os.kill(process.pid, number)
    return (number, who) if alive else None


def check_codes(running: Running, codes: Sequence[int], number: signal.Signals) -> str:
    """How the run ended, which must be one of the ways it may."""
    log = running.log.read_text()
    if number == signal.SIGKILL:
        assert -signal.SIGKILL in codes, f"exit codes {codes} after {number.name}:\n{log}"
        return "killed"
    if codes == [EXIT_RESUME, EXIT_RESUME]:
        assert "checkpoint saved in" in log, log
        return "saved"
    # Before its first safe point a run has nothing to save and ends at once; after its last step it just ends.
    at_once = {128 + number, -number, 1}
    assert set(codes) <= at_once or codes == [0, 0], f"exit codes {codes} after {number.name}:\n{log}"
    return "ended" if codes == [0, 0] else "at once"


def kill_and_resume(job: Job, pace: Pace, dice: random.Random, kills: int) -> int:
    """Go on with the run, killing it at most `kills` times, until it has ended; how often it was killed."""
    for count in range(kills + 1):
        running = job.start()
        if count < kills:
            kind = kill_somewhere(running, pace, dice)
            after_s = time.monotonic() - running.start
            codes = wait(running)
            if kind is not None and codes != [0, 0]:
                how = check_codes(running, codes, kind[0])
                say(f"  {kind[0].name} on {kind[1]} after {after_s:.1f} s, after {_place(running)}: {how}")
                continue
        else:
            codes = wait(running)
        assert codes == [0, 0], f"the resumed run failed with {codes}:\n{running.log.read_text()}"
        return count
    raise AssertionError("unreachable: the last run is not killed")


def _is_alive(running: Running) -> bool:
    return any(process.poll() is None for process in running.processes)


def _steps(running: Running) -> list[str]:
    """The finished steps that the log speaks of."""
    lines = running.log.read_text().splitlines()
    return [line.split("|")[0].strip() for line in lines if line.startswith("step ") and " | reward " in line]


def _place(running: Running) -> str:
    return (_steps(running) or ["no step"])[-1]


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if found[name] == value:
            continue
        where = ""
        if isinstance(value, list):
            pairs = zip(found[name], value, strict=False)
            different = next((pair for pair in pairs if pair[0] != pair[1]), (len(found[name]), len(value)))
            where = f": {different[0]}\ninstead of {different[1]}"
        raise AssertionError(f"{name} of the run that was killed are not those of the one that was not{where}")


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Kill and resume a run, and compare it with one that nobody touched.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the moments and kinds of kills")
    parser.add_argument("--engine", choices=("hf", "vllm"), default="hf")
    parser.add_argument("--zero_stage", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="left out: a temporary one, which is removed when all holds")
    args = parser.parse_args(arguments)
    dice = random.Random(args.seed)
    with tempfile.TemporaryDirectory(prefix="kill-test-") as temporary:
        folder = args.folder or Path(temporary)
        inputs = write_inputs(folder / "inputs", reward=REWARD, arch="qwen2")

        def job(name: str) -> Job:
            return Job(inputs, folder / name, args.engine, args.zero_stage)

        expected, pace = run_through(job("untouched"))
        times = f"{pace.meet_s:.1f} + {pace.start_s:.1f} s to the first, {pace.step_s:.1f} s each"
        say(f"untouched: {len(expected['metrics'])} steps, {times}")
        done, lives = 0, Counter[str]()
        while done < args.kills:
            killed = job(f"run{lives['runs']}")
            count = kill_and_resume(killed, pace, dice, args.kills - done)
            compare(killed.outcome(), expected)
            done, lives = done + count, lives + Counter(runs=1)
            say(f"run {lives['runs']}: the same after {count} kills, {done} of {args.kills} in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
