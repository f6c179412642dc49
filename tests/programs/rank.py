"""A rank of tests/ranks.py: `rank.py FOLDER` calls the function in FOLDER/job and leaves its result or error there."""

import os
import pickle
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from spmdrl.distributed import comm

if __name__ == "__main__":
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    torch.set_num_threads(1)
    code = 0
    try:
        fn, args = pickle.loads((folder / "job").read_bytes())
        comm.init()
        result = fn(*args)
        (folder / f"result{rank}").write_bytes(pickle.dumps(result))
        comm.barrier()
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as guard.run does
