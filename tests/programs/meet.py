"""What a launcher made of this process: `meet.py [--local_rank N]` prints one line a rank after a real collective."""

import argparse
import os
import sys

import torch
from torch.distributed import get_backend

from spmdrl.distributed import comm, guard


def meet() -> None:
    total = int(comm.all_reduce_sum(torch.tensor([comm.rank() + 1])))
    met = f"rank {comm.rank()} of {comm.world_size()}, local {os.environ['LOCAL_RANK']}, {get_backend()} sum {total}"
    sys.stdout.write(f"{met}, at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    guard.run(meet, parser.parse_args().local_rank)
