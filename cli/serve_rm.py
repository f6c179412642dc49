"""Serve a reward model over HTTP: `python cli/serve_rm.py --reward_pretrain MODEL`."""

import sys

from spmdrl.config import parse_config
from spmdrl.config.serve import ServeRMConfig
from spmdrl.errors import UserError

if __name__ == "__main__":
    config = parse_config(ServeRMConfig)
    from spmdrl.quiet import quiet_libraries
    from spmdrl.rewards.server import serve

    quiet_libraries(is_main=True)
    try:
        serve(config)
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
