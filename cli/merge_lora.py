"""Merge a LoRA adapter into its base: `python cli/merge_lora.py --lora_path ADAPTER --output_path MODEL`."""

import sys
from pathlib import Path

from spmdrl.config import parse_config
from spmdrl.config.merge import MergeLoraConfig
from spmdrl.errors import UserError

if __name__ == "__main__":
    config = parse_config(MergeLoraConfig)
    from spmdrl.models.merge import merge_lora
    from spmdrl.quiet import quiet_libraries
    from spmdrl.trainer.directory_lock import held

    quiet_libraries(is_main=True)
    try:
        with held(Path(str(config.output_path)).expanduser(), "output_path", print):
            print(merge_lora(config))
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
