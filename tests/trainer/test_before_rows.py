"""What every trainer says before it reads rows."""

import pytest
import torch

from spmdrl.config import PPOConfig
from spmdrl.config.generate import GenerateConfig
from spmdrl.config.parse import read_config
from spmdrl.config.supervised import RMConfig
from spmdrl.errors import UserError
from spmdrl.trainer import generation, ppo_trainer, supervised_trainer
from spmdrl.trainer.reward_training import RewardTraining
from spmdrl.trainer.supervised_trainer import SupervisedTrainer
from tests.tiny import make_model, make_tokenizer

TRAINERS = {
    "ppo": (PPOConfig, "prompt_data", ppo_trainer, ppo_trainer.PPOTrainer),
    "rm": (RMConfig, "dataset", supervised_trainer, lambda config: SupervisedTrainer(config, RewardTraining(config))),
    "generate": (GenerateConfig, "dataset", generation, generation.Generation),
}
PROGRAMS = pytest.mark.parametrize("program", TRAINERS)


def refusal(program, *words):
    """Of a run without rows and without a model."""
    cls, data, _, make = TRAINERS[program]
    with pytest.raises(UserError) as error:
        make(read_config(cls, [f"--{data}", "/no/rows.jsonl", *words]))
    return str(error.value)


@PROGRAMS
def test_what_the_device_cannot_do(program, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refusal(program, "--attention", "flash_attention_2")
    assert said == "--attention flash_attention_2 (--flash_attn) needs a GPU"
    if program != "generate":
        assert refusal(program, "--lora_rank", "2", "--load_in_4bit").startswith("--load_in_4bit needs a GPU")


@PROGRAMS
def test_that_there_is_a_chat_template_which_nobody_asked_for(program, one_rank, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(TRAINERS[program][2], "load_tokenizer", lambda config: make_tokenizer())
    model = make_model(tmp_path / "model")
    for words, count in (([], 1), (["--apply_chat_template"], 0)):
        assert refusal(program, "--pretrain", model, *words).endswith("no such file or directory")
        assert capsys.readouterr().out.count("rows are plain text; --pretrain has a chat template") == count
