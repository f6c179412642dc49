"""Runs of cli/generate.py on tiny models."""

from pathlib import Path
from typing import Any

from spmdrl.config.generate import GenerateConfig
from spmdrl.config.parse import read_config
from spmdrl.trainer import generation
from tests.tiny import make_model, write_jsonl
from tests.trainer.runs import read_jsonl

NUM_PROMPTS = 7
FLAGS: dict[str, Any] = {
    "engine": "hf",
    "input_key": "question",
    "label_key": "answer",
    "n_samples_per_prompt": 3,
    "rollout_batch_size": 2,
    "micro_rollout_batch_size": 2,
    "max_new_tokens": 6,
    "prompt_max_len": 48,
    "bf16": False,
}
# A reward that varies with every character of the response. With KILL_AT the process ends itself in that call.
REWARD = """
import os, signal, time, zlib

calls = 0

def reward_func(queries, prompts, labels, **columns):
    global calls
    calls += 1
    if str(calls) == os.environ.get("KILL_AT"):
        os.kill(os.getpid(), int(os.environ["KILL_BY"]))
        time.sleep(2)  # in which a signal that is not SIGKILL is heard
    return [zlib.crc32(query[len(prompt):].encode()) % 8 / 4 for query, prompt in zip(queries, prompts)]
"""


def write_inputs(folder: Path, **model: Any) -> dict[str, Any]:
    """Flags that name a new model, seven prompts between other columns, and a reward function."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "reward.py").write_text(REWARD)
    rows = [{"id": i, "question": "ab" * i + "?", "answer": {"value": i}, "z": None} for i in range(NUM_PROMPTS)]
    return {
        "pretrain": make_model(folder / "model", **{"arch": "llama", **model}),
        "dataset": write_jsonl(folder / "prompts.jsonl", rows),
        "reward_func": f"{folder / 'reward.py'}:reward_func",
    }


def words(**flags: Any) -> list[str]:
    """FLAGS with these in place of their own, as a command line; None takes a flag out."""
    out: list[str] = []
    for name, value in (FLAGS | flags).items():
        if isinstance(value, bool):
            out.append(f"--{name}" if value else f"--no_{name}")
        elif value is not None:
            out += [f"--{name}", str(value)]
    return out


def generate(output_path: str | Path, **flags: Any) -> list[dict[str, Any]]:
    """The rows of a run on this rank or, where all call it, on all of them."""
    config = read_config(GenerateConfig, words(output_path=output_path, **flags))
    generation.Generation(config).run()
    return read_jsonl(Path(output_path))
