"""U85: vllm, wandb, peft, flash_attn, tensorboard, matplotlib, math_verify are needed only by what asks for them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launched import ROOT, TRAIN, assert_trained, launch, tiny_flags, torchrun

HIDDEN = str(Path(__file__).parent / "programs" / "hidden")  # an environment in which they are not found

IMPORT_EVERYTHING = """
import importlib, importlib.util, pkgutil
import spmdrl
assert importlib.util.find_spec("vllm") is None
for module in pkgutil.walk_packages(spmdrl.__path__, "spmdrl."):
    importlib.import_module(module.name)

from spmdrl.config import TrackingConfig
from spmdrl.errors import UserError
from spmdrl.tracking import Tracker
for asked in ({"use_wandb": "offline"}, {"use_tensorboard": r"%s"}):
    try:
        Tracker(TrackingConfig(**asked), save_path=r"%s", run_config={}, is_main=True, total_steps=1)
    except UserError as error:
        print(error)
"""


def run_python(*words: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": HIDDEN}
    return subprocess.run([sys.executable, *words], env=env, cwd=ROOT, capture_output=True, text=True, timeout=200)


@pytest.mark.slow
def test_every_module_imports_and_what_is_missing_is_named_when_asked_for(tmp_path):
    done = run_python("-c", IMPORT_EVERYTHING % (tmp_path, tmp_path))
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("--use_")]
    assert said == [
        "--use_wandb: wandb is not installed: pip install wandb",
        "--use_tensorboard: tensorboard is not installed: pip install tensorboard",
    ]


@pytest.mark.parametrize("script", sorted((ROOT / "cli").glob("*.py")), ids=lambda path: path.name)
def test_help_needs_none_of_them(script):
    done = run_python(str(script), "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.slow
def test_a_run_of_two_ranks_says_that_it_samples_with_hugging_face(tmp_path):
    flags = tiny_flags(tmp_path, save_path=tmp_path / "out", engine="auto")
    run = launch(torchrun(TRAIN, *flags), tmp_path / "log", PYTHONPATH=HIDDEN)
    assert_trained(run, tmp_path / "out", ranks=2)
    assert len(run.lines("vLLM is not installed: sampling with Hugging Face generate")) == 1
    assert len(run.lines("matplotlib is not installed: there will be no metrics.png")) == 1


@pytest.mark.parametrize(
    ("flag", "value", "package"),
    [("engine", "vllm", "vllm"), ("use_wandb", "offline", "wandb"), ("use_tensorboard", "logs", "tensorboard")],
)
def test_a_flag_that_needs_a_missing_package_is_one_line(tmp_path, flag, value, package):
    done = run_python(TRAIN, *tiny_flags(tmp_path, **{flag: value}))
    assert done.returncode == 2
    assert done.stderr.startswith("error: --")
    assert f"needs the package {package}: " in done.stderr
    assert done.stderr.count("\n") == 1
