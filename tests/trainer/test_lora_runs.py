"""Whole runs with LoRA: what trains, what the reference says, what the engine samples from and what is saved."""

import importlib.util
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from spmdrl.models.actor import Actor
from tests.ranks import run_ranks
from tests.trainer.runs import build, run, write_inputs

LORA = {"lora_rank": 2, "advantage_estimator": "gae", "init_kl_coef": 0.1, "verify_weight_sync": True}
has_vllm = importlib.util.find_spec("vllm") is not None


class ForgetfulEngine:
    """An engine whose weights are gone after each sleep, as at vLLM's sleep level 2."""

    def __init__(self, engine):
        self.engine = engine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def sleep(self):
        self.engine.sleep()
        for p in self.engine.model.parameters():
            p.fill_(float("nan"))


def largest_gap(samples):
    """Between policy and reference at collection."""
    return max(float((s.ref_log_probs - s.log_probs).abs().max()) for s in samples)


def test_policy_and_critic_train_adapters_beside_one_frozen_model_each(one_rank, tmp_path):
    """With dropout in the optimizer steps: scoring is without, or the probe of the weights would fail. The reference
    model is the one that was loaded."""
    inputs = write_inputs(tmp_path)
    flags = {"max_epochs": 2, "lora_dropout": 0.5, "save_value_network": True, "critic_learning_rate": 1e-3}
    trainer = build(tmp_path / "run", ForgetfulEngine, **inputs | LORA | flags)
    engines = trainer.actor, trainer.critic
    starts = [{name: p.clone() for name, p in engine.named_parameters()} for engine in engines]
    trainer.fit()
    result = trainer.result()
    assert result.weight_gap is not None and result.weight_gap < 1e-4
    for engine, start in zip(engines, starts, strict=True):
        changed = {name for name, p in engine.named_parameters() if not torch.equal(p, start[name])}
        assert changed == {name for name in start if ".lora_" in name or "score" in name}
    base = Actor(AutoModelForCausalLM.from_pretrained(inputs["pretrain"], dtype=torch.float32))
    for sample in result.samples[1]:
        expected = base(sample.sequence[None], sample.action_mask[None])[0][0]
        torch.testing.assert_close(sample.ref_log_probs, expected, atol=1e-5, rtol=0)
    assert largest_gap(result.samples[0]) == 0
    assert largest_gap(result.samples[1]) > 1e-3
    assert len(load_file(tmp_path / "run" / "adapter_model.safetensors")) == 2 * 7 * 2
    assert "base_model.model.score.weight" in load_file(tmp_path / "run" / "critic" / "adapter_model.safetensors")


def test_a_resumed_run_goes_on_bit_for_bit_from_adapters_alone(one_rank, tmp_path):
    inputs = write_inputs(tmp_path) | LORA | {"ckpt_path": str(tmp_path / "checkpoints"), "save_steps": 1}
    whole = run(tmp_path / "run", **inputs)
    for file in (tmp_path / "checkpoints").rglob("*.safetensors"):
        assert not any("base_layer" in name or "embed" in name for name in load_file(file))
    shutil.rmtree(tmp_path / "checkpoints" / "step_000002")
    resumed = run(tmp_path / "run", **inputs, load_checkpoint=True)
    assert resumed.ids() == whole.ids()[1:]
    assert all(torch.equal(resumed.weights[name], weight) for name, weight in whole.weights.items())


def session(inputs, folder):
    """Of each engine, a run under ZeRO-3 on these ranks."""
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    flags = inputs | LORA | {"zero_stage": 3, "gradient_checkpointing": True}
    out = {"hf": run(f"{folder}/hf", **flags)}
    if has_vllm:
        vllm = {"engine": "vllm", "vllm_kv_cache_gb": 1, "enforce_eager": True}
        out["vllm"] = run(f"{folder}/vllm", **flags | vllm)
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_under_zero_3_sample_and_train_like_one(one_rank, tmp_path):
    """Every engine has the merged weights, or the probe of each sync would stop the run."""
    inputs = write_inputs(tmp_path)
    alone = run(tmp_path / "alone", **inputs | LORA)
    together = run_ranks(2, session, inputs, str(tmp_path))[0]
    assert together["hf"].ids() == alone.ids()
    for name, weight in alone.weights.items():
        torch.testing.assert_close(together["hf"].weights[name], weight, atol=1e-4, rtol=0)
    for result in together.values():
        assert result.weight_gap < 1e-3
        assert all(norm > 0 for norm in result.column("policy/grad_norm") + result.column("critic/grad_norm"))
        assert result.column("policy/kl_k3")[0] < 1e-6 < result.column("policy/kl_k3")[1]
