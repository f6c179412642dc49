"""What the bench scripts share: running a program to its end, the memory it takes, and the result as JSON."""

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
MODEL = "runs/models/SmolLM2-135M-Instruct"


def torchrun(ranks: int, *words: str) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks), *words]


def run(command: list[str], threads: int) -> float:
    """Run to the end; the most memory that its processes held together, in GB."""
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    peak, over = [0.0], threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            peak[0] = max(peak[0], _resident_gb(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    out, _ = process.communicate()
    over.set()
    watcher.join()
    if process.returncode:
        sys.exit(f"{' '.join(command)}\nended with {process.returncode}:\n{out[-4000:]}")
    return round(peak[0], 2)


def _resident_gb(pid: int) -> float:
    """Resident memory of a process and all that came from it; what they share is counted once for each."""
    total = 0
    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                total += process.memory_info().rss
    return total / 1e9


def metrics(folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_model(path: str) -> None:
    if not Path(path).is_dir():
        sys.exit(f"--model {path} is no directory: python examples/prepare_smollm2.py {path}")


def conditions(args: argparse.Namespace, *names: str) -> dict:
    """Where and with which flags a figure was taken."""
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    return machine | {name: str(getattr(args, name)) for name in names}


def report(result: dict, out: Path) -> None:
    """Print it, and append it to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    print(json.dumps(result, indent=2))
