"""The only home of torch.distributed and deepspeed."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # what DeepSpeed would find out by itself, with a warning
