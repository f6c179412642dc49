"""What the README says is what there is: its commands run, its code is the code, its links and files exist."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_model

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def commands():
    """Every command of the bash blocks, line continuations joined, comments off."""
    text = "\n".join(blocks("bash")).replace("\\\n", " ")
    return [line.split(" #")[0].strip() for line in text.splitlines() if line.split("#")[0].strip()]


def statements(code):
    """Lines of code without comments and indentation."""
    return [line for raw in code.splitlines() if (line := raw.split("  #")[0].strip())]


def test_the_loop_in_the_readme_is_the_loop_of_the_trainer():
    fit = next(block for block in blocks("python") if "self.rollout" in block)
    source = (ROOT / "spmdrl" / "trainer" / "ppo_trainer.py").read_text()
    position = source.index("def _fit(self)")
    for line in statements(fit):
        assert line in source[position:], f"{line!r} is not in PPOTrainer.fit, or not in that order"
        position = source.index(line, position)


def test_the_reward_in_the_readme_is_a_reward(tmp_path):
    from spmdrl.rewards.function import RewardFunction
    from spmdrl.rewards.source import RewardBatch

    file = tmp_path / "reward.py"
    file.write_text(next(block for block in blocks("python") if "def reward_func" in block))
    reward = RewardFunction(str(file))
    queries, ids = ["2 + 2 = 4", "2 + 2 = 5"], ["row 1", "row 2"]
    out = reward(RewardBatch(queries, ["2 + 2 = "] * 2, ["4", "4"], {"kind": ["sum"] * 2}, ids))
    assert out.rewards.tolist() == [1.0, 0.0]


def test_make_targets_files_and_links_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for command in commands():
        if command.startswith("make "):
            assert command.split()[1] in targets, command
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link
    tree = README[README.index("cli/                 a thin") :].split("```")[0]
    for line in tree.splitlines():
        for path in re.findall(r"^[\w/.]+|(?<=  )\w+/(?=  |$)", line):
            assert (ROOT / path).exists(), path


def test_flags_that_the_readme_names_exist():
    from spmdrl.config import PPOConfig
    from spmdrl.config.flags import flags_of

    outside = {"help", "config", "standalone", "nproc_per_node", "num_gpus"}
    named = set(re.findall(r"(?<![\w-])--(\w+)", README)) - outside - {"no"}
    assert named <= set(flags_of(PPOConfig)), named - set(flags_of(PPOConfig))


@pytest.mark.slow
def test_the_main_job_runs_as_written(tmp_path):
    """The torchrun command, word for word but for a tiny model and folders of the test's own."""
    job = next(command for command in commands() if command.startswith("torchrun"))
    data = tmp_path / "arithmetic.jsonl"
    made = [sys.executable, "examples/make_arithmetic.py", str(data), "--num", "32"]
    subprocess.run(made, cwd=ROOT, check=True, timeout=60)
    words = [
        {
            "torchrun": str(Path(sys.executable).with_name("torchrun")),
            "runs/models/SmolLM2-135M-Instruct": make_model(tmp_path / "model", max_positions=128),
            "runs/data/arithmetic.jsonl": str(data),
            "runs/mine": str(tmp_path / "out"),
        }.get(word, word)
        for word in shlex.split(job)
    ]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("model.safetensors", "config.json", "metrics.jsonl", "samples.jsonl", "metrics.png", "config.yaml"):
        assert (tmp_path / "out" / name).stat().st_size > 0, name
