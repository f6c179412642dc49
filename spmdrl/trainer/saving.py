"""When a run is saved, and how it comes back: the same for every trainer."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

from spmdrl.config import CheckpointConfig
from spmdrl.config.resume import judges_otherwise
from spmdrl.distributed import comm, guard
from spmdrl.distributed.preemption import Preempted
from spmdrl.errors import UserError
from spmdrl.trainer.anomalies import AnomalyStop
from spmdrl.trainer.checkpoint import Checkpoint, Checkpointer, Shards
from spmdrl.trainer.checkpoint_folder import FINISHED
from spmdrl.trainer.directory_lock import held
from spmdrl.trainer.run_state import rng_state, set_rng_state


class Run(Protocol):
    """A trainer, as far as saving it goes."""

    step: int  # the last one that is finished

    @property
    def updates(self) -> int | None:
        """Optimizer steps since then, on samples that are to be kept; None where there are no such samples."""
        ...

    def shards(self) -> Mapping[str, Shards]:
        """What the ranks hold in parts, by name."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The rest, as JSON and tensors that no longer change; the same on every rank, and small."""
        ...

    def work_state(self) -> tuple[Any, Any]:
        """What the step that is not finished needs beside that, and what of it is this rank's own."""
        ...

    def load_state_dict(self, state: dict[str, Any], work: Any, work_of_ranks: list[Any]) -> None:
        """Take over what those returned, the last of every rank that saved."""
        ...

    def export(self, folder: Path, flag: str) -> None:
        """Write the model in Hugging Face form; `flag` is for messages."""
        ...


class Trains(Protocol):
    def fit(self) -> None: ...


class RunFinished(Exception):
    """Raised on every rank where --load_checkpoint is asked to go on with a run that came to its end."""


def fit(build: Callable[[], Trains], save_path: str) -> None:
    """Build a trainer and let it train, if there is anything left to do; it is alone in `save_path` meanwhile."""
    with _alone_in(Path(save_path).expanduser().absolute()):
        try:
            trainer = build()
        except RunFinished as finished:
            comm.say(str(finished))
        else:
            trainer.fit()


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Every rank comes and goes at the same time. Raises UserError on all where another run is using the folder."""
    with ExitStack() as stack:
        problem = None
        if comm.is_main():
            try:
                stack.enter_context(held(folder, "save_path", comm.say))
            except UserError as error:
                problem = str(error)
        if problem := comm.all_gather_object(problem)[0]:
            raise UserError(problem)
        yield


class Saver:
    """Saves a run in --ckpt_path and brings it back. Every rank calls every method, at the same time.

    A trainer calls `settle` wherever its state is one that a run can go on from: after each optimizer step and each
    rollout. Whatever happens later, what is saved is the state that was settled last.
    """

    def __init__(self, run: Run, config: CheckpointConfig, description: dict[str, Any], *, keeps_best: bool = False):
        """Looks for the checkpoint that --load_checkpoint asks for; `restore` loads it once the models are built.

        keeps_best: `keep_best` will be called. Raises RunFinished, and UserError where --ckpt_path is in use.
        """
        self.run, self.config = run, config
        self.checkpointer = Checkpointer(config, description)
        if config.load_checkpoint or config.save_steps > 0 or keeps_best:
            self.checkpointer.claim()
        if (model := self.checkpointer.finished()) is not None:
            again = f"to train it again, leave --load_checkpoint out or remove {self.checkpointer.root / FINISHED}"
            raise RunFinished(f"this run is finished, its model is in {model}; {again}")
        self.resumed = self.checkpointer.find()
        self.checkpoints_of_best = self.checkpointer.for_best()
        self.best = -math.inf
        self._settled: tuple[dict[str, Any], dict[str, Any]] = {}, {}
        self._saved: tuple[str, Path | None] = "", None  # name of the last whole state, and where it is

    @property
    def resume_step(self) -> int | None:
        """The last step that the checkpoint has finished, -1 where not even the first one's rollout is; None for a run
        from the beginning."""
        if self.resumed is None:
            return None
        state = self.resumed.state
        return -1 if state["step"] == 0 and state["work"] is None else state["step"]

    # ---- coming back --------------------------------------------------------------------------------------------
    def restore(self) -> None:
        """Bring the run to where the checkpoint was that was found, if one was."""
        if self.resumed is not None:
            self._load(self.resumed)
            if judges_otherwise(self.resumed.manifest.description, self.checkpointer.description):
                self.best = -math.inf
            self._saved = self.resumed.manifest.name, self.resumed.folder
            self.resumed = None
        self.settle()

    def roll_back(self) -> bool:
        """Bring the run back to its newest checkpoint; False where it has none."""
        self.finish()
        checkpoint, best = self.checkpointer.newest(self.checkpointer.run), self.best
        if checkpoint is not None:
            self._load(checkpoint)
            self.best = max(best, self.best)  # the model that has it is still there
            self.settle()
        return checkpoint is not None

    def _load(self, checkpoint: Checkpoint) -> None:
        guard.set_phase("load_checkpoint")
        self._saved = "", None
        state, of_rank = checkpoint.state, checkpoint.of_this_rank()
        checkpoint.load(self.run.shards())
        self.run.load_state_dict(state["run"], state["work"], [own["work"] for own in checkpoint.of_ranks])
        self.best = state["best"]
        if of_rank is not None:
            set_rng_state(of_rank["rng"])

    # ---- saving -------------------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Note the state as one that the run can go on from."""
        state = {"step": self.run.step, "best": self.best, "run": self.run.state_dict()}
        self._settled = state, {"rng": rng_state()}

    def save_if_due(self) -> None:
        """After a step, begin the save that --save_steps asks for; nothing may be trained until `finish`."""
        every = self.config.save_steps
        if every > 0 and self.run.step % every == 0:
            self._begin(whole=not self.config.disable_ds_ckpt)

    def finish(self) -> None:
        """Complete the save that is under way. Raises UserError on every rank if it failed."""
        name, path = self._saved
        self._saved = name, self.checkpointer.finish() or path

    def save_state(self) -> Path:
        """Save the state that was settled last, if that is not done yet; its directory."""
        if self._saved[0] != self._name():
            self._begin(whole=True, with_export=False)
        self.finish()
        path = self._saved[1]
        assert path is not None
        return path

    def finish_run(self, model: Path) -> None:
        """The run came to its end and left its model in that directory: --load_checkpoint will not train it again."""
        self.checkpointer.mark_finished(model)

    def _begin(self, *, whole: bool, with_export: bool = True) -> None:
        self.finish()
        state, of_rank = self._settled
        work, work_of_rank = self.run.work_state()
        wanted = with_export and (self.config.save_hf_ckpt or self.config.disable_ds_ckpt)
        self.checkpointer.save(
            self._name(),
            self.run.shards() if whole else {},
            {**state, "work": work},
            {**of_rank, "work": work_of_rank},
            export=self._export if wanted else None,
        )
        self._saved = self._name() if whole else "", None

    def _export(self, folder: Path) -> None:
        self.run.export(folder, "--ckpt_path")

    def _name(self) -> str:
        if self.run.updates is not None:
            return f"step_{self.run.step + 1:06d}_update_{self.run.updates:06d}"
        return f"step_{self.run.step:06d}"

    def keep_best(self, step: int, metric: float) -> None:
        """Of all models that this is called for, keep the one with the highest `metric` in --ckpt_path/best."""
        if metric > self.best:
            self.best = metric
            self.checkpoints_of_best.save(f"step_{step:06d}", {}, {"metric": metric}, {}, export=self._export)
            self.checkpoints_of_best.finish()

    @contextmanager
    def saved_when_stopped(self) -> Iterator[None]:
        """If the run is asked to stop in this block, or stops itself for an anomaly, its state is saved."""
        try:
            yield
        except Preempted as stopped:
            guard.set_phase("save")
            stopped.saved_in = str(self.save_state())
            stopped.resume = self._saved_beside() or stopped.resume
            raise
        except AnomalyStop as stopped:
            guard.set_phase("save")
            line = f"{stopped}; checkpoint saved in {self.save_state()}"
            beside = self._saved_beside()
            raise AnomalyStop(f"{line}; {beside}" if beside else line) from stopped

    @contextmanager
    def saved_when_refused(self) -> Iterator[None]:
        """If the trained model cannot be written in this block, which all ranks hear of, the run's state is saved."""
        try:
            yield
        except UserError as refusal:
            guard.set_phase("save")
            try:
                state = self.save_state()
                saved = f"checkpoint saved in {state}: the same command with --load_checkpoint writes it again"
            except UserError as error:
                saved = str(error)
            raise UserError(f"{refusal}; {saved}") from refusal

    def _saved_beside(self) -> str | None:
        """What to do with a checkpoint that was saved in another run's directory."""
        if (holder := self.checkpointer.holder) is None:
            return None
        return (
            f"another run ({holder}) is using --ckpt_path: move that checkpoint into a directory of its own and start "
            "the same command with --load_checkpoint and this directory as --ckpt_path"
        )
