"""Train a reward model on pairs of responses: `torchrun --nproc_per_node 2 cli/train_rm.py --help`."""

from spmdrl.config import parse_config
from spmdrl.config.supervised import RMConfig

if __name__ == "__main__":
    config = parse_config(RMConfig)
    from spmdrl.trainer.reward_training import RewardTraining
    from spmdrl.trainer.supervised_trainer import main

    main(config, RewardTraining(config))
