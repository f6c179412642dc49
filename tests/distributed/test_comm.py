"""U84: the process group and the dtype that a machine gets, and its cores shared among the ranks of a host."""

import pytest
import torch
import torch.distributed as dist

from spmdrl.distributed import comm, strategy
from spmdrl.errors import UserError


@pytest.fixture
def two_gpus(monkeypatch):
    """A host with two GPUs, as far as joining asks, and what the group was made with."""
    made = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: made.update(device=index))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **kwargs: made.update(backend=backend, **kwargs))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    return made


def test_with_gpus_the_group_takes_tensors_of_the_gpu_and_of_the_host(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    comm.join(dist.HashStore())
    assert (two_gpus["backend"], two_gpus["device"]) == ("cpu:gloo,cuda:nccl", 1)
    assert (two_gpus["rank"], two_gpus["world_size"]) == (1, 2)


def test_more_ranks_than_gpus_on_a_host_is_one_line(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="LOCAL_RANK 2 has no GPU: this host shows 2"):
        comm.join(dist.HashStore())


@pytest.mark.parametrize(("avx512", "amx", "dtype"), [(False, False, "float32"), (True, False, "bfloat16")])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_cpu_trains_in_bf16_only_where_it_computes_in_it(monkeypatch, avx512, amx, dtype):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert strategy.compute_dtype(None) == getattr(torch, dtype)
    assert strategy.compute_dtype(True) == torch.bfloat16
    assert strategy.compute_dtype(False) == torch.float32


@pytest.mark.parametrize(("set_by_launcher", "threads"), [(None, 4), ("8", 8)])
def test_ranks_of_a_host_share_its_cores_unless_told(monkeypatch, set_by_launcher, threads):
    """8 cores and 2 of 3 ranks on this host: 4 threads each."""
    kept = []
    monkeypatch.setattr(comm.socket, "gethostname", lambda: "here")
    monkeypatch.setattr(comm, "all_gather_object", lambda name: [name, "there", name])
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", kept.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_by_launcher:
        monkeypatch.setenv("OMP_NUM_THREADS", set_by_launcher)
    comm._share_cores()
    assert (kept or [8]) == [threads]


@pytest.mark.parametrize(
    ("environ", "line"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "2"}, "1 of its 4 cores: torchrun"),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "8"}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"OMP_NUM_THREADS": "1"}, None),
    ],
)
def test_cores_that_torchrun_leaves_idle_are_named_once(monkeypatch, capsys, environ, line):
    for name in ("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(comm.os, "sched_getaffinity", lambda pid: set(range(8)))
    comm.say_idle_cores.cache_clear()
    comm.say_idle_cores()
    comm.say_idle_cores()
    said = capsys.readouterr().out
    comm.say_idle_cores.cache_clear()
    assert (line in said and said.count("\n") == 1) if line else said == ""
