"""A run that came to its end and is started again by the same command, as by a chain of jobs, is left as it is."""

import pytest

from spmdrl.trainer import ppo_trainer, supervised_trainer
from spmdrl.trainer.saving import RunFinished
from tests.trainer import runs, supervised


def everything_in(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


def ends_again(build, folder, monkeypatch, module):
    """Without --save_steps, before any model is loaded, and without a change of any file."""
    build().fit()
    before = everything_in(folder)
    assert folder / "config.json" in before
    monkeypatch.setattr(module, "Strategy", lambda *args, **options: pytest.fail("a model is about to be loaded"))
    with pytest.raises(RunFinished, match=f"this run is finished, its model is in {folder};"):
        build()
    assert everything_in(folder) == before


def test_ppo_is_left_as_it_is(tmp_path, one_rank, monkeypatch):
    flags = runs.write_inputs(tmp_path / "inputs", num_prompts=4)
    folder = tmp_path / "run"
    ends_again(lambda: runs.build(folder, **flags, load_checkpoint=True), folder, monkeypatch, ppo_trainer)


@pytest.mark.parametrize("program", ["sft", "rm"])
def test_a_supervised_run_is_left_as_it_is(tmp_path, one_rank, monkeypatch, program):
    flags = supervised.write_inputs(tmp_path / "inputs")
    del flags["teacher_model"]
    folder = tmp_path / "run"
    build = lambda: supervised.build(program, folder, **flags, load_checkpoint=True)  # noqa: E731
    ends_again(build, folder, monkeypatch, supervised_trainer)
