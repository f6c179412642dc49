"""Merge a LoRA adapter into its base: `python cli/merge_lora.py --lora_path ADAPTER --output_path MODEL`."""

import sys

from spmdrl.config import parse_config
from spmdrl.config.merge import MergeLoraConfig
from spmdrl.errors import UserError

if __name__ == "__main__":
    config = parse_config(MergeLoraConfig)
    from spmdrl.models.merge import merge_lora
    from spmdrl.quiet import quiet_libraries

    quiet_libraries(is_main=True)
    try:
        print(merge_lora(config))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
