"""The directory of a run's checkpoints, as one process sees and changes it.

A checkpoint is a directory with a manifest, written last. `latest` is a JSON file that names the run and its newest
checkpoint, `finished` one that says with what a run ended. Directories that begin with a dot are under construction or
on their way out.
"""

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from spmdrl.trainer.directory_lock import DirectoryLock
from spmdrl.trainer.tensor_file import Written, write_file

FORMAT = 1
MANIFEST, LATEST, FINISHED, BEST = "manifest.json", "latest", "finished", "best"
SAVING, REMOVING = ".saving-", ".removing-"
# By a run that has not the directory's lock. It has one in there, and until that is left others leave it alone.
SAVING_BESIDE = ".saving_beside-"


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of and belongs to."""

    name: str
    run: str  # id of the run, kept when it is resumed
    saved_at: float  # Unix time
    world_size: int
    can_resume: bool  # False for a model alone
    description: dict[str, Any]  # flags and fingerprints, for config.resume.compare
    files: dict[str, Written]  # by their path in the directory
    format: int = FORMAT

    @property
    def num_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def write(self, folder: Path) -> None:
        content = asdict(self)
        content["checksum"] = _checksum(content)
        write_file(folder / MANIFEST, [json.dumps(content, indent=1).encode()])
        sync(folder)

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Raises ValueError with what is wrong with `folder` as a checkpoint."""
        try:
            content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise ValueError(f"no {MANIFEST} in it: not a whole checkpoint of this program") from None
        except OSError as error:
            raise ValueError(f"{MANIFEST} cannot be read: {error.strerror or error}") from None
        except (ValueError, RecursionError):
            raise ValueError(f"{MANIFEST} is damaged") from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise ValueError(f"{MANIFEST} is not of format {FORMAT}, the one that is read here")
        if content.pop("checksum", None) != _checksum(content):
            raise ValueError(f"{MANIFEST} does not match its checksum")
        try:
            files = {str(name): Written(**file) for name, file in content.pop("files").items()}
            manifest = cls(**content, files=files)
        except (KeyError, TypeError, AttributeError):
            raise ValueError(f"{MANIFEST} is damaged") from None
        if any(PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts for name in files):
            raise ValueError(f"{MANIFEST} names files elsewhere")
        return manifest


def _checksum(content: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


Found = tuple[Path, Manifest]


def find(root: Path, run: str | None = None) -> tuple[list[Found], list[str]]:
    """The checkpoints that `run`, or the run named in `latest`, can go on from, newest first; why others are not.

    Without `latest` it is the run of the newest. Raises ValueError if `latest` names one and neither that nor one
    of its run is there.
    """
    found, problems = _scan(root)
    latest = read_latest(root) if run is None else {}
    resumable = [(folder, m) for folder, m in found if m.can_resume]
    run = run or latest.get("run") or (resumable[0][1].run if resumable else None)
    for folder, manifest in found:
        if not manifest.can_resume:
            problems.append(f"{folder}: a model without training state")
        elif manifest.run != run:
            problems.append(f"{folder}: of another run")
    own = [(folder, m) for folder, m in resumable if m.run == run]
    if latest.get("name") and not own and latest["name"] not in {folder.name for folder, _ in found}:
        raise ValueError(f"{root / latest['name']}, which {root / LATEST} names, is not whole, and there is no other")
    return own, problems


def _scan(root: Path) -> tuple[list[Found], list[str]]:
    """Directories with a manifest, the newest first, and what the others lack."""
    found, problems = [], []
    with os.scandir(root) if root.is_dir() else nullcontext(()) as entries:  # asks the disk for no more than names
        folders = sorted(root / entry.name for entry in entries if entry.is_dir())
    for folder in folders:
        if folder.name == BEST or folder.name.startswith(REMOVING):
            continue
        try:
            if folder.name.startswith((SAVING, SAVING_BESIDE)):
                raise ValueError("a save that was interrupted")
            found.append((folder, Manifest.read(folder)))
        except ValueError as problem:
            problems.append(f"{folder}: {problem}")
    return sorted(found, key=lambda item: -item[1].saved_at), problems


def read_latest(root: Path) -> dict[str, Any]:
    """`run` and `name`; nothing where the file is not there or not ours."""
    content = _read_object(root / LATEST)
    return content if all(isinstance(content.get(key), str | None) for key in ("run", "name")) else {}


def write_latest(root: Path, run: str, name: str | None) -> None:
    """Without a name the run has no checkpoint yet."""
    _write_object(root / LATEST, {"run": run, "name": name})


def read_finished(root: Path) -> dict[str, Any]:
    """`description`, `model` and `fingerprint` of a run that ended; nothing where there is none."""
    content = _read_object(root / FINISHED)
    return content if content.keys() >= {"description", "model", "fingerprint"} else {}


def write_finished(root: Path, description: dict[str, Any], model: Path, fingerprint: str) -> None:
    content = {"description": description, "model": str(model), "fingerprint": fingerprint}
    _write_object(root / FINISHED, content)


def forget_finished(root: Path) -> None:
    (root / FINISHED).unlink(missing_ok=True)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_object(path: Path, content: dict[str, Any]) -> None:
    """Replace a file at once."""
    partial = path.with_name(f".{path.name}.partial")
    write_file(partial, [json.dumps(content).encode()])
    partial.replace(path)
    sync(path.parent)


def begin(root: Path, name: str, run: str, *, beside: bool = False) -> Path:
    """An empty directory for the ranks to write to. beside: without the lock of `root`."""
    folder = root / f"{SAVING_BESIDE if beside else SAVING}{name}-{run[:8]}"
    root.mkdir(parents=True, exist_ok=True)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def publish(
    root: Path, folder: Path, manifest: Manifest, *, max_num: int, max_bytes: int, is_latest: bool = True
) -> Path:
    """Make what is in `folder` a checkpoint, name it in `latest`, and only then remove older ones of the run."""
    for name, file in manifest.files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != file.size:
            raise OSError(f"{path} is not what another rank wrote: do all nodes see this directory?")
    before = [(found, m) for found, m in _scan(root)[0] if m.run == manifest.run]
    # A clock that was set back, or another node's, must not make older ones the newest.
    manifest = replace(manifest, saved_at=max([manifest.saved_at, *(m.saved_at + 0.001 for _, m in before)]))
    manifest.write(folder)
    final = _free(root / manifest.name)
    folder.rename(final)
    sync(root)
    if is_latest:
        write_latest(root, manifest.run, final.name)
    _prune([(final, manifest), *before], max_num=max_num, max_bytes=max_bytes)
    return final


def _free(path: Path) -> Path:
    """`path`, or with a number behind it where something is there, of an earlier run or damaged."""
    number = 1
    while (free := path if number == 1 else path.with_name(f"{path.name}-{number}")).exists():
        number += 1
    return free


def _prune(own: Sequence[Found], *, max_num: int, max_bytes: int) -> None:
    """Of a run's checkpoints, newest first, keep as many that it can go on from as the limits allow, and as many
    models alone; the newest of each kind whatever its size."""
    total = 0
    for can_resume in (True, False):
        kind = [(folder, manifest) for folder, manifest in own if manifest.can_resume == can_resume]
        for number, (folder, manifest) in enumerate(kind):
            total += manifest.num_bytes
            if number and (number >= max_num or total > max_bytes):
                with suppress(OSError):
                    _remove(folder)


def _remove(folder: Path) -> None:
    """A directory is never seen half removed."""
    leaving = folder.with_name(f"{REMOVING}{folder.name}")
    shutil.rmtree(leaving, ignore_errors=True)
    folder.rename(leaving)
    shutil.rmtree(leaving)


def clear_away(root: Path) -> Sequence[Path]:
    """Remove what interrupted saves and removals left; for who has the lock of `root`."""
    places = (place for place in (root, root / BEST) if place.is_dir())
    left = [f for place in places for f in place.iterdir() if _is_left(f)]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return left


def _is_left(folder: Path) -> bool:
    if folder.name.startswith(SAVING_BESIDE):
        return DirectoryLock(folder, lambda line: None).is_left()
    return folder.name.startswith((SAVING, REMOVING))


def sync(folder: Path) -> None:
    """Wait until the names in a directory are on the disk, where the file system knows how."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)
