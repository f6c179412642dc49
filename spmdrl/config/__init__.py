"""The command line: every flag with its name, type, default, help and checks. Imports neither torch nor transformers.

sections.py declares the flags of each component and ppo.py puts them together; parse.py reads a command line.
"""

from spmdrl.config.flags import to_flat_dict
from spmdrl.config.parse import parse_config, save_config
from spmdrl.config.ppo import PPOConfig
from spmdrl.config.sections import (
    AlgoConfig,
    AnomalyConfig,
    CheckpointConfig,
    CriticConfig,
    DeepSpeedConfig,
    EvalConfig,
    LoadConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    OptimizerConfig,
    PromptDataConfig,
    PtxConfig,
    RewardConfig,
    RolloutConfig,
    StoppingConfig,
    TrackingConfig,
)
from spmdrl.config.sizes import BatchSizes, describe_sizes, sizes

__all__ = [
    "AlgoConfig",
    "AnomalyConfig",
    "BatchSizes",
    "CheckpointConfig",
    "CriticConfig",
    "DeepSpeedConfig",
    "EvalConfig",
    "LoadConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimConfig",
    "OptimizerConfig",
    "PPOConfig",
    "PromptDataConfig",
    "PtxConfig",
    "RewardConfig",
    "RolloutConfig",
    "StoppingConfig",
    "TrackingConfig",
    "describe_sizes",
    "parse_config",
    "save_config",
    "sizes",
    "to_flat_dict",
]
