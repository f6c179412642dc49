"""Fine-tune a causal LM on responses or plain texts: `torchrun --nproc_per_node 2 cli/train_sft.py --help`."""

from spmdrl.config import parse_config
from spmdrl.config.supervised import SFTConfig
from spmdrl.launch import keep_notices

if __name__ == "__main__":
    config = parse_config(SFTConfig)
    keep_notices()
    from spmdrl.trainer.objectives import SFT
    from spmdrl.trainer.supervised_trainer import main

    main(config, SFT(config))
