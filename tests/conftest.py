import os

import pytest
import torch

# Tests compute on the host, also where there are GPUs. Those of test_gpu.py see these in processes of their own.
os.environ.setdefault("SPMDRL_TEST_GPUS", os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the hub, before its libraries are imported


@pytest.fixture(scope="session")
def process_group():
    """A process group of one rank in the tests' own process; DeepSpeed needs one and cannot have a second."""
    from spmdrl.distributed import comm

    before, threads = dict(os.environ), torch.get_num_threads()
    torch.set_num_threads(1)
    comm.init()
    os.environ.clear()
    os.environ.update(before)
    yield
    torch.set_num_threads(threads)
    comm.destroy()


@pytest.fixture
def one_rank(process_group, monkeypatch):
    """The variables of a launcher, for the time of a test."""
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
