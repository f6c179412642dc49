"""--enable_ema in whole runs: what is saved beside the model, and that a resumed run goes on with it."""

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.errors import UserError
from tests.trainer.runs import build, run, write_inputs


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def test_the_average_lies_beside_the_model_and_loads_elsewhere(tmp_path, one_rank, inputs):
    """With beta 0.75 the average of a run of one update is a quarter of the way from the first weights to the last."""
    from transformers import AutoModelForCausalLM

    flags = {**inputs, "enable_ema": True, "ema_beta": 0.75, "max_samples": 4}
    result = run(tmp_path / "out", **flags, ckpt_path=tmp_path / "ckpt")
    assert len(result.metrics) == 1
    first = dict(AutoModelForCausalLM.from_pretrained(inputs["pretrain"], dtype=torch.float32).named_parameters())
    average = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "ema", dtype=torch.float32)
    for name, weight in average.named_parameters():
        torch.testing.assert_close(weight, 0.75 * first[name] + 0.25 * result.weights[name], atol=1e-6, rtol=0)
    assert (tmp_path / "out" / "ema" / "tokenizer.json").exists()


def test_a_resumed_run_goes_on_with_its_average(tmp_path, one_rank, inputs):
    """1 step and 1 more are the 2 of a run that was not interrupted, bit for bit."""
    flags = {**inputs, "enable_ema": True, "ema_beta": 0.9, "save_steps": 1}
    run(tmp_path / "whole", **flags, ckpt_path=tmp_path / "a")
    trainer = build(tmp_path / "halves", **flags, ckpt_path=tmp_path / "b")
    own_finish = trainer.finish_step

    def finish_step(step, samples, metrics):
        own_finish(step, samples, metrics)
        trainer.saver.finish()
        raise KeyboardInterrupt

    trainer.finish_step = finish_step
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    run(tmp_path / "halves", **flags, ckpt_path=tmp_path / "b", load_checkpoint=True)
    for file in ("model.safetensors", "ema/model.safetensors"):
        whole, halves = load_file(tmp_path / "whole" / file), load_file(tmp_path / "halves" / file)
        assert all(torch.equal(whole[name], halves[name]) for name in whole), file


def test_a_beta_without_an_average_is_refused():
    with pytest.raises(UserError, match="--ema_beta changes nothing without --enable_ema"):
        read_config(PPOConfig, ["--ema_beta", "0.9"])
    with pytest.raises(UserError, match=r"--ema_beta must be from 0 to 1, got 1\.5"):
        read_config(PPOConfig, ["--enable_ema", "--ema_beta", "1.5"])
