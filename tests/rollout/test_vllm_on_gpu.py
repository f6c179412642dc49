"""What of vLLM on a GPU can be seen without one: it takes what it is given, and what is said when it has no room."""

import ast
import importlib.util
import inspect
from dataclasses import fields

import pytest
import torch

from spmdrl.errors import UserError
from spmdrl.rollout import vllm_engine
from spmdrl.rollout.vllm_engine import VLLMEngine

HAS_VLLM = importlib.util.find_spec("vllm") is not None


class FullDevice:
    """A vLLM that cannot map its KV cache, as its allocator says so."""

    def wake_up(self, tags):
        raise RuntimeError("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62")


def test_an_engine_without_room_names_the_flag_that_bounds_it():
    engine = VLLMEngine.__new__(VLLMEngine)
    engine.can_sleep, engine.memory_share, engine.llm = True, 0.9, FullDevice()
    with pytest.raises(UserError, match=r"no room .* for vLLM's kv_cache .* --vllm_gpu_memory_utilization, now 0.9,"):
        engine.wake_up(["kv_cache"])


def test_an_engine_that_cannot_start_is_told_what_may_help(monkeypatch):
    free = (
        "Free memory on device cuda:0 (1/80 GiB) on startup is less than desired GPU memory utilization (0.9, 72 GiB)"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert vllm_engine._refusal("m", free).endswith("; see --vllm_gpu_memory_utilization")
    assert vllm_engine._refusal("m", "no such architecture").endswith("; try --engine hf")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vllm_engine._refusal("m", free).endswith("; try --engine hf")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_vllm_takes_every_argument_that_it_is_given():
    from vllm import LLM
    from vllm.engine.arg_utils import EngineArgs

    calls = [node for node in ast.walk(ast.parse(inspect.getsource(vllm_engine))) if isinstance(node, ast.Call)]
    (call,) = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "LLM"]
    given = {keyword.arg for keyword in call.keywords if keyword.arg}
    assert {"enable_sleep_mode", "gpu_memory_utilization", "distributed_executor_backend"} <= given
    assert given <= {*inspect.signature(LLM.__init__).parameters, *(field.name for field in fields(EngineArgs))}


@pytest.mark.slow
@pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed")
def test_sleep_of_level_2_keeps_no_weights_and_weights_and_cache_wake_apart(monkeypatch):
    import vllm.device_allocator as allocators
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    asked = {}

    class Allocator:
        def sleep(self, offload_tags):
            asked["kept"] = offload_tags

    monkeypatch.setattr(allocators, "get_mem_allocator_instance", Allocator)
    CuMemBackend().suspend(2)
    assert "weights" not in asked["kept"] and "kv_cache" not in asked["kept"]
    assert set(allocators.DEFERRABLE_TAGS) == {"weights", "kv_cache"}
