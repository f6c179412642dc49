"""Train a tiny model for many steps, with saving, evaluation and logging, and see that nothing grows.

    python tests/soak.py --steps 300 [--engine vllm] [--zero_stage 3]

Prints memory, open files, threads and seconds a step as it goes. Exits with 1 if the last tenth of the run has more of
anything than the tenth after the middle, beyond what noise explains.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


@dataclass(frozen=True)
class Reading:
    """What the process holds after a step."""

    rss_mb: float
    num_files: int
    num_threads: int
    num_checkpoints: int
    seconds: float
    cpu_seconds: float

    @classmethod
    def take(cls, seconds: float, cpu_seconds: float, checkpoints: Path) -> "Reading":
        resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            rss_mb=resident_pages * os.sysconf("SC_PAGE_SIZE") / 2**20,
            num_files=len(os.listdir("/proc/self/fd")),
            num_threads=len(os.listdir("/proc/self/task")),
            num_checkpoints=len(list(checkpoints.glob("step_*"))),
            seconds=seconds,
            cpu_seconds=cpu_seconds,
        )


def growth(readings: list[Reading]) -> tuple[dict[str, tuple[float, float, float]], list[str]]:
    """(after the middle, at the end, what is allowed at the end) of each quantity; the names of those that grew.

    Seconds are compared by their quickest quarter, and those on the clock loosely: other programs take them too.
    """
    tenth = max(len(readings) // 10, 1)
    middle, end = readings[len(readings) // 2 :][:tenth], readings[-tenth:]
    compared = {}
    for name in Reading.__dataclass_fields__:
        before, after = ([float(getattr(r, name)) for r in part] for part in (middle, end))
        if name.endswith("seconds"):
            before, after = ([quantiles(part, n=4)[0]] if len(part) > 1 else part for part in (before, after))
        start = median(before)
        limits = {"rss_mb": start * 1.02 + 10, "seconds": start * 3 + 0.1, "cpu_seconds": start * 1.3 + 0.05}
        allowed = limits.get(name, start + 1)
        compared[name] = start, median(after), allowed
    return compared, [name for name, (_, after, allowed) in compared.items() if after > allowed]


def flags(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Saving every 10 steps, evaluation every 5, two optimizer steps a rollout, a critic and a reference model."""
    from tests.tiny import write_jsonl
    from tests.trainer.runs import write_inputs

    inputs = write_inputs(folder / "in", num_prompts=16)
    held_out = write_jsonl(
        folder / "held_out.jsonl", [{"question": f"{i}?", "answer": i, "number": i} for i in range(4)]
    )
    steps_an_episode = 16 // 4
    return inputs | {
        "engine": args.engine,
        "zero_stage": args.zero_stage,
        "advantage_estimator": "gae",
        "train_batch_size": 4,
        "lr_scheduler": "constant",
        "actor_learning_rate": 1e-6,
        "num_episodes": -(-args.steps // steps_an_episode),
        "save_steps": 10,
        "max_ckpt_num": 2,
        "ckpt_path": folder / "ckpt",
        "eval_steps": 5,
        "eval_dataset": held_out,
        "eval_n_samples_per_prompt": 2,
        "on_anomaly": "warn",
        **({"vllm_kv_cache_gb": 1, "enforce_eager": True} if args.engine == "vllm" else {}),
    }


def soak(folder: Path, args: argparse.Namespace) -> list[Reading]:
    from spmdrl.distributed import comm
    from spmdrl.trainer.ppo_trainer import PPOTrainer
    from tests.trainer.runs import config_of

    readings: list[Reading] = []

    class MeasuredTrainer(PPOTrainer):
        def finish_step(self, *step_args: Any) -> None:
            super().finish_step(*step_args)
            clock, cpu = self.started
            self.started = time.perf_counter(), time.process_time()
            readings.append(Reading.take(self.started[0] - clock, self.started[1] - cpu, folder / "ckpt"))
            if len(readings) % max(args.steps // 20, 1) == 0:
                report(f"step {len(readings)}", asdict(readings[-1]))

    comm.init()
    trainer = MeasuredTrainer(config_of(folder / "out", **flags(folder, args)))
    trainer.started = time.perf_counter(), time.process_time()
    trainer.fit()
    return readings


def report(what: str, numbers: dict[str, Any]) -> None:
    shown = ", ".join(
        f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in numbers.items()
    )
    sys.stderr.write(f"soak: {what}: {shown}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--engine", choices=["hf", "vllm"], default="hf")
    parser.add_argument("--zero_stage", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the readings of every step")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        readings = soak(Path(folder), args)
    if args.json:
        args.json.write_text(json.dumps([asdict(reading) for reading in readings]))
    compared, grown = growth(readings)
    for name, (middle, end, allowed) in compared.items():
        report(name, {"after the middle": middle, "at the end": end, "allowed": allowed})
    report("result", {"steps": len(readings), "grown": " ".join(grown) or "nothing"})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if grown else 0)  # the libraries' exit handlers are not what is tested


if __name__ == "__main__":
    main()
