"""Train a reward model on pairs of responses: `torchrun --nproc_per_node 2 cli/train_rm.py --help`."""

from spmdrl.config import parse_config
from spmdrl.config.supervised import RMConfig
from spmdrl.launch import keep_notices

if __name__ == "__main__":
    config = parse_config(RMConfig)
    keep_notices()
    from spmdrl.trainer.reward_training import RewardTraining
    from spmdrl.trainer.supervised_trainer import main

    main(config, RewardTraining(config))
