"""Distil a teacher into a causal LM: `torchrun --nproc_per_node 2 cli/train_kd.py --help`."""

from spmdrl.config import parse_config
from spmdrl.config.supervised import KDConfig
from spmdrl.launch import keep_notices

if __name__ == "__main__":
    config = parse_config(KDConfig)
    keep_notices()
    from spmdrl.trainer.kd import Distillation
    from spmdrl.trainer.supervised_trainer import main

    main(config, Distillation(config))
