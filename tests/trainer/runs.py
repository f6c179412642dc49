"""Short whole runs of the trainer, on tiny models, with what they sampled, logged and trained."""

import json
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.distributed import comm
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.experience import Sample
from spmdrl.rollout.engine import Completion, Request, SamplingOptions
from spmdrl.trainer import ppo_trainer
from spmdrl.trainer.ppo_trainer import PPOTrainer
from spmdrl.trainer.update import TrainBatch
from tests.tiny import make_model, write_jsonl

FLAGS: dict[str, Any] = {
    "engine": "hf",
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 2,
    "train_batch_size": 8,
    "micro_train_batch_size": 3,
    "micro_rollout_batch_size": 2,
    "prompt_max_len": 48,
    "generate_max_len": 8,
    "advantage_estimator": "group_norm",
    "actor_learning_rate": 1e-3,
    "lr_warmup_ratio": 0.0,
    "zero_stage": 0,
    "input_key": "question",
    "label_key": "answer",
    "bf16": False,
}
# A reward that varies with every character of the response, whatever a random model says.
REWARD = """
import zlib

def reward_func(queries, prompts, labels, **columns):
    return [zlib.crc32(query[len(prompt):].encode()) % 8 / 4 for query, prompt in zip(queries, prompts)]
"""


def write_inputs(
    folder: Path,
    *,
    num_prompts: int = 8,
    reward: str = REWARD,
    rows: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    eos_ids: list[int] | None = None,
    **model: Any,
) -> dict[str, Any]:
    """Flags that name a new model, prompts of different lengths and a reward function.

    config: values for config.json. eos_ids: for generation_config.json; many of them make responses of many lengths.
    """
    folder.mkdir(parents=True, exist_ok=True)
    numbers = range(1, num_prompts + 1)
    rows = rows or [{"question": "ab" * i + "?", "answer": {"value": i}, "number": i} for i in numbers]
    (folder / "reward.py").write_text(reward)
    path = make_model(folder / "model", **{"arch": "llama", **model})
    if config:
        file = Path(path, "config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | config))
    if eos_ids:
        Path(path, "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    return {
        "pretrain": path,
        "prompt_data": write_jsonl(folder / "prompts.jsonl", rows),
        "remote_rm_url": str(folder / "reward.py"),
    }


def config_of(save_path: str | Path, **flags: Any) -> PPOConfig:
    """FLAGS with these in place of their own; None takes a flag out."""
    words: list[str] = []
    paths = {"save_path": str(save_path), "ckpt_path": f"{save_path}/ckpt"}
    for name, value in (FLAGS | paths | flags).items():
        if value is None:
            continue
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
            continue
        words += [f"--{name}", *map(str, value if isinstance(value, (tuple, list)) else [value])]
    return read_config(PPOConfig, words)


@dataclass
class Run:
    """What a run left behind. `samples`: by step, those of all ranks, as they were trained on."""

    weights: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    rows: list[dict[str, Any]]
    samples: list[list[Sample]] = field(default_factory=list)
    weight_gap: float | None = None  # of --verify_weight_sync, at the last step

    def ids(self) -> list[list[tuple[int, ...]]]:
        return [[tuple(s.sequence.tolist()) for s in step] for step in self.samples]

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.metrics]


class RecordingTrainer(PPOTrainer):
    """The trainer, and the samples that each step trained on."""

    def __init__(self, config: PPOConfig):
        self.recorded: list[list[Sample]] = []
        super().__init__(config)

    def train(self, batch: TrainBatch) -> dict[str, float]:
        self.recorded.append(batch.samples)
        return super().train(batch)

    def result(self) -> Run:
        folder = Path(self.config.checkpoint.save_path)
        comm.barrier()  # the main rank has written
        return Run(
            weights={name: w.clone() for name, w in iter_weights(self.actor, bucket_mb=64)},
            metrics=read_jsonl(folder / "metrics.jsonl"),
            rows=read_jsonl(folder / "samples.jsonl"),
            samples=self.recorded,
            weight_gap=getattr(self, "weight_gap", None),
        )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def engine_in_place(engine: Any) -> Any:
    """Trainers built in the block get `engine`; if that is a function, what it makes of the one of --engine."""
    own = ppo_trainer.build_engine

    def build_engine(*args: Any, **kwargs: Any) -> Any:
        if engine is not None and not callable(engine):
            return engine
        made = own(*args, **kwargs)
        return made if engine is None else engine(made)

    ppo_trainer.build_engine = build_engine
    try:
        yield
    finally:
        ppo_trainer.build_engine = own


def build(save_path: str | Path, in_place: Any = None, **flags: Any) -> RecordingTrainer:
    with engine_in_place(in_place):
        return RecordingTrainer(config_of(save_path, **flags))


def run(save_path: str | Path, in_place: Any = None, **flags: Any) -> Run:
    trainer = build(save_path, in_place, **flags)
    trainer.fit()
    return trainer.result()


class FakeEngine:
    """Returns canned responses and records its calls. `answer(number of the request in the run, request, options)`."""

    name = "fake"
    own_forward = False

    def __init__(self, answer: Callable[[int, Request, SamplingOptions], Completion], *, resets: bool = True):
        self.answer, self.resets = answer, resets
        self.calls: list[Any] = []
        self.requests: list[Request] = []

    def generate(self, requests: Sequence[Request], options: SamplingOptions) -> list[Completion]:
        self.calls.append("generate")
        first = len(self.requests)
        self.requests += requests
        return [self.answer(first + i, request, options) for i, request in enumerate(requests)]

    def load_weights(self, weights: Any) -> None:
        self.calls.append(("load_weights", [name for name, _ in weights]))

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets

    def sleep(self) -> None:
        self.calls.append("sleep")

    def wake_up(self, tags: Sequence[str]) -> None:
        self.calls.append(("wake_up", tuple(tags)))


def completion(ids: Sequence[int], reason: str = "stop", log_prob: float = -2.0) -> Completion:
    return Completion(list(ids), [log_prob] * len(ids), reason)


def canned(*responses: Completion) -> Callable[[int, Request, SamplingOptions], Completion]:
    """These responses in turn, over and over."""
    return lambda number, request, options: responses[number % len(responses)]


class PerturbedEngine:
    """An engine with one weight off by a little, as after a sync that went wrong."""

    def __init__(self, engine, by=0.05):
        self.engine, self.by = engine, by

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def load_weights(self, weights):
        self.engine.load_weights((n, w + self.by if "layers.1.mlp.down_proj" in n else w) for n, w in weights)
