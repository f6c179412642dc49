"""A run that came to its end and is started again by the same command, as by a chain of jobs, is left as it is."""

from pathlib import Path

import pytest

from spmdrl.errors import UserError
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


@pytest.mark.parametrize("program", ["ppo", "sft"])
def test_a_model_that_cannot_be_written_at_the_end_is_not_lost(tmp_path, one_rank, monkeypatch, program):
    """Whatever refuses: the same command then writes it, without training."""
    helpers = runs if program == "ppo" else supervised
    flags = helpers.write_inputs(tmp_path / "inputs")
    for other in ("teacher_model", "eval_dataset"):
        flags.pop(other, None)

    def build():
        options = flags | {"load_checkpoint": True}
        if program == "ppo":
            return runs.build(tmp_path / "run", **options)
        return supervised.build(program, tmp_path / "run", **options)

    trainer = build()
    trained = trainer.tokenizer.save_pretrained

    def refuse(folder):
        trained(folder)
        raise ValueError("no\nway")

    monkeypatch.setattr(trainer.tokenizer, "save_pretrained", refuse)
    message = r"cannot write the model: ValueError: no way; checkpoint saved in .*: the same command with --load_check"
    with pytest.raises(UserError, match=message):
        trainer.fit()
    assert not (tmp_path / "run" / "config.json").exists()
    again = build()
    monkeypatch.setattr(again, "train", lambda *_: pytest.fail("trained again"))
    again.fit()
    assert (tmp_path / "run" / "config.json").exists()


@pytest.mark.parametrize("program", ["ppo", "rm"])
def test_the_first_models_folder_is_not_needed_at_the_end(tmp_path, one_rank, monkeypatch, program):
    """A reward function may have changed the directory that its name is relative to; a cache may have been cleared."""
    from transformers import AutoConfig

    helpers = runs if program == "ppo" else supervised
    flags = helpers.write_inputs(tmp_path / "inputs")
    monkeypatch.chdir(tmp_path / "inputs")
    flags["pretrain"] = Path(flags["pretrain"]).name
    if program == "ppo":
        gae = {"advantage_estimator": "gae", "save_value_network": True}
        trainer = runs.build(tmp_path / "run", **flags, **gae)
    else:
        trainer = supervised.build(program, tmp_path / "run", **flags)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    trainer.fit()
    saved = [tmp_path / "run"] + ([tmp_path / "run" / "critic"] if program == "ppo" else [])
    assert [AutoConfig.from_pretrained(folder).vocab_size for folder in saved] == [320] * len(saved)
