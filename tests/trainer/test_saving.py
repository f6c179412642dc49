"""What a run that comes back holds for its best model, whether it is finished, and whose directory it is."""

import json
import math
import shutil
import socket

import pytest

from spmdrl.config import CheckpointConfig
from spmdrl.distributed.preemption import Preempted
from spmdrl.errors import UserError
from spmdrl.trainer import directory_lock
from spmdrl.trainer.anomalies import AnomalyStop
from spmdrl.trainer.saving import RunFinished, Saver, fit
from tests.trainer.lock_holder import held_elsewhere, is_free_for_others
from tests.trainer.test_checkpoint import Numbers


class Still:
    """A trainer that trains nothing."""

    step, updates = 0, None

    def shards(self):
        return {"numbers": Numbers()}

    def state_dict(self):
        return {}

    def work_state(self):
        return None, None

    def load_state_dict(self, state, work, work_of_ranks):
        pass

    def export(self, folder, flag):
        folder.mkdir()


def make_saver(folder, eval_dataset="a.jsonl", keeps_best=False, given=None, **flags):
    """given: other flags, which only the description has."""
    described = {"eval_dataset": eval_dataset, "num_episodes": 1, "lr_scheduler": "constant"} | (given or {})
    description = {"program": "PPOConfig", "flags": described, "contents": {}}
    config = CheckpointConfig(ckpt_path=str(folder), **flags)
    saver = Saver(Still(), config, description, keeps_best=keeps_best)
    saver.restore()
    return saver


def best_in(folder):
    (found,) = (folder / "best").glob("step_*/state.json")
    return json.loads(found.read_text())["state"]["metric"]


def saved_with_best(folder, metric):
    saver = make_saver(folder)
    saver.keep_best(0, metric)
    saver.settle()
    return saver


def test_a_rollback_does_not_replace_the_best_model_by_a_lesser_one(tmp_path):
    saver = saved_with_best(tmp_path, 0.5)
    saver.save_state()
    saver.keep_best(2, 0.9)
    assert saver.roll_back()
    saver.keep_best(2, 0.7)
    assert best_in(tmp_path) == saver.best == 0.9


@pytest.mark.parametrize(("eval_dataset", "best"), [("a.jsonl", 0.5), ("b.jsonl", -math.inf)])
def test_the_best_by_another_evaluation_counts_no_more(tmp_path, eval_dataset, best):
    saved_with_best(tmp_path, 0.5).save_state()
    saver = make_saver(tmp_path, eval_dataset, load_checkpoint=True)
    assert saver.best == best
    saver.keep_best(1, 0.1)
    assert best_in(tmp_path) == max(best, 0.1)


# ---- finished runs --------------------------------------------------------------------------------------------------
@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 1000)
    return folder


def finished(tmp_path, model, **flags):
    make_saver(tmp_path / "ckpt", load_checkpoint=True, **flags).finish_run(model)


def test_a_finished_run_is_not_trained_again(tmp_path, model, capsys):
    """Without a single checkpoint; the line says where its model is."""
    finished(tmp_path, model)
    made = []
    fit(lambda: made.append(make_saver(tmp_path / "ckpt", load_checkpoint=True)), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert not made
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(
        f"this run is finished, its model is in {model}; to train it again, leave --load_checkpoint"
    )


def test_where_something_is_left_to_do_it_is_done(tmp_path):
    trained = []

    class Trainer:
        def fit(self):
            trained.append(self)

    fit(Trainer, str(tmp_path))
    assert len(trained) == 1


def change_weights(folder):
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "model.safetensors").write_bytes(content)


LOSSES = {
    "the directory": shutil.rmtree,
    "the weights": lambda folder: (folder / "model.safetensors").unlink(),
    "to another run": change_weights,
}


@pytest.mark.parametrize("lose", LOSSES.values(), ids=LOSSES)
def test_a_finished_run_whose_model_is_gone_goes_on_from_its_newest_checkpoint(tmp_path, model, capsys, lose):
    saver = make_saver(tmp_path / "ckpt", load_checkpoint=True)
    saver.save_state()
    saver.finish_run(model)
    lose(model)
    capsys.readouterr()
    make_saver(tmp_path / "ckpt", load_checkpoint=True)
    said = capsys.readouterr().out
    assert f"this run was finished, but its model is no longer in {model}" in said
    assert f"resuming from {tmp_path / 'ckpt' / 'step_000000'}" in said


@pytest.mark.parametrize(
    ("given", "is_finished"),
    [
        ({"save_path": "elsewhere", "micro_train_batch_size": 2}, True),
        ({"num_episodes": 2}, False),
        ({"save_value_network": True}, False),
        ({"temperature": 0.5}, False),
    ],
)
def test_other_flags_are_another_run_where_they_change_what_comes_out(tmp_path, model, capsys, given, is_finished):
    before = {"save_path": "out", "micro_train_batch_size": 1, "temperature": 1.0, "save_value_network": False}
    finished(tmp_path, model, given=before)
    try:
        make_saver(tmp_path / "ckpt", given=before | given, load_checkpoint=True)
    except RunFinished:
        assert is_finished
    else:
        assert not is_finished
        (name,) = given
        assert f"finished: of a run with other flags: --{name} " in capsys.readouterr().out


def test_only_a_run_that_can_be_resumed_leaves_a_mark_and_one_from_the_beginning_removes_it(tmp_path, model):
    make_saver(tmp_path / "ckpt", save_steps=1).finish_run(model)
    make_saver(tmp_path / "ckpt", load_checkpoint=True).finish_run(model)
    with pytest.raises(RunFinished):
        make_saver(tmp_path / "ckpt", load_checkpoint=True)
    make_saver(tmp_path / "ckpt")
    make_saver(tmp_path / "ckpt", load_checkpoint=True)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"description": 1, "model": 2, "fingerprint": 3}'])
def test_a_damaged_mark_does_not_count(tmp_path, content):
    (tmp_path / "finished").write_text(content)
    make_saver(tmp_path, load_checkpoint=True)


def test_a_mark_that_the_disk_refuses_does_not_fail_a_run_that_has_saved_its_model(tmp_path, model, capsys):
    saver = make_saver(tmp_path / "ckpt", load_checkpoint=True)
    shutil.rmtree(tmp_path / "ckpt")
    (tmp_path / "ckpt").write_text("a file")
    saver.finish_run(model)
    assert "cannot note that the run is finished" in capsys.readouterr().out


# ---- other runs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("flags", [{"load_checkpoint": True}, {"save_steps": 1}, {"keeps_best": True}], ids=str)
def test_a_run_that_saves_or_resumes_has_its_directory_to_itself(tmp_path, monkeypatch, flags):
    monkeypatch.setattr(directory_lock, "PATIENCE_S", 0.0)
    with held_elsewhere(tmp_path), pytest.raises(UserError, match=f"--ckpt_path {tmp_path} is in use by another run"):
        make_saver(tmp_path, **flags)


def test_a_run_has_the_directory_of_its_output_to_itself_and_leaves_nothing_of_that(tmp_path, monkeypatch):
    """Also where it comes to no end."""
    monkeypatch.setattr(directory_lock, "PATIENCE_S", 0.0)

    class Trainer:
        def fit(self):
            assert not is_free_for_others(tmp_path)
            (tmp_path / "config.json").write_text("{}")

    with held_elsewhere(tmp_path) as holder, pytest.raises(UserError) as error:
        fit(Trainer, str(tmp_path))
    assert str(error.value) == (
        f"--save_path {tmp_path} is in use by another run (pid {holder.pid} on {socket.gethostname()}): "
        "wait until that has ended, or give this one a --save_path of its own"
    )
    assert not (tmp_path / "config.json").exists()
    fit(Trainer, str(tmp_path))
    for place in (tmp_path, tmp_path / "new"):
        with pytest.raises(ZeroDivisionError):
            fit(lambda: 1 / 0, str(place))
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"^--save_path {tmp_path}/file/out: cannot write there: Not a directory$"):
        fit(lambda: pytest.fail("built"), str(tmp_path / "file" / "out"))


@pytest.mark.parametrize("stop", [Preempted("SIGTERM", "here"), AnomalyStop("a spike")], ids=str)
def test_a_run_that_only_saves_when_it_is_stopped_loses_nothing(tmp_path, stop):
    """Where another has the directory, it says what is to be done with what it has saved there."""
    with held_elsewhere(tmp_path) as holder:
        saver = make_saver(tmp_path)
        with pytest.raises(type(stop)) as stopped, saver.saved_when_stopped():
            raise stop
        said = stopped.value.resume if isinstance(stop, Preempted) else str(stopped.value)
        assert f"another run (pid {holder.pid} on " in said
        assert "move that checkpoint into a directory of its own" in said
    (found,) = tmp_path.glob("step_*")
    assert found.name == f"step_000000-{saver.checkpointer.run[:8]}"
