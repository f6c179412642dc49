"""DeepSpeed's configurations of machines with GPUs, checked by DeepSpeed's own parser."""

import pytest
import torch

from spmdrl.config import DeepSpeedConfig, OptimConfig
from spmdrl.distributed.strategy import Strategy


@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize("trainable", [True, False])
def test_deepspeed_takes_the_configurations_of_a_machine_with_gpus(monkeypatch, zero_stage, trainable):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    flags = DeepSpeedConfig(
        zero_stage=zero_stage, adam_offload=True, ref_reward_offload=True, overlap_comm=True, grad_accum_dtype="fp32"
    )
    config = Strategy(flags, OptimConfig(), dtype=torch.bfloat16)._ds_config(trainable=trainable)
    assert config["bf16"] == {"enabled": True}
    zero = DeepSpeedZeroConfig(**config["zero_optimization"])
    assert zero.stage == (zero_stage if trainable else 3)
    own, other = zero.offload_optimizer, zero.offload_param
    assert (own is not None and own.pin_memory, other is not None) == (trainable, not trainable)
    assert trainable or other.pin_memory


def test_only_what_is_frozen_is_loaded_into_host_memory():
    """Under ZeRO-3 shards stay where loading puts them, and those that train must be on the device."""
    from transformers.integrations.deepspeed import deepspeed_config

    flags = DeepSpeedConfig(zero_stage=3, ref_reward_offload=True)
    strategy = Strategy(flags, OptimConfig(), dtype=torch.bfloat16)
    with strategy.loading():
        assert "offload_param" not in deepspeed_config()["zero_optimization"]
    with strategy.loading(frozen=True):
        assert deepspeed_config()["zero_optimization"]["offload_param"]["device"] == "cpu"
