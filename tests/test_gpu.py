"""What only NVIDIA GPUs can show: `make test-gpu`, a few minutes with one GPU, more is checked with two."""

import importlib.util
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.launched import TRAIN, tiny_flags
from tests.tiny import make_model

CHECK = str(Path(__file__).parent / "programs" / "gpu_check.py")
COUNT = "import torch; print(torch.cuda.device_count())"


def gpu_environment():
    """That of the tests, which see no GPU (conftest.py), with the GPUs back."""
    env, visible = dict(os.environ), os.environ["SPMDRL_TEST_GPUS"]
    del env["CUDA_VISIBLE_DEVICES"]
    return env if visible == "all" else env | {"CUDA_VISIBLE_DEVICES": visible}


@cache
def num_gpus():
    if not Path("/dev/nvidiactl").exists():
        return 0
    asked = subprocess.run([sys.executable, "-c", COUNT], env=gpu_environment(), capture_output=True, text=True)
    return int(asked.stdout or 0)


def needs_gpus(number):
    reason = f"needs {number} NVIDIA GPU{'s' * (number > 1)}, there are {num_gpus()}"
    return pytest.mark.skipif(num_gpus() < number, reason=reason)


ONE, TWO = needs_gpus(1), needs_gpus(2)
RANKS = [pytest.param(1, marks=ONE, id="1 GPU"), pytest.param(2, marks=TWO, id="2 GPUs")]
pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(900)]


def launch(ranks, *command):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run([*launcher, *command], env=gpu_environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With a model whose sizes every attention kernel takes: heads of 64."""
    path = tmp_path_factory.mktemp("gpu")
    tiny_flags(path)  # prompts and a reward
    make_model(path / "model", "llama", hidden_size=256, num_heads=4, num_kv_heads=2, initializer_range=0.05)
    return path


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("check", ["zero_stages", "hand_over", "frozen_offload", "rewards"])
def test_training(folder, check, ranks):
    assert f"{check} holds" in launch(ranks, CHECK, check, folder)


@ONE
def test_attention_kernels_and_layouts_agree(folder):
    said = launch(1, CHECK, "attention", folder)
    if importlib.util.find_spec("flash_attn") is not None:
        assert "flash_attention_2" in said


@ONE
def test_the_engine_sleeps_and_wakes_without_a_trace(folder):
    pytest.importorskip("vllm")
    launch(1, CHECK, "sleep_cycles", folder)


@ONE
def test_lora_on_four_bits_reaches_the_engine(folder):
    pytest.importorskip("vllm")
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    launch(1, CHECK, "four_bits", folder)


PPO = {
    "engine": "vllm",
    "vllm_gpu_memory_utilization": 0.4,
    "enforce_eager": True,
    "advantage_estimator": "gae",
    "init_kl_coef": 0.01,
    "num_episodes": 2,
}
MODES = {
    "awake": {"zero_stage": 2},
    "sleep": {"zero_stage": 2, "vllm_enable_sleep": True},
    "sharded": {"zero_stage": 3, "vllm_enable_sleep": True, "ref_reward_offload": True, "enable_prefix_caching": True},
    "lora": {"zero_stage": 2, "vllm_enable_sleep": True, "lora_rank": 8, "gradient_checkpointing": True},
    "adam_offload": {"zero_stage": 3, "vllm_enable_sleep": True, "adam_offload": True},
}


def ppo_flags(folder, save_path, **flags):
    """Switches have no value; the engine's weights are compared with the trainer's after every sync."""
    given = {**PPO, "verify_weight_sync": True, **flags}
    valued = {name: value for name, value in given.items() if value is not True}
    switches = [f"--{name}" for name, value in given.items() if value is True]
    return [*tiny_flags(folder, save_path=save_path, **valued), *switches]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mode", MODES)
def test_ppo_with_all_roles(folder, tmp_path, mode, ranks):
    pytest.importorskip("vllm")
    flags = ppo_flags(folder, tmp_path, **MODES[mode])
    launch(ranks, TRAIN, *flags)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
    if mode != "lora":
        assert (tmp_path / "model.safetensors").exists()


@TWO
def test_ppo_with_an_engine_over_two_gpus(folder, tmp_path):
    pytest.importorskip("vllm")
    launch(2, TRAIN, *ppo_flags(folder, tmp_path, zero_stage=3, vllm_enable_sleep=True, vllm_tensor_parallel_size=2))


@ONE
def test_a_run_goes_on_from_its_checkpoint(folder, tmp_path):
    pytest.importorskip("vllm")
    flags = {"zero_stage": 3, "vllm_enable_sleep": True, "save_steps": 1, "lr_scheduler": "constant"}
    launch(1, TRAIN, *ppo_flags(folder, tmp_path, **flags, num_episodes=1))
    said = launch(1, TRAIN, *ppo_flags(folder, tmp_path, **flags, load_checkpoint=True))
    assert "resuming from" in said
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2
