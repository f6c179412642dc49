"""One live run for a directory, and none that is blocked by a dead one."""

import errno
import fcntl
import json
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest

from spmdrl.trainer import directory_lock
from spmdrl.trainer.directory_lock import DirectoryLock
from tests.trainer.lock_holder import ROOT, held_elsewhere, is_free_for_others


@pytest.fixture
def said():
    return []


@pytest.fixture
def make(tmp_path, said):
    return lambda: DirectoryLock(tmp_path, said.append)


def test_a_second_process_is_told_who_has_it(tmp_path, make):
    with held_elsewhere(tmp_path) as holder:
        lock = make()
        assert lock.take(wait=False) == f"pid {holder.pid} on {socket.gethostname()}"
        assert not lock.is_held


def test_a_killed_process_blocks_nobody(tmp_path, make):
    """Its file is still there, with its name in it."""
    with held_elsewhere(tmp_path) as holder:
        holder.kill()
        holder.wait()
        assert str(holder.pid) in (tmp_path / ".lock").read_text()
        lock = make()
        assert lock.take(wait=False) is None
        assert lock.is_held
        assert str(os.getpid()) in (tmp_path / ".lock").read_text()


def test_it_is_left_once_the_process_that_had_it_has_ended(tmp_path, make, monkeypatch):
    assert not make().is_left()  # nobody has had it
    with held_elsewhere(tmp_path) as holder:
        assert not make().is_left()
        holder.kill()
        holder.wait()
        assert make().is_left()
        own = make()
        own.take(wait=False)
        assert not make().is_left()
        own.release()
        monkeypatch.setattr(fcntl, "lockf", no_locks)
        assert not make().is_left()


def no_locks(*args):
    raise OSError(errno.ENOLCK, "No locks available")


def test_it_is_waited_for_while_a_process_ends(tmp_path, make, said):
    with held_elsewhere(tmp_path) as holder:
        threading.Timer(1.0, holder.kill).start()
        assert make().take(wait=True) is None
    assert said == [f"{tmp_path} is in use (pid {holder.pid} on {socket.gethostname()}): waiting up to 10 s for it"]


def test_another_host_that_is_gone_is_waited_for_longer(tmp_path, make, said, monkeypatch):
    monkeypatch.setattr(directory_lock, "PATIENCE_S", 0.0)
    monkeypatch.setattr(directory_lock, "LEASE_S", 1.0)
    with held_elsewhere(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        start = time.monotonic()
        assert make().take(wait=True) is not None
        assert time.monotonic() - start > 1.0


def test_children_neither_have_it_nor_take_it_away(tmp_path, make):
    lock = make()
    assert lock.take(wait=False) is None
    child = os.fork()
    if not child:
        del lock
        os._exit(0)
    os.waitpid(child, 0)
    assert not is_free_for_others(tmp_path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as left:  # as a reward function may leave one
        try:
            lock.release()
            assert is_free_for_others(tmp_path)
        finally:
            left.kill()


def test_locks_of_one_process_share_it(tmp_path, make):
    """Closing any descriptor of the file would release it."""
    one, two = make(), make()
    assert one.take(wait=False) is None
    assert two.take(wait=False) is None
    del two
    assert one.is_held
    assert not is_free_for_others(tmp_path)
    one.release()
    assert is_free_for_others(tmp_path)


def test_it_is_taken_again_where_the_directory_was_removed(tmp_path, make):
    lock = make()
    lock.take(wait=False)
    shutil.rmtree(tmp_path)
    assert not lock.is_held
    with pytest.raises(FileNotFoundError):
        lock.take(wait=False)
    tmp_path.mkdir()
    assert lock.take(wait=False) is None
    assert not is_free_for_others(tmp_path)
    with held_elsewhere(tmp_path / "new"):
        (tmp_path / ".lock").unlink()
        (tmp_path / "new" / ".lock").rename(tmp_path / ".lock")
        assert not lock.is_held
        assert lock.take(wait=False) is not None


def test_a_file_that_is_removed_while_it_is_opened_is_not_taken_for_the_lock(tmp_path, make, monkeypatch):
    """By a run that has ended: the next one would lock a new file."""
    really_open, opened = os.open, []

    def slowly(path, *args):
        opened.append(number := really_open(path, *args))
        if len(opened) == 1:
            os.unlink(path)
        return number

    monkeypatch.setattr(os, "open", slowly)
    lock = make()
    assert lock.take(wait=False) is None
    monkeypatch.undo()
    assert len(opened) == 2
    assert lock.is_held
    assert not is_free_for_others(tmp_path)
    lock.release(remove=True)
    assert not lock.is_held
    assert not (tmp_path / ".lock").exists()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_on_the_file_system_it_counts_as_held_and_is_said_once(make, said, monkeypatch, number):
    def refuse(*args):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock = make()
    for _ in range(2):
        assert lock.take(wait=True) is None
        assert lock.is_held
    (line,) = said
    assert "no locks on this file system" in line
    assert os.strerror(number) in line


def test_a_full_disk_does_not_keep_it_from_being_held(tmp_path, make, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    lock = make()
    assert lock.take(wait=False) is None
    assert not is_free_for_others(tmp_path)


def test_a_merge_does_not_write_where_a_run_does(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(directory_lock, "PATIENCE_S", 0.0)
    monkeypatch.setattr("spmdrl.quiet.quiet_libraries", lambda **options: None)
    for name, content in (("base/config.json", {}), ("adapter/adapter_config.json", {})):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps(content))
    names = {"lora_path": "adapter", "model_path": "base", "output_path": "out"}
    words = [word for flag, name in names.items() for word in (f"--{flag}", str(tmp_path / name))]
    monkeypatch.setattr(sys, "argv", ["merge_lora.py", *words])
    with held_elsewhere(tmp_path / "out"), pytest.raises(SystemExit) as exit:
        runpy.run_path(str(ROOT / "cli" / "merge_lora.py"), run_name="__main__")
    assert exit.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: --output_path {tmp_path}/out is in use by another run (pid ")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]
