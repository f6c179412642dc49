"""Which attention kernel a run computes with."""

import importlib.util

import pytest
import torch

from spmdrl.errors import UserError
from spmdrl.models.loading import attention_kernel

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture
def machine(monkeypatch):
    """A machine with or without flash-attn and a GPU, as far as the choice asks."""

    def make(*, flash_attn, gpu):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if flash_attn else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    return make


def test_auto_is_flash_attn_where_it_can_compute(machine):
    machine(flash_attn=True, gpu=True)
    assert attention_kernel("auto", BF16) == "flash_attention_2"
    assert attention_kernel("auto", FP32) == "sdpa"
    machine(flash_attn=True, gpu=False)
    assert attention_kernel("auto", BF16) == "sdpa"
    machine(flash_attn=False, gpu=True)
    assert attention_kernel("auto", BF16) == "sdpa"


def test_flash_attn_that_cannot_compute_is_refused(machine):
    machine(flash_attn=True, gpu=True)
    assert attention_kernel("flash_attention_2", BF16) == "flash_attention_2"
    with pytest.raises(UserError, match="bfloat16 only"):
        attention_kernel("flash_attention_2", FP32)
    machine(flash_attn=False, gpu=True)
    with pytest.raises(UserError, match="not installed"):
        attention_kernel("flash_attention_2", BF16)
