"""What a run that comes back holds for its best model."""

import json
import math

import pytest

from spmdrl.config import CheckpointConfig
from spmdrl.trainer.saving import Saver
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


def make_saver(folder, eval_dataset="a.jsonl", **flags):
    description = {"program": "PPOConfig", "flags": {"eval_dataset": eval_dataset}, "contents": {}}
    saver = Saver(Still(), CheckpointConfig(ckpt_path=str(folder), **flags), description)
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
