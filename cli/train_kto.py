"""Train a causal LM on labelled responses (KTO): `torchrun --nproc_per_node 2 cli/train_kto.py --help`."""

from spmdrl.config import parse_config
from spmdrl.config.supervised import KTOConfig
from spmdrl.launch import keep_notices

if __name__ == "__main__":
    config = parse_config(KTOConfig)
    keep_notices()
    from spmdrl.trainer.kto import KTO
    from spmdrl.trainer.supervised_trainer import main

    main(config, KTO(config))
