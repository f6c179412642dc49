"""Train a causal LM on pairs of responses with DPO: `torchrun --nproc_per_node 2 cli/train_dpo.py --help`."""

from spmdrl.config import parse_config
from spmdrl.config.supervised import DPOConfig
from spmdrl.launch import keep_notices

if __name__ == "__main__":
    config = parse_config(DPOConfig)
    keep_notices()
    from spmdrl.trainer.dpo import DPO
    from spmdrl.trainer.supervised_trainer import main

    main(config, DPO(config))
