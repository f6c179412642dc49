"""Invariant 7: a checkpoint is whole or absent, whatever happens while it is written, and whatever else lies there."""

import errno
import json
import os
import resource
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from spmdrl.config import CheckpointConfig
from spmdrl.distributed import whereabouts
from spmdrl.distributed.engine_state import Fragment
from spmdrl.errors import UserError
from spmdrl.trainer import checkpoint, checkpoint_folder, directory_lock, tensor_file
from spmdrl.trainer.checkpoint import Checkpointer
from tests.ranks import run_ranks
from tests.trainer.lock_holder import held_elsewhere, is_free_for_others

DESCRIPTION = {"program": "PPOConfig", "flags": {"seed": 1}, "contents": {}}


@dataclass
class Numbers:
    """A part of a run: one flat tensor."""

    values: torch.Tensor = field(default_factory=lambda: torch.zeros(1000))

    def fragments(self):
        return [Fragment("numbers/weight", len(self.values), 0, self.values, is_replicated=True)]

    def state_dict(self):
        return {"sum": float(self.values.sum())}

    def load(self, state, read):
        for fragment in self.fragments():
            fragment.tensor.copy_(read(fragment))
        assert state == self.state_dict()


def make(root, *, description=DESCRIPTION, **flags):
    return Checkpointer(CheckpointConfig(ckpt_path=str(root), **flags), description)


def save(checkpointer, step, name=None):
    numbers = Numbers(torch.full((1000,), float(step)))
    state = {"step": step, "nested": [{"rate": 0.1}, torch.arange(3)]}
    checkpointer.save(name or f"step_{step:06d}", {"numbers": numbers}, state, {"rng": torch.tensor([step])})
    return checkpointer.finish()


def resume(root, **flags):
    """(checkpointer, step) of a run that goes on; the step of None is a run from the beginning."""
    checkpointer = make(root, load_checkpoint=True, **flags)
    found = checkpointer.find()
    if found is None:
        return checkpointer, None
    numbers = Numbers()
    found.load({"numbers": numbers})
    step = found.state["step"]
    assert torch.equal(numbers.values, torch.full((1000,), float(step)))
    assert found.state["nested"][0] == {"rate": 0.1}
    assert torch.equal(found.state["nested"][1], torch.arange(3))
    assert torch.equal(found.of_ranks[0]["rng"], torch.tensor([step]))
    return checkpointer, step


def started(root, *steps, **flags):
    """A run that has saved these steps."""
    checkpointer = make(root, **flags)
    for step in steps:
        save(checkpointer, step)
    return checkpointer


def names(root):
    return sorted(path.name for path in Path(root).iterdir() if path.is_dir())


# ---- what is found --------------------------------------------------------------------------------------------------
def test_what_was_saved_comes_back(tmp_path):
    started(tmp_path, 1, 2)
    assert resume(tmp_path)[1] == 2


def test_without_the_flag_a_run_begins_afresh_and_its_checkpoints_are_its_own(tmp_path):
    """U72: a higher step of another run in the same directory is neither taken nor removed nor counted."""
    started(tmp_path, 1000)
    other = make(tmp_path)
    assert other.find() is None
    assert resume(tmp_path)[1] is None
    started(tmp_path, 1, 2, 3, max_ckpt_num=2)
    assert resume(tmp_path)[1] == 3
    assert names(tmp_path) == ["step_000002", "step_000003", "step_001000"]


def test_nothing_there_is_said(tmp_path, capsys):
    assert resume(tmp_path / "new")[1] is None
    assert f"no checkpoint in {tmp_path / 'new'}, starting from the beginning" in capsys.readouterr().out
    assert not (tmp_path / "new").exists()


def test_a_resumed_run_is_the_same_run(tmp_path):
    """It removes what it saved before it was resumed, and what an interrupted save left."""
    started(tmp_path, 1, 2, max_ckpt_num=2)
    for place in (tmp_path, tmp_path / "best"):
        (place / ".saving-step_000003-0123").mkdir(parents=True)
    checkpointer, _ = resume(tmp_path, max_ckpt_num=2)
    assert names(tmp_path) == ["best", "step_000001", "step_000002"]
    assert names(tmp_path / "best") == []
    save(checkpointer, 3)
    assert names(tmp_path) == ["best", "step_000002", "step_000003"]


def truncate(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", ["numbers.rank00000.safetensors", "state.json", "state.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_a_damaged_checkpoint_is_passed_over_in_one_line(tmp_path, capsys, file, damage):
    started(tmp_path, 1, 2)
    damage(tmp_path / "step_000002" / file)
    assert resume(tmp_path)[1] == 1
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "ignored: " in line]
    assert str(tmp_path / "step_000002") in line


def test_where_all_are_damaged_nothing_begins_afresh(tmp_path):
    started(tmp_path, 1, 2)
    flip(tmp_path / "step_000001" / "state.json")
    truncate(tmp_path / "step_000002" / "state.json")
    with pytest.raises(UserError, match=r"no checkpoint in \S+ is whole"):
        resume(tmp_path)
    for step in (1, 2):
        (tmp_path / f"step_00000{step}" / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"step_000002, which \S+latest names, is not whole, and there is no other"):
        resume(tmp_path)


def test_foreign_directories_and_files_are_passed_over(tmp_path, capsys):
    started(tmp_path, 1)
    (tmp_path / "global_step1000").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "manifest.json").write_text("[]")
    (tmp_path / "future").mkdir()
    (tmp_path / "future" / "manifest.json").write_text('{"format": 99}')
    shutil.copytree(tmp_path / "step_000001", tmp_path / "outside")
    outside = checkpoint_folder.Manifest.read(tmp_path / "outside")
    outside.files["../notes.txt"] = tensor_file.Written.of(tmp_path / "notes.txt")
    outside.write(tmp_path / "outside")
    checkpointer, step = resume(tmp_path, max_ckpt_num=1)
    assert step == 1
    ignored = [line for line in capsys.readouterr().out.splitlines() if "ignored: " in line]
    assert len(ignored) == 4, ignored
    save(checkpointer, 2)
    assert names(tmp_path) == ["future", "global_step1000", "list", "outside", "step_000002"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run": 5}', None])
def test_without_a_readable_latest_it_is_the_newest(tmp_path, content):
    started(tmp_path, 1, 2)
    if content is None:
        (tmp_path / "latest").unlink()
    else:
        (tmp_path / "latest").write_text(content)
    assert resume(tmp_path)[1] == 2


def test_a_damaged_checkpoint_does_not_stand_in_the_way_of_a_new_one_of_its_name(tmp_path):
    started(tmp_path, 1, 2)
    truncate(tmp_path / "step_000002" / "state.json")
    checkpointer, _ = resume(tmp_path)
    save(checkpointer, 2)
    assert names(tmp_path) == ["step_000001", "step_000002", "step_000002-2"]
    assert resume(tmp_path)[1] == 2


# ---- what is kept ---------------------------------------------------------------------------------------------------
def test_the_size_limit_counts_own_checkpoints_only_and_keeps_the_newest(tmp_path, monkeypatch):
    started(tmp_path, 1000)
    size = checkpoint_folder.Manifest.read(tmp_path / "step_001000").num_bytes
    assert 4000 < size < 10_000
    checkpointer = started(tmp_path, 1, 2, 3, max_ckpt_num=10)

    def prune(max_bytes):
        own = [(folder, m) for folder, m in checkpoint_folder._scan(tmp_path)[0] if m.run == checkpointer.run]
        checkpoint_folder._prune(own, max_num=10, max_bytes=max_bytes)

    prune(2 * size + 100)
    assert names(tmp_path) == ["step_000002", "step_000003", "step_001000"]
    prune(1)
    assert names(tmp_path) == ["step_000003", "step_001000"]


def test_a_model_alone_is_kept_but_not_gone_on_from(tmp_path, capsys):
    checkpointer = started(tmp_path, 1)
    export = lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{}"))  # noqa: E731
    checkpointer.save("step_000002", {}, {}, {}, export=export)
    assert checkpointer.finish() == tmp_path / "step_000002"
    assert (tmp_path / "step_000002" / "hf" / "config.json").read_text() == "{}"
    assert resume(tmp_path)[1] == 1
    assert "step_000002: a model without training state" in capsys.readouterr().out


def test_where_there_are_only_models_the_run_begins_afresh(tmp_path):
    checkpointer = make(tmp_path)
    checkpointer.save("step_000002", {}, {}, {}, export=lambda folder: folder.mkdir())
    checkpointer.finish()
    assert resume(tmp_path)[1] is None


def test_a_clock_that_was_set_back_does_not_make_an_older_one_the_newest(tmp_path, monkeypatch):
    checkpointer = started(tmp_path, 1, max_ckpt_num=1)
    monkeypatch.setattr(checkpoint.time, "time", lambda: 1.0)
    save(checkpointer, 2)
    assert names(tmp_path) == ["step_000002"]
    save(checkpointer, 3)
    assert resume(tmp_path)[1] == 3


def test_a_run_goes_back_to_a_checkpoint_of_its_own(tmp_path):
    """Also where another run has saved in the same directory since."""
    checkpointer = started(tmp_path, 1)
    started(tmp_path, 5)
    found = checkpointer.newest(checkpointer.run)
    assert found is not None and found.state["step"] == 1
    assert make(tmp_path).newest(run="a run without one") is None


def test_the_best_is_kept_apart(tmp_path):
    checkpointer = started(tmp_path, 1, max_ckpt_num=1)
    best = checkpointer.for_best()
    for step in (1, 2):
        best.save(f"step_{step:06d}", {}, {}, {}, export=lambda folder: folder.mkdir())
        best.finish()
    save(checkpointer, 3)
    assert names(tmp_path) == ["best", "step_000003"]
    assert names(tmp_path / "best") == ["step_000002"]
    assert resume(tmp_path)[1] == 3


def save_model(checkpointer, step):
    checkpointer.save(f"step_{step:06d}", {}, {}, {}, export=lambda folder: folder.mkdir())
    return checkpointer.finish()


def test_models_alone_push_out_no_checkpoint_that_a_run_can_go_on_from(tmp_path):
    """Nor the other way round: of each kind there are as many as --max_ckpt_num says."""
    checkpointer = started(tmp_path, 1, max_ckpt_num=2)
    for step in (2, 3, 4):
        save_model(checkpointer, step)
    assert names(tmp_path) == ["step_000001", "step_000003", "step_000004"]
    for step in (5, 6, 7):
        save(checkpointer, step)
    assert names(tmp_path) == ["step_000003", "step_000004", "step_000006", "step_000007"]
    own = checkpoint_folder._scan(tmp_path)[0]
    checkpoint_folder._prune(own, max_num=10, max_bytes=1)
    assert names(tmp_path) == ["step_000004", "step_000007"]
    assert resume(tmp_path)[1] == 7


def test_manifests_are_read_once_a_save(tmp_path, monkeypatch):
    checkpointer, read = started(tmp_path, 1, 2, max_ckpt_num=5), []
    own = checkpoint_folder.Manifest.read
    monkeypatch.setattr(checkpoint_folder.Manifest, "read", lambda folder: (read.append(folder.name), own(folder))[1])
    save(checkpointer, 3)
    assert read == ["step_000001", "step_000002"]


def test_thousands_of_foreign_directories_are_not_all_named(tmp_path, capsys):
    started(tmp_path, 1)
    for number in range(1000):
        (tmp_path / f"foreign_{number}").mkdir()
    assert resume(tmp_path)[1] == 1
    ignored = [line for line in capsys.readouterr().out.splitlines() if "ignored: " in line]
    assert len(ignored) == 21
    assert ignored[-1] == f"ignored: 980 more directories in {tmp_path}"


# ---- other runs -----------------------------------------------------------------------------------------------------
@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(directory_lock, "PATIENCE_S", 0.0)


def test_a_directory_in_use_is_refused_in_one_line_that_names_who_has_it(tmp_path, impatient):
    with held_elsewhere(tmp_path) as holder:
        with pytest.raises(UserError) as error:
            make(tmp_path, load_checkpoint=True).claim()
        (line,) = str(error.value).splitlines()
        assert line.startswith(f"--ckpt_path {tmp_path} is in use by another run (pid {holder.pid} on ")
        assert "wait until that has ended, or give this one a --ckpt_path of its own" in line
        holder.kill()
        holder.wait()
        make(tmp_path, load_checkpoint=True).claim()


def claim_held(folder):
    checkpointer = make(folder, load_checkpoint=True)
    try:
        checkpointer.claim()
    except UserError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_a_directory_in_use_is_refused_on_every_rank(tmp_path):
    with held_elsewhere(tmp_path) as holder:
        one, other = run_ranks(2, claim_held, tmp_path)
        assert one == other
        assert f"(pid {holder.pid} on " in one
    assert run_ranks(2, claim_held, tmp_path) == [None, None]


def test_without_the_directory_a_run_saves_beside_the_one_that_has_it(tmp_path):
    """Its own name, no change of `latest`, and what it has written so far is not cleared away."""
    first = started(tmp_path, 5)
    first.lock.release()
    latest = (tmp_path / "latest").read_text()
    with held_elsewhere(tmp_path) as holder:
        other = make(tmp_path)
        assert other.find() is None
        folder = save(other, 5)
        assert folder == tmp_path / f"step_000005-{other.run[:8]}"
        assert str(holder.pid) in other.holder
        other.save("step_000006", {"numbers": Numbers()}, {"step": 6}, {})
        (writing,) = tmp_path.glob(".saving_beside-*")
        assert (writing / ".lock").is_file() and not is_free_for_others(writing)
        checkpoint_folder.clear_away(tmp_path)
        assert other.finish().is_dir()
    assert not list(tmp_path.glob("step_*/.lock"))
    assert (tmp_path / "latest").read_text() == latest
    assert resume(tmp_path)[1] == 5
    (tmp_path / "own").mkdir()
    folder.rename(tmp_path / "own" / folder.name)
    assert resume(tmp_path / "own")[1] == 5


@pytest.mark.parametrize("options", [{"load_checkpoint": True}, {}])
def test_what_a_run_left_that_was_killed_while_it_saved_is_removed_by_the_next(tmp_path, capsys, options):
    """Whether that goes on or begins afresh; without the directory's lock it was one that has an end too."""
    started(tmp_path, 5).lock.release()
    left = [tmp_path / name for name in (".saving-step_000006-0123abcd", ".removing-step_000001")]
    beside, unknown = (tmp_path / f".saving_beside-step_00000{n}-89ef0123" for n in (7, 8))
    for folder in (*left, beside, unknown):
        folder.mkdir()
    with held_elsewhere(beside):
        make(tmp_path, **options).find()
        assert beside.is_dir() and not any(folder.exists() for folder in left)
    make(tmp_path, **options).find()
    assert not beside.exists()
    assert unknown.is_dir()  # by a program that does not say whether it is still there
    said = capsys.readouterr().out
    assert [said.count(f"removed {folder}, left by an interrupted save") for folder in (*left, beside)] == [1, 1, 1]
    assert (tmp_path / "step_000005").is_dir()


def test_a_run_that_saves_when_it_is_stopped_takes_a_directory_that_is_free(tmp_path):
    started(tmp_path, 5)
    other = make(tmp_path)
    other.find()
    assert not other.lock.is_held
    assert save(other, 2) == tmp_path / "step_000002"
    assert other.lock.is_held
    assert other.holder is None
    assert resume(tmp_path)[1] == 2


def test_a_directory_that_is_removed_during_the_run_is_made_again(tmp_path):
    checkpointer = make(tmp_path / "ckpt", load_checkpoint=True)
    checkpointer.claim()
    save(checkpointer, 1)
    shutil.rmtree(tmp_path / "ckpt")
    save(checkpointer, 2)
    assert resume(tmp_path / "ckpt")[1] == 2
    assert checkpointer.lock.is_held


def test_a_run_stays_where_it_began_when_it_changes_its_directory(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    checkpointer = make("ckpt")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert save(checkpointer, 1) == tmp_path / "ckpt" / "step_000001"


def save_from_own_directory(folder):
    from spmdrl.distributed import comm

    os.chdir(folder / str(comm.rank()))
    return str(save(make("ckpt"), 1))


@pytest.mark.slow
def test_ranks_that_were_started_in_different_directories_save_together(tmp_path):
    for rank in "01":
        (tmp_path / rank).mkdir()
    assert run_ranks(2, save_from_own_directory, tmp_path) == [f"{tmp_path}/0/ckpt/step_000001"] * 2


# ---- being killed, and disks that refuse ----------------------------------------------------------------------------
class Killed(BaseException):
    pass


def calls_to_the_disk(monkeypatch, on_call):
    """`on_call(number, what)` before each call that changes files, also those that removing a tree makes."""
    count = iter(range(1, 10**6))
    places = [(Path, name) for name in ("mkdir", "rename", "replace")] + [
        (os, name) for name in ("fsync", "unlink", "rmdir")
    ]
    for owner, name in places:
        own = getattr(owner, name)

        def call(*args, own=own, name=name, **options):
            on_call(next(count), name)
            return own(*args, **options)

        monkeypatch.setattr(owner, name, call)


@pytest.mark.parametrize("keep", [1, 2])
def test_killed_at_any_moment_of_a_save_the_old_or_the_new_one_is_whole(tmp_path, keep):
    """U72, with --max_ckpt_num 1 too. A second save is cut off before each of its calls that change the disk, in the
    middle of each file, and the run resumed."""
    done, seen = False, set()
    for number in range(1, 200):
        folder = tmp_path / str(number)
        checkpointer = started(folder, 1, max_ckpt_num=keep)
        with pytest.MonkeyPatch.context() as patch:

            def die(at, what, number=number):
                if at == number:
                    seen.add(what)
                    raise Killed

            calls_to_the_disk(patch, die)
            try:
                save(checkpointer, 2)
                done = True
            except Killed:
                pass
        assert resume(folder, max_ckpt_num=keep)[1] in ((2,) if done else (1, 2))
        assert not list(folder.glob(".saving-*"))
        if done:
            break
    assert done
    assert seen >= {"mkdir", "fsync", "rename", "replace"} | ({"unlink", "rmdir"} if keep == 1 else set())
    assert number > 10


@pytest.mark.parametrize("problem", [errno.ENOSPC, errno.EROFS])
def test_a_disk_that_refuses_anything_is_one_error_and_the_old_one_still_loads(tmp_path, problem):
    refused = 0
    for number in range(1, 200):
        folder = tmp_path / str(number)
        checkpointer = started(folder, 1, max_ckpt_num=1)
        with pytest.MonkeyPatch.context() as patch:

            def refuse(at, what, number=number):
                if at >= number:
                    raise OSError(problem, os.strerror(problem))

            calls_to_the_disk(patch, refuse)
            try:
                save(checkpointer, 2)
                saved = True
            except UserError as error:
                assert str(folder) in str(error) and os.strerror(problem) in str(error)
                saved, refused = False, refused + 1
        assert resume(folder)[1] in ((2,) if saved else (1, 2))
        if saved and number > 20:
            break
    assert refused > 5


def limited_save(folder):
    """Rank 1 may write 1000 bytes a file, rank 0 as much as it likes. The error of each rank."""
    from spmdrl.distributed import comm

    checkpointer = started(folder, 1)
    if comm.rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    try:
        save(checkpointer, 2)
    except UserError as error:
        return str(error), resume(folder)[1]
    return None


@pytest.mark.slow
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(tmp_path):
    for message, step in run_ranks(2, limited_save, tmp_path):
        assert f"--ckpt_path {tmp_path}: cannot save step_000002: rank 1: " in message
        assert "File too large" in message
        assert step == 1
    assert names(tmp_path) == ["step_000001"]


# ---- in the background ----------------------------------------------------------------------------------------------
def test_a_save_goes_on_while_the_caller_does(tmp_path, monkeypatch):
    import threading

    may_write, own = threading.Event(), checkpoint._write_own
    monkeypatch.setattr(checkpoint, "_write_own", lambda *args: (may_write.wait(30), own(*args))[1])
    checkpointer = make(tmp_path)
    checkpointer.save("step_000001", {"numbers": Numbers()}, {"step": 1}, {})
    assert names(tmp_path) == [f".saving-step_000001-{checkpointer.run[:8]}"]
    may_write.set()
    assert checkpointer.finish() == tmp_path / "step_000001"
    assert checkpointer.finish() is None


def test_a_second_save_waits_for_the_first(tmp_path):
    checkpointer = make(tmp_path)
    for step in (1, 2):
        checkpointer.save(f"step_{step:06d}", {"numbers": Numbers()}, {"step": step}, {})
    assert (tmp_path / "step_000001" / "manifest.json").exists()
    assert not (tmp_path / "step_000002").exists()


def test_an_error_in_the_background_is_raised_when_the_save_is_completed(tmp_path, monkeypatch):
    checkpointer = started(tmp_path, 1)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    checkpointer.save("step_000002", {"numbers": Numbers()}, {"step": 2}, {})
    with pytest.raises(UserError, match=r"cannot save step_000002: rank 0: .*No space left on device"):
        checkpointer.finish()
    assert names(tmp_path) == ["step_000001"]


def test_a_manifest_that_the_disk_refuses_leaves_nothing(tmp_path, monkeypatch):
    """The room is needed."""
    checkpointer = started(tmp_path, 1)

    def full(manifest, folder):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint_folder.Manifest, "write", full)
    with pytest.raises(UserError, match=r"cannot save a checkpoint: .*No space left on device"):
        save(checkpointer, 2)
    assert names(tmp_path) == ["step_000001"]


def test_an_export_that_the_disk_refuses_leaves_nothing(tmp_path):
    def export(folder):
        folder.mkdir()
        raise UserError("no space")

    checkpointer = started(tmp_path, 1)
    with pytest.raises(UserError, match="no space"):
        checkpointer.save("step_000002", {"numbers": Numbers()}, {"step": 2}, {}, export=export)
    assert names(tmp_path) == ["step_000001"]
    assert resume(tmp_path)[1] == 1


def test_a_directory_that_cannot_be_read_is_refused_in_one_line(tmp_path, monkeypatch):
    started(tmp_path, 1)
    monkeypatch.setattr(checkpoint_folder, "find", lambda root, run: os.listdir(root / "step_000001" / "state.json"))
    with pytest.raises(UserError, match=r"--load_checkpoint: .*Not a directory.*state.json"):
        resume(tmp_path)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_sync_directories_holds_checkpoints(tmp_path, monkeypatch, number):
    """Some that are mounted over a network or from user space."""
    own = os.fsync

    def fsync(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(number, os.strerror(number))
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    started(tmp_path, 1, 2)
    assert resume(tmp_path)[1] == 2


def test_a_manifest_that_cannot_be_read_is_not_called_missing(tmp_path, capsys, monkeypatch):
    started(tmp_path, 1, 2)
    own = Path.read_text

    def read_text(path, *args, **options):
        if path == tmp_path / "step_000002" / "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return own(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert resume(tmp_path)[1] == 1
    assert f"{tmp_path / 'step_000002'}: manifest.json cannot be read: Input/output error" in capsys.readouterr().out


# ---- files ----------------------------------------------------------------------------------------------------------
def test_tensors_of_every_kind_are_read_back_by_safetensors(tmp_path):
    tensors = {
        "scalar": torch.tensor(2.5),
        "flags": torch.tensor([True, False, True]),
        "half": torch.randn(7).bfloat16(),
        "ids": torch.arange(6).reshape(2, 3).T,
        "empty": torch.empty(0),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "double": torch.randn(3, dtype=torch.float64),
    }
    written = tensor_file.write_tensors(tmp_path / "file", tensors, {"format": "pt"})
    assert written == tensor_file.Written.of(tmp_path / "file")
    found = tensor_file.read_tensors(tmp_path / "file")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_writing_and_checking_a_long_file_are_signs_of_progress(tmp_path):
    before = whereabouts.beats()
    tensor_file.write_file(tmp_path / "file", [b"abc"])
    written = whereabouts.beats()
    tensor_file.Written.of(tmp_path / "file")
    assert before < written < whereabouts.beats()


def test_ranges_are_put_together_from_several_files(tmp_path):
    whole = torch.arange(20)
    for name, start, end in (("a", 13, 20), ("b", 0, 6), ("c", 6, 13)):
        tensor_file.write_tensors(tmp_path / name, {"x": whole[start:end]}, {tensor_file.STARTS: f'{{"x": {start}}}'})
    reader = tensor_file.RangeReader([tmp_path / name for name in "abc"])
    for start, end in ((0, 20), (5, 14), (6, 13), (7, 9), (19, 20)):
        assert torch.equal(reader.read("x", start, end, 20), whole[start:end])
    assert reader.read("x", 20, 20, 20).shape == (0,)  # the share of a rank beyond a weight's elements
    with pytest.raises(ValueError, match="x has 20 elements there, 21 here"):
        reader.read("x", 0, 21, 21)
    with pytest.raises(ValueError, match="y has 0 elements there, 3 here"):
        reader.read("y", 0, 3, 3)


def test_states_come_back_from_json_and_tensors():
    tensors = {}
    state = {"a": [1, {"b": torch.arange(3)}, (2, None)], "c": torch.tensor(1.5), "d": float("inf"), "e": 0.1 + 0.2}
    text = json.dumps(tensor_file.pack(state, tensors))
    back = tensor_file.unpack(json.loads(text), tensors)
    assert torch.equal(back["a"][1]["b"], state["a"][1]["b"])
    assert torch.equal(back["c"], state["c"])
    assert back["a"][2] == [2, None]
    assert (back["d"], back["e"]) == (state["d"], state["e"])
