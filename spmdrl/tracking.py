"""Where numbers go: console, metrics.jsonl, samples.jsonl, W&B, TensorBoard, a PNG of the curves; and the phase timer.

`python -m spmdrl.tracking RUN_DIR [RUN_DIR ...]` draws runs beside one another and says how far their reward rose.
"""

import argparse
import gc
import importlib.util
import itertools
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from spmdrl.config import TrackingConfig
from spmdrl.errors import UserError

METRICS, SAMPLES, PLOT, STATE = "metrics.jsonl", "samples.jsonl", "metrics.png", "tracking.json"
EVAL_SAMPLES = "eval_samples.jsonl"
LOGS = (METRICS, SAMPLES, EVAL_SAMPLES)
PLOTTED = {  # what a run does not have is left out
    "rollout/reward": "reward",
    "policy/kl": "KL to the reference",
    "rollout/response_length": "response length",
    "train/loss": "loss",
    "train/accuracy": "accuracy",
    "eval/loss": "held-out loss",
    "eval/accuracy": "held-out accuracy",
}
HEADLINES = {"rollout/reward": "reward", "train/loss": "loss"}
PLOT_EVERY_S = 120.0
BAR_EVERY_S = 15.0  # in a log file; a terminal's bar moves all the time

CONSOLE = (  # label, metric, format; a metric the step does not have is left out
    ("reward", "rollout/reward", "{:.3f}"),
    ("±", "rollout/reward_std", "{:.3f}"),
    ("kl", "policy/kl", "{:.4f}"),
    ("length", "rollout/response_length", "{:.1f}"),
    ("truncated", "rollout/truncated", "{:.0%}"),
    ("loss", "policy/loss", "{:.4f}"),
    ("grad", "policy/grad_norm", "{:.2f}"),
    ("lr", "policy/lr", "{:.1e}"),
    ("loss", "train/loss", "{:.4f}"),
    ("accuracy", "train/accuracy", "{:.3f}"),
    ("margin", "train/margin", "{:.3f}"),
    ("grad", "train/grad_norm", "{:.2f}"),
    ("lr", "train/lr", "{:.1e}"),
)


class Progress:
    """What a phase yields: counts into its bar, and knows how long the phase took, nested ones included."""

    def __init__(self, bar: Any = None):
        self._bar, self._start, self._end = bar, time.perf_counter(), None

    def update(self, n: int = 1) -> None:
        if self._bar is not None:
            self._bar.update(n)

    @property
    def seconds(self) -> float:
        return (self._end or time.perf_counter()) - self._start

    def close(self) -> None:
        self._end = time.perf_counter()
        if self._bar is not None:
            self._bar.close()


class PhaseClock:
    """Seconds by phase since the last step. A phase is timed without those inside it: all add up to the step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._mark = 0.0
        self._step_start: float | None = None

    def enter(self, name: str) -> None:
        self._charge()
        self._open.append(name)
        self._step_start = self._mark if self._step_start is None else self._step_start

    def leave(self) -> None:
        self._charge()
        self._open.pop()

    def take(self) -> dict[str, float]:
        """The step's times: each phase, `other` for what was in none, and the whole `step`. Starts the next step."""
        self._charge()
        step = self._mark - (self._mark if self._step_start is None else self._step_start)
        times = {**self.seconds, "other": max(step - sum(self.seconds.values()), 0.0), "step": step}
        self.seconds, self._step_start = {}, self._mark
        return {f"time/{name}_s": seconds for name, seconds in times.items()}

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] = self.seconds.get(self._open[-1], 0.0) + now - self._mark
        self._mark = now


class Tracker:
    """All output of a run. Off rank 0 it times phases and writes nothing."""

    def __init__(
        self,
        config: TrackingConfig,
        *,
        save_path: str,
        run_config: dict[str, Any],
        is_main: bool,
        total_steps: int,
        resume_step: int | None = None,
        program: str = "ppo",
    ):
        """`resume_step`: the last step of the checkpoint that this run continues; later rows are dropped. With -1 also
        those of step 0.
        `program` and the date are the name of a run that has none."""
        self.config, self.total_steps, self.is_main = config, total_steps, is_main
        self.clock = PhaseClock()
        self.last_step = {"train": resume_step or 0, "eval": -1 if resume_step is None else resume_step}
        self.sinks: list[Any] = []
        if not is_main:
            return
        self.folder = Path(save_path).expanduser().absolute()
        with self._writing():
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in LOGS:
                open_log(self.folder / name, resume_step)
        state = read_state(self.folder) if resume_step is not None else {}
        state.setdefault("run_name", config.wandb_run_name or f"{program}_{datetime.now():%m%dT%H%M%S}")
        if config.use_wandb:
            self.sinks.append(WandbSink(config, run_config, self.folder, state))
        if config.use_tensorboard:
            self.sinks.append(TensorBoardSink(Path(config.use_tensorboard) / state["run_name"], resume_step))
        with self._writing():
            write_state(self.folder, state)
        self.plotted_at = time.monotonic()
        self.can_plot = importlib.util.find_spec("matplotlib") is not None
        if not self.can_plot:
            say(f"matplotlib is not installed: there will be no {PLOT} (pip install matplotlib)")

    @contextmanager
    def phase(self, name: str, total: int | None = None) -> Iterator[Progress]:
        """Time a part of the step as time/{name}_s; with a bar on rank 0 where `total` says how much there is."""
        progress = Progress(make_bar(name, total) if self.is_main and total else None)
        self.clock.enter(name)
        try:
            yield progress
        finally:
            self.clock.leave()
            progress.close()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """One step's metrics, with its times. A call with eval/ metrics only is an evaluation and has its own axis."""
        kind = "eval" if metrics and all(name.startswith("eval/") for name in metrics) else "train"
        assert step > self.last_step[kind], f"{kind} step {step} logged after {kind} step {self.last_step[kind]}"
        self.last_step[kind] = step
        numbers = {name: float(value) for name, value in metrics.items()}
        if kind == "train":
            numbers |= self.clock.take()
            numbers |= {name: value for name, value in speeds(numbers).items() if name not in numbers}
        if not self.is_main:
            return
        with self._writing():
            append(self.folder / METRICS, [{"step": step, **numbers}])
        if kind == "eval" or step % self.config.logging_steps == 0 or step == self.total_steps:
            say(console_line(numbers, step, self.total_steps))
            for sink in self.sinks:
                sink.log(numbers, step, kind)
        if time.monotonic() - self.plotted_at > PLOT_EVERY_S:
            self._plot()

    def log_samples(self, rows: Sequence[dict[str, Any]], step: int, name: str = SAMPLES) -> None:
        if self.is_main:
            with self._writing():
                append(self.folder / name, [{"step": step, **row} for row in rows])

    def rewind(self, step: int) -> None:
        """The run has gone back to the end of `step`: drop the rows of what came after it."""
        self.last_step = {"train": step, "eval": step}
        if self.is_main:
            with self._writing():
                for name in LOGS:
                    open_log(self.folder / name, step)

    def close(self) -> None:
        if not self.is_main:
            return
        self._plot()
        for sink in self.sinks:
            sink.close()
        self.sinks = []

    def _plot(self) -> None:
        if self.can_plot:
            with self._writing():
                plot_runs([self.folder], self.folder / PLOT)
            gc.collect()  # a figure is a cycle of several MB, which ordinary collections leave for an hour
        self.plotted_at = time.monotonic()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A disk that refuses is one line."""
        try:
            yield
        except OSError as error:
            where = error.filename or "there"
            raise UserError(f"--save_path {self.folder}: cannot write {where}: {error.strerror or error}") from error


# ---- files ----------------------------------------------------------------------------------------------------------
def open_log(path: Path, resume_step: int | None) -> None:
    """A fresh file, an earlier run's set aside; or, when resuming, the file without what came after `resume_step`.

    A file with damaged lines is set aside too, and what is whole of it is kept.
    """
    partial = path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)  # of a run that was killed here
    if not path.exists():
        return
    if resume_step is None:
        if path.stat().st_size:
            path.rename(_aside(path))
        return
    rows, num_damaged = read_log(path)
    partial.write_text("", encoding="utf-8")
    append(partial, [row for row in rows if row["step"] <= resume_step])
    if num_damaged:
        aside = _aside(path)
        shutil.copyfile(path, aside)
        say(f"{damage_line(path, num_damaged)}; the file as it was is {aside}")
    partial.replace(path)


def _aside(path: Path) -> Path:
    """Where a file goes whose place is needed: its name with a number that is free."""
    names = (path.with_stem(f"{path.stem}.{number}") for number in itertools.count(1))
    return next(name for name in names if not os.path.lexists(name))


def damage_line(path: Path, num_damaged: int) -> str:
    return f"{path}: {num_damaged} damaged line{'s' * (num_damaged > 1)} left out"


def append(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Add JSON lines. A lone surrogate, which UTF-8 cannot hold, is written as its JSON escape."""
    lines = [json.dumps(jsonable(row), ensure_ascii=False, allow_nan=False) + "\n" for row in rows]
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write("".join(lines))


def jsonable(value: Any) -> Any:
    """What JSON can hold: null for NaN and infinities, lists for tensors, text for anything it has no form for."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, bool, int)) else str(value)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a log that are whole."""
    return read_log(path)[0]


def read_log(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The rows of a log, and how many lines are damaged; a last line that a killed process left unfinished is neither
    a row nor damaged."""
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    rows = [row for line in lines if (row := _row(line)) is not None]
    return rows, len(lines) - len(rows)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and _number(row, "step") is not None else None


def _number(row: dict[str, Any], name: str) -> float | None:
    """None where the row has none of that name, also where somebody has put something else in its place."""
    value = row.get(name)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def read_state(folder: Path) -> dict[str, Any]:
    """The run's name and W&B id, for the run that resumes it; nothing where the file is damaged."""
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def write_state(folder: Path, state: dict[str, Any]) -> None:
    partial = folder / f"{STATE}.partial"
    partial.write_text(json.dumps(state) + "\n", encoding="utf-8")
    partial.replace(folder / STATE)


# ---- console --------------------------------------------------------------------------------------------------------
def make_bar(name: str, total: int) -> Any:
    """A progress bar on stderr that leaves nothing behind; in a log file it appears only when a phase takes long."""
    every = 0.1 if sys.stderr.isatty() else BAR_EVERY_S
    return tqdm(
        total=total, desc=name, leave=False, dynamic_ncols=True, mininterval=every, delay=every if every > 1 else 0
    )


def say(line: str) -> None:
    """Write a line to stdout without tearing a progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def console_line(metrics: dict[str, float], step: int, total_steps: int) -> str:
    found = [(label, style.format(metrics[name])) for label, name, style in CONSOLE if name in metrics]
    parts = [f"step {step}/{total_steps}"]
    for label, text in found:
        if label == "±":
            parts[-1] += f" ±{text}"
        else:
            parts.append(f"{label} {text}")
    parts += [f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("eval/")]
    return " | ".join([*parts, *_times(metrics)])


def _times(metrics: dict[str, float]) -> list[str]:
    """ "7.4 s (812 tok/s)", then "generate 2.1 s (1450 tok/s), ...", longest first, without what takes under 1%."""
    if "time/step_s" not in metrics:
        return []
    phases = {name[5:-2]: s for name, s in metrics.items() if name.startswith("time/") and name != "time/step_s"}
    step_s = metrics["time/step_s"]
    listed = [
        f"{name} {seconds:.1f} s{_speed(metrics, f'perf/{name}_tokens_per_s')}"
        for name, seconds in sorted(phases.items(), key=lambda item: -item[1])
        if seconds >= 0.01 * step_s
    ]
    return [f"{step_s:.1f} s{_speed(metrics, 'perf/tokens_per_s')}", ", ".join(listed)]


def _speed(metrics: dict[str, float], name: str) -> str:
    return f" ({metrics[name]:.0f} tok/s)" if name in metrics else ""


def speeds(metrics: dict[str, float]) -> dict[str, float]:
    """Sampled tokens of all ranks a second: generating, training, and over the whole step."""
    phases = {"generate_": "time/generate_s", "train_": "time/train_s", "": "time/step_s"}
    return {
        f"perf/{prefix}tokens_per_s": metrics["rollout/num_tokens"] / metrics[name]
        for prefix, name in phases.items()
        if "rollout/num_tokens" in metrics and metrics.get(name, 0.0) > 0
    }


# ---- W&B and TensorBoard, imported only when asked for --------------------------------------------------------------
class WandbSink:
    """Weights & Biases. `--use_wandb` holds an API key, "offline", or True/1 where a key is configured already."""

    def __init__(self, config: TrackingConfig, run_config: dict[str, Any], folder: Path, state: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise UserError("--use_wandb: wandb is not installed: pip install wandb") from None
        value = str(config.use_wandb)
        key = None if value.lower() in ("true", "1", "offline") else value
        if key is not None:
            os.environ["WANDB_API_KEY"] = key  # wandb.login would write it to ~/.netrc
        with hidden_in_argv(key):
            try:
                self.run = wandb.init(
                    entity=config.wandb_org,
                    project=config.wandb_project,
                    group=config.wandb_group,
                    name=state["run_name"],
                    config={name: v for name, v in run_config.items() if key is None or v != key},
                    dir=os.environ.get("WANDB_DIR", str(folder)),
                    mode="offline" if value.lower() == "offline" else None,
                    id=state.get("wandb_id"),
                    resume="allow" if "wandb_id" in state else None,
                )
            except wandb.Error as error:
                text = " ".join(str(error).replace(key or "\n", "***").split())
                raise UserError(f"--use_wandb: {text} (--use_wandb offline needs neither key nor network)") from None
        state["wandb_id"] = self.run.id
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("eval/step")
        self.run.define_metric("eval/*", step_metric="eval/step")

    def log(self, metrics: dict[str, float], step: int, kind: str) -> None:
        self.run.log({**metrics, "eval/step" if kind == "eval" else "step": step})

    def close(self) -> None:
        self.run.finish()


@contextmanager
def hidden_in_argv(secret: str | None) -> Iterator[None]:
    """W&B records the command line: keep a secret out of it meanwhile."""
    original = list(sys.argv)
    if secret:
        sys.argv[:] = [word.replace(secret, "***") for word in original]
    try:
        yield
    finally:
        sys.argv[:] = original


class TensorBoardSink:
    def __init__(self, folder: Path, resume_step: int | None):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("--use_tensorboard: tensorboard is not installed: pip install tensorboard") from None
        self.writer = SummaryWriter(str(folder), purge_step=None if resume_step is None else resume_step + 1)

    def log(self, metrics: dict[str, float], step: int, kind: str) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


# ---- curves ---------------------------------------------------------------------------------------------------------
def plot_runs(folders: Sequence[Path], out: Path) -> None:
    """What is PLOTTED over steps, one line a run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    runs = {str(folder): read_rows(folder / METRICS) for folder in folders}
    figure = Figure(figsize=(7, 8), layout="constrained")
    FigureCanvasAgg(figure)
    names = [name for name in PLOTTED if any(_number(row, name) is not None for rows in runs.values() for row in rows)]
    axes = figure.subplots(max(len(names), 1), 1, sharex=True, squeeze=False)[:, 0]
    for axis, name in zip(axes, names, strict=False):
        for label, rows in runs.items():
            points = [(row["step"], row[name]) for row in rows if _number(row, name) is not None]
            axis.plot([x for x, _ in points], [y for _, y in points], marker=".", label=label)
        axis.set_ylabel(PLOTTED[name])
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    axes[-1].xaxis.get_major_locator().set_params(integer=True)
    if len(runs) > 1:
        axes[0].legend()
    partial = out.with_name(f".{out.name}.partial")
    figure.savefig(partial, dpi=110, format="png")
    partial.replace(out)


def summary_line(folder: Path) -> str:
    """First and last five steps of a run's reward, or of its loss, and how long it took."""
    rows = read_rows(folder / METRICS)
    name = next((name for name in HEADLINES if any(_number(row, name) is not None for row in rows)), None)
    if name is None:
        return f"{folder}: no rewards in {METRICS}"
    rows = [row for row in rows if _number(row, name) is not None]
    values = [row[name] for row in rows]
    first, last = (sum(part) / len(part) for part in (values[:5], values[-5:]))
    minutes = sum(_number(row, "time/step_s") or 0.0 for row in rows) / 60
    change = f"{HEADLINES[name]} {first:.3f} → {last:.3f} ({last - first:+.3f})"
    return f"{folder}: {len(rows)} steps in {minutes:.1f} min, {change}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m spmdrl.tracking", description="Compare runs by their curves.")
    parser.add_argument("run_dir", nargs="+", type=Path, help="--save_path of a run")
    parser.add_argument(
        "--out", type=Path, help="PNG to write; left out: RUN_DIR/metrics.png, or runs.png for several"
    )
    args = parser.parse_args(arguments)
    for folder in args.run_dir:
        if not (folder / METRICS).is_file():
            sys.exit(f"{folder} has no {METRICS}")
        if num_damaged := read_log(folder / METRICS)[1]:
            say(damage_line(folder / METRICS, num_damaged))
        say(summary_line(folder))
    out = args.out or (args.run_dir[0] / PLOT if len(args.run_dir) == 1 else Path("runs.png"))
    try:
        plot_runs(args.run_dir, out)
    except ImportError:
        sys.exit("matplotlib is not installed: pip install matplotlib")
    say(str(out))


if __name__ == "__main__":
    main()
