"""Short whole runs of the supervised programs on tiny models."""

from pathlib import Path
from typing import Any

import torch

from spmdrl.config.parse import read_config
from spmdrl.config.supervised import DPOConfig, KDConfig, KTOConfig, RMConfig, SFTConfig
from spmdrl.distributed import comm
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.trainer.dpo import DPO
from spmdrl.trainer.kd import Distillation
from spmdrl.trainer.kto import KTO
from spmdrl.trainer.objectives import SFT
from spmdrl.trainer.reward_training import RewardTraining
from spmdrl.trainer.supervised_trainer import SupervisedTrainer
from tests.tiny import make_model, write_jsonl
from tests.trainer.runs import read_jsonl

CONFIGS = {"sft": SFTConfig, "rm": RMConfig, "dpo": DPOConfig, "kto": KTOConfig, "kd": KDConfig}
OBJECTIVES = {"sft": SFT, "rm": RewardTraining, "dpo": DPO, "kto": KTO, "kd": Distillation}
FLAGS: dict[str, Any] = {
    "max_len": 64,
    "train_batch_size": 4,
    "micro_train_batch_size": 3,
    "max_epochs": 1,
    "learning_rate": 1e-3,
    "lr_warmup_ratio": 0.0,
    "zero_stage": 0,
    "bf16": False,
}
OWN_FLAGS: dict[str, dict[str, Any]] = {
    "sft": {"output_key": "chosen", "input_key": "prompt"},
    "rm": {"prompt_key": "prompt"},
    "dpo": {"prompt_key": "prompt", "beta": 0.5},
    "kto": {"output_key": "chosen", "input_key": "prompt", "beta": 0.5},
    "kd": {"output_key": "chosen", "input_key": "prompt"},
}
ROWS = [
    {
        "prompt": f"What is {i} plus {i}?",
        "chosen": f"{2 * i} of course",
        "rejected": "no" * (i % 4 + 1),
        "label": i % 3 > 0,
    }
    for i in range(10)
]
HELD_OUT = [
    {"prompt": f"{i} times 3?", "chosen": f"the answer is {3 * i}", "rejected": "a" * i, "label": i % 2}
    for i in range(1, 6)
]


def write_inputs(folder: Path, **model: Any) -> dict[str, Any]:
    """Flags that name a new model, a teacher, ten rows that fit every program and five held-out ones."""
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "pretrain": make_model(folder / "model", **{"arch": "llama", **model}),
        "teacher_model": make_model(folder / "teacher", "llama", seed=5, hidden_size=32, num_heads=1, num_kv_heads=1),
        "dataset": write_jsonl(folder / "rows.jsonl", ROWS),
        "eval_dataset": write_jsonl(folder / "held_out.jsonl", HELD_OUT),
    }


def build(program: str, save_path: str | Path, **flags: Any) -> SupervisedTrainer:
    """FLAGS, those of the program and these; None takes a flag out."""
    if program != "kd":
        flags.pop("teacher_model", None)
    own = {"save_path": str(save_path), "ckpt_path": f"{save_path}/checkpoints"}
    words: list[str] = []
    for name, value in ({**FLAGS, **OWN_FLAGS[program], **own} | flags).items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    config = read_config(CONFIGS[program], words)
    return SupervisedTrainer(config, OBJECTIVES[program](config))


def run(program: str, save_path: str | Path, **flags: Any) -> SupervisedTrainer:
    trainer = build(program, save_path, **flags)
    trainer.fit()
    return trainer


def weights_of(trainer: SupervisedTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in iter_weights(trainer.engine, bucket_mb=64)}


def logged(trainer: SupervisedTrainer, kind: str) -> list[dict[str, float]]:
    """Rows of metrics.jsonl, without times: kind train or eval."""
    comm.barrier()  # the main rank has written
    rows = read_jsonl(Path(trainer.config.checkpoint.save_path, "metrics.jsonl"))
    return [
        {name: value for name, value in row.items() if name.startswith(f"{kind}/")}
        for row in rows
        if any(name.startswith(f"{kind}/") for name in row)
    ]
