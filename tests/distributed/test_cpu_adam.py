"""--adam_offload: its C++ is built once, a killed build blocks no later start, and it trains as AdamW does."""

import os
import subprocess
import sys
import time

import pytest
import torch

from spmdrl.distributed import cpu_adam
from tests.ranks import run_ranks
from tests.tiny import make_model


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")


def held_open(path, seconds):
    """A process that builds: it made the lock, has it open, and removes it at its end."""
    code = (
        "import os, sys, time\nfd = os.open(sys.argv[1], os.O_CREAT | os.O_EXCL)\n"
        "print('building', flush=True)\ntime.sleep(float(sys.argv[2]))\nos.close(fd)\nos.remove(sys.argv[1])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "building\n"
    return process


def test_a_lock_that_nobody_holds_is_removed_and_said(tmp_path, capsys):
    (tmp_path / "lock").touch()
    start = time.monotonic()
    with cpu_adam.building(tmp_path):
        assert not (tmp_path / "lock").exists()
    assert time.monotonic() - start < 10
    assert capsys.readouterr().out == f"removed {tmp_path / 'lock'}, left by a build that was interrupted\n"


def test_a_lock_of_a_killed_builder_is_removed(tmp_path):
    builder = held_open(tmp_path / "lock", 60)
    assert not cpu_adam.is_abandoned(tmp_path / "lock")
    builder.kill()
    builder.wait()
    assert (tmp_path / "lock").exists()
    assert cpu_adam.is_abandoned(tmp_path / "lock")


def test_a_build_under_way_is_waited_for(tmp_path, capsys):
    builder = held_open(tmp_path / "lock", 2)
    with cpu_adam.building(tmp_path):
        assert builder.wait(0.5) == 0  # its own removal of the lock worked
    assert capsys.readouterr().out == (f"waiting for another build of the same C++, which holds {tmp_path / 'lock'}\n")


def test_another_run_that_builds_is_waited_for_without_a_lock(tmp_path):
    code = (
        "import sys, time, pathlib\nfrom spmdrl.distributed import cpu_adam\n"
        "with cpu_adam.building(pathlib.Path(sys.argv[1])):\n    print('in', flush=True)\n    time.sleep(1)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "in\n"
    start = time.monotonic()
    with cpu_adam.building(tmp_path):
        assert time.monotonic() - start > 0.5
    other.wait()


def test_where_another_host_may_build_only_age_tells(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_adam, "LOCAL_FILE_SYSTEMS", set())
    lock = tmp_path / "lock"
    lock.touch()
    assert not cpu_adam.is_abandoned(lock)
    os.utime(lock, (0, time.time() - cpu_adam.LONGEST_BUILD_S - 1))
    assert cpu_adam.is_abandoned(lock)


def test_a_lock_that_is_gone_meanwhile_is_not_abandoned(tmp_path):
    assert not cpu_adam.is_abandoned(tmp_path / "lock")


def test_a_failing_build_is_one_line_that_says_what_it_needs(tmp_path, monkeypatch):
    from spmdrl.errors import UserError

    def load():
        raise RuntimeError("Error building extension 'cpu_adam'\n[1/3] c++ -MMD ...")

    monkeypatch.setattr(cpu_adam, "build_folder", lambda: tmp_path)
    monkeypatch.setattr(cpu_adam, "_load", load)
    with pytest.raises(UserError, match=r"--adam_offload: .* \(needs g\+\+ and ninja\): Error building .*'cpu_adam'$"):
        cpu_adam.cpu_adam_class()


def trained(path, adam_offload):
    """Weights after two optimizer steps on the fixed samples."""
    from tests.distributed.test_strategy import train_step

    weights, report = train_step(path, 2, 2, range(7), "token-mean", 2, (("adam_offload", adam_offload),))
    return weights, report["policy/grad_norm"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_trains_as_torchs_adamw_does(tmp_path):
    """Two ranks, ZeRO-2, two steps of 1e-2: weights move by about 2e-2 and agree to fp32 noise."""
    path = make_model(tmp_path / "model", "llama")
    (plain, norm), *_ = run_ranks(2, trained, path, False)
    for weights, own_norm in run_ranks(2, trained, path, True, timeout=800):
        assert own_norm == pytest.approx(norm, rel=1e-4)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, plain[name], atol=5e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
