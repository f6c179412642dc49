"""Which attention kernel a run computes with."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig, PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from spmdrl.config import ModelConfig
from spmdrl.errors import UserError
from spmdrl.models.loading import attention_kernel, loading_options

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
    machine(flash_attn=True, gpu=False)
    with pytest.raises(UserError, match="needs a GPU"):
        attention_kernel("flash_attention_2", BF16)


@pytest.mark.parametrize(
    ("has_flash", "has_sdpa", "chosen"),
    [(True, True, "flash_attention_2"), (False, True, "sdpa"), (False, False, "eager")],
)
def test_auto_takes_what_the_architecture_has_and_says_so_once(machine, caplog, has_flash, has_sdpa, chosen):
    machine(flash_attn=True, gpu=True)
    name = f"Model{has_flash}{has_sdpa}"
    model_class = type(name, (), {"_supports_flash_attn": has_flash, "_supports_sdpa": has_sdpa})
    for _ in range(2):
        assert attention_kernel("auto", BF16, model_class) == chosen
    line = f"{name} computes attention with {chosen}: transformers has no flash_attention_2 for it"
    assert [record.message for record in caplog.records] == ([] if has_flash else [line])
    machine(flash_attn=False, gpu=True)
    assert attention_kernel("auto", BF16, model_class) == ("sdpa" if has_sdpa else "eager")


@pytest.mark.parametrize("auto_class", [AutoModelForCausalLM, AutoModelForSequenceClassification])
def test_models_are_loaded_with_what_their_class_has(machine, monkeypatch, auto_class):
    machine(flash_attn=True, gpu=True)

    def kernel_of(hf_config):
        return loading_options(auto_class, hf_config, ModelConfig(), BF16)["attn_implementation"]

    assert kernel_of(LlamaConfig()) == "flash_attention_2"
    monkeypatch.setattr(LlamaPreTrainedModel, "_supports_flash_attn", False)
    assert kernel_of(LlamaConfig()) == "sdpa"
    assert kernel_of(PreTrainedConfig()) == "flash_attention_2"  # code that a checkpoint brings along
