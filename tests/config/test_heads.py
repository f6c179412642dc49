"""Heads that give more than one number are refused before anything loads, by the headers of the checkpoint's files."""

import json

import pytest
import torch
from safetensors.torch import save_file

from spmdrl.config import PPOConfig
from spmdrl.config.generate import GenerateConfig
from spmdrl.config.heads import check_head
from spmdrl.config.parse import read_config
from spmdrl.config.serve import ServeRMConfig
from spmdrl.config.supervised import RMConfig
from spmdrl.errors import UserError


def write(folder, shapes, *, sharded=False):
    """A checkpoint with weights of these names and shapes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    weights = {name: torch.zeros(shape) for name, shape in {"model.norm.weight": (4,), **shapes}.items()}
    if not sharded:
        save_file(weights, folder / "model.safetensors")
        return str(folder)
    files = {name: f"{number}.safetensors" for number, name in enumerate(weights)}
    for name, file in files.items():
        save_file({name: weights[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return str(folder)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    ("shapes", "wide"),
    [
        ({}, None),
        ({"score.weight": (1, 4)}, None),
        ({"score.weight": (2, 4)}, ("score", 2)),
        ({"v_head.summary.weight": (3, 4), "v_head.summary.bias": (3,)}, ("v_head", 3)),
        ({"value_head.weight": (1, 4), "v_head.weight": (2, 4)}, None),
        ({"own.weight": (5, 4), "score.weight": (1, 4)}, ("own", 5)),
        ({"scores.weight": (2, 4), "lm_head.weight": (9, 4)}, None),
        ({"score.dense.weight": (4, 4), "score.out.weight": (1, 4)}, None),  # no one layer: what loads it says so
    ],
    ids=str,
)
def test_the_width_of_the_head_that_would_be_read_counts(tmp_path, shapes, wide, sharded):
    name = write(tmp_path / "model", shapes, sharded=sharded)
    if wide is None:
        return check_head("reward_pretrain", name, "own")
    with pytest.raises(UserError) as error:
        check_head("reward_pretrain", name, "own")
    assert str(error.value) == f"--reward_pretrain {name}: its head {wide[0]!r} has width {wide[1]}, not 1"


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x05\0\0\0\0\0\0\0[1,2]", b"\x02\0\0\0\0\0\0\0{}"])
def test_damaged_files_are_left_to_what_loads_them(tmp_path, content):
    name = write(tmp_path / "model", {"score.weight": (2, 4)})
    (tmp_path / "model" / "model.safetensors").write_bytes(content)
    check_head("reward_pretrain", name, "score")
    (tmp_path / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"score.weight": "gone"}}')
    check_head("reward_pretrain", name, "score")


def test_each_program_looks_at_the_heads_that_it_reads(tmp_path, model_dir, complete):
    wide, one = write(tmp_path / "wide", {"score.weight": (2, 4)}), write(tmp_path / "one", {"score.weight": (1, 4)})
    output = ["--dataset", str(tmp_path / "prompts.jsonl"), "--output_path", str(tmp_path / "new.jsonl")]
    gae = [*complete, "--advantage_estimator", "gae"]
    cases = [
        (PPOConfig, complete, "reward_pretrain"),
        (PPOConfig, gae, "critic_pretrain"),
        (PPOConfig, gae, "pretrain"),  # where the critic starts from
        (GenerateConfig, ["--pretrain", str(model_dir), *output], "reward_pretrain"),
        (RMConfig, ["--dataset", str(tmp_path / "prompts.jsonl")], "pretrain"),
        (ServeRMConfig, [], "reward_pretrain"),
    ]
    for cls, words, flag in cases:
        read_config(cls, [*words, f"--{flag}", one]).validate(1)
        with pytest.raises(UserError, match=f"^--{flag} {wide}: its head 'score' has width 2, not 1$"):
            read_config(cls, [*words, f"--{flag}", wide]).validate(1)
    read_config(PPOConfig, [*complete, "--pretrain", wide]).validate(1)  # no critic
    read_config(PPOConfig, [*gae, "--pretrain", wide, "--critic_pretrain", one]).validate(1)
