"""Checkpoints: everything a run needs to go on, whole or absent whenever the process is killed.

All ranks write to a directory of its own, read back what they wrote and compare checksums; then the main rank makes it
a checkpoint (checkpoint_folder.py). It holds safetensors and JSON, nothing that is executed when it is read.
"""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from spmdrl.config import CheckpointConfig
from spmdrl.config.resume import asks_for_more, compare
from spmdrl.distributed import comm
from spmdrl.distributed.engine_state import Fragment, Read
from spmdrl.errors import UserError
from spmdrl.trainer import checkpoint_folder as folders
from spmdrl.trainer.checkpoint_folder import BEST, Manifest
from spmdrl.trainer.directory_lock import LOCK, DirectoryLock, in_use
from spmdrl.trainer.fingerprints import fingerprint_of_weights
from spmdrl.trainer.tensor_file import (
    STARTS,
    RangeReader,
    Written,
    pack,
    read_tensors,
    unpack,
    write_file,
    write_tensors,
)

STATE, TENSORS, EXPORT = "state.json", "state.safetensors", "hf"
SAID = 20  # directories that are passed over, by name


class Shards(Protocol):
    """What ranks hold in parts, such as an engine_state.EngineState."""

    def fragments(self) -> Sequence[Fragment]: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load(self, state: dict[str, Any], read: Read) -> None: ...


class Checkpoint:
    """One that was found whole. state: the same on every rank; of_ranks: each rank's own at the time."""

    def __init__(self, folder: Path, manifest: Manifest):
        self.folder, self.manifest = folder, manifest
        content = json.loads((folder / STATE).read_text(encoding="utf-8"))
        content = unpack(content, read_tensors(folder / TENSORS))
        self.state: dict[str, Any] = content["state"]
        self.of_ranks: list[dict[str, Any]] = content["ranks"]
        self._shards: dict[str, Any] = content["shards"]

    def of_this_rank(self) -> dict[str, Any] | None:
        """None for a rank of a number of ranks that did not save it."""
        return self.of_ranks[comm.rank()] if len(self.of_ranks) == comm.world_size() else None

    def load(self, shards: Mapping[str, Shards]) -> None:
        """Every rank reads what it owns of each. What was not there when it was saved stays as it is."""
        for name, part in shards.items():
            if name not in self._shards:
                comm.say(f"{self.folder} has no {name}: it starts from the beginning")
                continue
            reader = RangeReader(sorted(self.folder.glob(f"{name}.rank*.safetensors")))
            try:
                part.load(self._shards[name], lambda f, reader=reader: _read(reader, f))
            except ValueError as error:
                raise UserError(f"{self.folder}: its {name} is not this run's: {error}") from error


class Checkpointer:
    """The checkpoints of one run. Every rank calls every method, at the same time.

    description: flags and fingerprints of data and models, by which a resumed run is compared with the saved one.
    """

    def __init__(self, config: CheckpointConfig, description: dict[str, Any]):
        self.config, self.description = config, description
        mine = Path(config.ckpt_path).expanduser().absolute(), uuid.uuid4().hex
        self.root, self.run = comm.all_gather_object(mine)[0]  # ranks may have been started in different directories
        self.lock = DirectoryLock(self.root, comm.say)
        self.holder: str | None = None  # of the lock, where the last save was made without it
        self._beside: DirectoryLock | None = None  # of the directory that is then written to
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: tuple[Path, Manifest, Future[Any]] | None = None

    def for_best(self) -> "Checkpointer":
        """Keeps one, the best, apart from the others."""
        path = str(self.root / BEST)
        best = Checkpointer(replace(self.config, ckpt_path=path, max_ckpt_num=1), self.description)
        best.run, best.lock = self.run, self.lock
        return best

    def claim(self) -> None:
        """Keep other runs out of the directory from here on. Raises UserError where one is using it."""

        def take() -> str | None:
            self.root.mkdir(parents=True, exist_ok=True)
            return self.lock.take(wait=True)

        if holder := self._on_main(take):
            raise in_use("ckpt_path", self.root, holder)

    # ---- loading ------------------------------------------------------------------------------------------------
    def find(self) -> Checkpoint | None:
        """With --load_checkpoint the newest whole checkpoint; this run then goes on as the one that saved it.

        Raises UserError where it differs from that in a way that changes the result, and where checkpoints are there
        and all of them are damaged.
        """
        checkpoint = self.newest() if self.config.load_checkpoint else None
        if checkpoint is None:
            self._begin_afresh()
            return None
        self._check_changes(checkpoint.manifest)
        self.run = checkpoint.manifest.run
        self._say_removed(self._on_main(lambda: folders.clear_away(self.root)))
        comm.say(f"resuming from {checkpoint.folder}")
        return checkpoint

    def newest(self, run: str | None = None) -> Checkpoint | None:
        """The newest whole checkpoint of `run`, or of the run that saved last."""
        self.finish()
        candidates = self._candidates(run)
        for folder, manifest in candidates:
            problem = self._damage(folder, manifest)
            if problem is None:
                return Checkpoint(folder, manifest)
            comm.say(f"ignored: {folder}: {problem}")
        if candidates:
            raise UserError(f"no checkpoint in {self.root} is whole; restore one, or start without --load_checkpoint")
        return None

    def _candidates(self, run: str | None) -> list[folders.Found]:
        found, problems, refusal = [], [], None
        if comm.is_main():
            try:
                found, problems = folders.find(self.root, run)
            except (OSError, ValueError) as error:
                refusal = str(error)
        found, problems, refusal = comm.all_gather_object((found, problems, refusal))[0]
        for problem in problems[:SAID]:
            comm.say(f"ignored: {problem}")
        if len(problems) > SAID:
            comm.say(f"ignored: {len(problems) - SAID} more directories in {self.root}")
        if refusal:
            raise UserError(f"--load_checkpoint: {refusal}; restore it, or start without --load_checkpoint")
        return found

    def _damage(self, folder: Path, manifest: Manifest) -> str | None:
        """What is wrong with the files, of which each rank reads a part."""
        mine = sorted(manifest.files.items())[comm.rank() :: comm.world_size()]
        problem = next((p for name, file in mine if (p := _mismatch(folder / name, file))), None)
        return next((p for p in comm.all_gather_object(problem) if p), None)

    def _check_changes(self, saved: Manifest) -> None:
        try:
            refused, accepted = compare(saved.description, self.description)
        except (KeyError, TypeError, AttributeError):
            raise UserError(f"--load_checkpoint {self.root}: {saved.name} does not say what run it is of") from None
        if saved.world_size != comm.world_size():
            accepted.append(f"{saved.world_size} -> {comm.world_size()} ranks")
        if refused and not self.config.allow_config_change:
            raise UserError(
                f"--load_checkpoint {self.root}: what was saved there would go on differently: {'; '.join(refused)}. "
                f"Set that back, or go on all the same with --allow_config_change"
            )
        if refused or accepted:
            comm.say(f"changed since the checkpoint: {'; '.join(refused + accepted)}")

    def _begin_afresh(self) -> None:
        """Checkpoints of other runs stay, but `latest` names this one from now on."""
        if self.config.load_checkpoint:
            comm.say(f"--load_checkpoint: no checkpoint in {self.root}, starting from the beginning")
        self._say_removed(self._on_main(self._forget_others))

    def _forget_others(self) -> Sequence[Path]:
        """What was removed, of saves that were interrupted."""
        was_held = self.lock.is_held
        if not self.root.is_dir() or self.lock.take(wait=False) is not None:
            return []
        left = folders.clear_away(self.root) if self.lock.keeps_others_out else []
        folders.write_latest(self.root, self.run, None)
        if not self.config.load_checkpoint:
            folders.forget_finished(self.root)
        if not was_held:
            self.lock.release()
        return left

    def _say_removed(self, left: Sequence[Path]) -> None:
        for folder in left:
            comm.say(f"removed {folder}, left by an interrupted save")

    # ---- saving -------------------------------------------------------------------------------------------------
    def save(
        self,
        name: str,
        shards: Mapping[str, Shards],
        state: dict[str, Any],
        of_rank: dict[str, Any],
        *,
        export: Callable[[Path], None] | None = None,
    ) -> None:
        """Begin to save; nothing may be trained until `finish`, which completes it.

        shards: by name, written by all ranks; without any, nothing can go on from the checkpoint. state: the same on
        every rank; of_rank: this rank's own; both hold what JSON does, and tensors. export: a collective that fills
        a folder with a model.
        """
        self.finish()
        folder, self.holder = self._on_main(lambda: self._begin(name))
        if self.holder is not None:
            name = f"{name}-{self.run[:8]}"
        if export is not None:
            try:
                export(folder / EXPORT)
            except UserError:
                self._give_up(folder)
                raise
        ranks = comm.all_gather_object(of_rank)
        content = {"state": state, "ranks": ranks, "shards": {key: part.state_dict() for key, part in shards.items()}}
        parts = {key: _on_host(part.fragments()) for key, part in shards.items()}
        manifest = Manifest(name, self.run, time.time(), comm.world_size(), bool(shards), self.description, {})
        self._pending = folder, manifest, self._thread.submit(_write_own, folder, parts, content, comm.rank())

    def _begin(self, name: str) -> tuple[Path, str | None]:
        """Where to write, and who else has the directory: then the save keeps out of its way."""
        self.root.mkdir(parents=True, exist_ok=True)
        holder = self.lock.take(wait=False)
        folder = folders.begin(self.root, name, self.run, beside=holder is not None)
        if holder is not None:
            self._beside = DirectoryLock(folder, lambda line: None)
            self._beside.take(wait=False)
        return folder, holder

    def finish(self) -> Path | None:
        """Complete the save that is under way on all ranks; the checkpoint's directory, if there was one.

        Raises UserError on every rank if it failed on one; what was saved before is still there.
        """
        if self._pending is None:
            return None
        (folder, manifest, future), self._pending = self._pending, None
        written = comm.all_gather_object(future.result())
        problems = [f"rank {rank}: {part}" for rank, part in enumerate(written) if isinstance(part, str)]
        if problems:
            self._give_up(folder)
            raise UserError(f"--ckpt_path {self.root}: cannot save {manifest.name}: {problems[0]}")
        manifest = replace(manifest, files={name: file for part in written for name, file in part.items()})
        try:
            return self._on_main(lambda: self._publish(folder, manifest))
        except UserError:
            self._give_up(folder)  # which has another name by now if it was whole
            raise

    def _publish(self, folder: Path, manifest: Manifest) -> Path:
        limits = {"max_num": self.config.max_ckpt_num, "max_bytes": self.config.max_ckpt_mem * 10**9}
        final = folders.publish(self.root, folder, manifest, **limits, is_latest=self.holder is None)
        if self.holder is not None:
            (final / LOCK).unlink(missing_ok=True)
        self._beside = None
        return final

    def mark_finished(self, model: Path) -> None:
        """With --load_checkpoint, note that the run came to its end and left its model there."""
        if self.config.load_checkpoint and comm.is_main():
            try:
                self.root.mkdir(parents=True, exist_ok=True)
                folders.write_finished(self.root, self.description, model, fingerprint_of_weights(model))
            except OSError as error:  # the model is there all the same
                comm.say(f"--ckpt_path {self.root}: cannot note that the run is finished: {error}")

    def finished(self) -> Path | None:
        """With --load_checkpoint, where the model of a run is that had the same flags and came to its end."""
        model, line = self._on_main(self._finished) if self.config.load_checkpoint else (None, None)
        if line:
            comm.say(line)
        return model

    def _finished(self) -> tuple[Path | None, str | None]:
        """The model, or why the mark does not count."""
        mark = folders.read_finished(self.root)
        if not mark:
            return None, None
        try:
            changes, model = asks_for_more(mark["description"], self.description), Path(mark["model"])
        except (KeyError, TypeError, AttributeError):
            return None, f"ignored: {self.root / folders.FINISHED}: damaged"
        if changes:
            return None, f"ignored: {self.root / folders.FINISHED}: of a run with other flags: {'; '.join(changes)}"
        if not model.is_dir() or fingerprint_of_weights(model) != mark["fingerprint"]:
            return None, f"this run was finished, but its model is no longer in {model}"
        return model, None

    def _give_up(self, folder: Path) -> None:
        if comm.is_main():
            shutil.rmtree(folder, ignore_errors=True)  # a full disk needs the room

    def _on_main(self, action: Callable[[], Any]) -> Any:
        """What `action` returns on the main rank; a refusal of the disk there is a UserError on every rank."""
        result, problem = None, None
        if comm.is_main():
            try:
                result = action()
            except OSError as error:
                problem = str(error)
        result, problem = comm.all_gather_object((result, problem))[0]
        if problem:
            raise UserError(f"--ckpt_path {self.root}: cannot save a checkpoint: {problem}")
        return result


# ---- this rank's files ----------------------------------------------------------------------------------------------
def _on_host(fragments: Sequence[Fragment]) -> list[Fragment]:
    """This rank's share; what is in host memory is not copied."""
    return [replace(f, tensor=f.tensor.cpu()) for f in (fragment.to_save() for fragment in fragments)]


def _write_own(
    folder: Path, parts: Mapping[str, Sequence[Fragment]], content: dict[str, Any], rank: int
) -> dict[str, Written] | str:
    """In a thread: write this rank's files and read them back. Returns what was written, or what went wrong."""
    written: dict[str, Written] = {}
    try:
        for key, fragments in parts.items():
            name = f"{key}.rank{rank:05d}.safetensors"
            starts = json.dumps({f.name: f.start for f in fragments})
            written[name] = write_tensors(folder / name, {f.name: f.tensor for f in fragments}, {STARTS: starts})
        if rank == 0:
            written |= _write_shared(folder, content)
        problems = (_mismatch(folder / name, file) for name, file in written.items())
        return next((problem for problem in problems if problem), written)
    except OSError as error:
        return str(error)


def _write_shared(folder: Path, content: dict[str, Any]) -> dict[str, Written]:
    """The main rank's files; those of an export have been written before."""
    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(content, tensors))
    exported = (path for path in (folder / EXPORT).rglob("*") if path.is_file())
    return {
        STATE: write_file(folder / STATE, [text.encode()]),
        TENSORS: write_tensors(folder / TENSORS, tensors, {}),
        **{path.relative_to(folder).as_posix(): Written.of(path) for path in exported},
    }


def _read(reader: RangeReader, fragment: Fragment) -> Tensor:
    end = fragment.start + len(fragment.tensor)
    return reader.read(fragment.name, fragment.start, end, fragment.total)


def _mismatch(path: Path, expected: Written) -> str | None:
    """What is wrong with a file, None where it is as it was written."""
    try:
        if path.stat().st_size != expected.size:
            return f"{path.name} has {path.stat().st_size} bytes instead of {expected.size}"
        return None if Written.of(path) == expected else f"{path.name} does not match its checksum"
    except OSError as error:
        return f"{path.name}: {error.strerror}"
