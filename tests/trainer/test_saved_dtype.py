"""--save_dtype fp32: what is saved of a model that computes in bf16 is what its optimizer has, on real ranks."""

from pathlib import Path

import pytest
import torch

from tests.distributed.test_strategy import fixed_samples
from tests.ranks import run_ranks
from tests.tiny import make_model

RATE = 1e-5  # the first step of Adam moves every weight that has a gradient by so much, mostly too little for bf16


def train_and_save(path, folder, settings):
    """One optimizer step in each setting, (ZeRO stage, rank of LoRA), saved; the weights that the forward has then."""
    from spmdrl.config import AlgoConfig, DeepSpeedConfig, LoraConfig, ModelConfig, OptimConfig
    from spmdrl.distributed.strategy import Strategy
    from spmdrl.distributed.weight_sync import iter_adapter, iter_weights
    from spmdrl.models.actor import Actor
    from spmdrl.models.loading import load_causal_lm
    from spmdrl.models.lora import add_lora
    from spmdrl.models.tokenizer import load_tokenizer
    from spmdrl.trainer.export import hf_config_to_save, save_hf
    from spmdrl.trainer.policy_update import PolicyUpdate

    config, optim = ModelConfig(pretrain=path), OptimConfig(micro_train_batch_size=2, lr_warmup_ratio=0.0)
    hf_config = hf_config_to_save(path, config, dtype=torch.float32)
    computed = []
    for stage, lora_rank in settings:
        strategy = Strategy(DeepSpeedConfig(zero_stage=stage), optim, dtype=torch.bfloat16)
        with strategy.loading():
            model = load_causal_lm(config, dtype=torch.bfloat16)
        add_lora(model, LoraConfig(lora_rank=lora_rank), seed=3)
        engine = strategy.trainable(Actor(model), learning_rate=RATE, total_steps=10)
        update = PolicyUpdate(strategy, AlgoConfig(), optim, max_tokens=16, correction="none")
        update.optimizer_step(engine, fixed_samples(), kl_coef=0.0)
        save_hf(engine, load_tokenizer(config), Path(folder, f"{stage}_{lora_rank}"), hf_config=hf_config)
        found = (iter_adapter if lora_rank else iter_weights)(engine, bucket_mb=1)
        computed.append({name: weight.clone() for name, weight in found})
    return computed


def weights_in(folder):
    from safetensors.torch import load_file

    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


@pytest.mark.slow
def test_updates_that_bf16_loses_are_in_an_fp32_model(tmp_path):
    from transformers import AutoModelForCausalLM

    start = load_in_bf16(make_model(tmp_path / "model", "llama", tie=True))
    settings = [(0, 0), (1, 0), (2, 0), (3, 0), (2, 4), (3, 4)]
    (computed, _) = run_ranks(2, train_and_save, str(tmp_path / "model"), str(tmp_path), settings)
    for (stage, lora_rank), live in zip(settings, computed, strict=True):
        folder = tmp_path / f"{stage}_{lora_rank}"
        saved = weights_in(folder)
        assert saved.keys() == live.keys()
        for name, weight in saved.items():
            assert weight.dtype == torch.float32
            assert torch.equal(weight.bfloat16(), live[name]), (stage, lora_rank, name)
        assert any(not torch.equal(weight, live[name].float()) for name, weight in saved.items())
        if lora_rank == 0:
            changes = torch.cat([(saved[name] - weight.float()).flatten() for name, weight in start.items()])
            assert float(changes.abs().max()) == pytest.approx(RATE, rel=0.02)
            assert (changes.abs() > 0.9 * RATE).float().mean() > 0.9
            model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
            assert not any(report[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
            assert model.dtype == torch.float32


def load_in_bf16(path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return {name: param.detach() for name, param in model.named_parameters()}
