"""Train a policy with PPO or a critic-free relative: `torchrun --nproc_per_node 2 cli/train_ppo.py --help`."""

from spmdrl.config import PPOConfig, parse_config
from spmdrl.launch import keep_notices

if __name__ == "__main__":
    config = parse_config(PPOConfig)
    keep_notices()
    from spmdrl.trainer.ppo_trainer import main

    main(config)
