"""Sample responses to the prompts of a data set: `torchrun --nproc_per_node 2 cli/generate.py --help`."""

from spmdrl.config import parse_config
from spmdrl.config.generate import GenerateConfig

if __name__ == "__main__":
    config = parse_config(GenerateConfig)
    from spmdrl.trainer.generation import main

    main(config)
