"""The command line: every flag with its name, type, default, help and cross-checks; imports no torch."""

from spmdrl.config.flags import parse_config, save_config, to_flat_dict
from spmdrl.config.sections import (
    AlgoConfig,
    CheckpointConfig,
    DeepSpeedConfig,
    ModelConfig,
    OptimConfig,
    PPOConfig,
    PromptDataConfig,
    RewardConfig,
    RolloutConfig,
    TrackingConfig,
)

__all__ = [
    "AlgoConfig",
    "CheckpointConfig",
    "DeepSpeedConfig",
    "ModelConfig",
    "OptimConfig",
    "PPOConfig",
    "PromptDataConfig",
    "RewardConfig",
    "RolloutConfig",
    "TrackingConfig",
    "parse_config",
    "save_config",
    "to_flat_dict",
]
