"""LoRA on real ranks, under every ZeRO stage: one update, the frozen weights untouched, whole adapters out."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.test_critic import make_strategy
from tests.distributed.test_strategy import assert_same_weights, fixed_samples, smooth
from tests.ranks import run_ranks
from tests.tiny import make_model

SEQUENCES = torch.tensor([[5, 6, 7, 8, 9, 10]])
MASK = torch.ones(1, 5, dtype=torch.bool)


def build(strategy, path, role, reentrant):
    """An engine of the actor or critic, with adapters and gradient checkpointing."""
    from spmdrl.config import LoraConfig, ModelConfig
    from spmdrl.models.actor import Actor
    from spmdrl.models.loading import load_causal_lm
    from spmdrl.models.lora import add_lora
    from spmdrl.models.value_head import load_value_model
    from spmdrl.trainer.build import enable_checkpointing

    config = ModelConfig(pretrain=path, gradient_checkpointing=True, gradient_checkpointing_use_reentrant=reentrant)
    with strategy.loading():
        if role == "actor":
            module = Actor(load_causal_lm(config, dtype=torch.float32))
        else:
            options = {"flag": "--pretrain", "value_head_prefix": "score", "dtype": torch.float32, "seed": 7}
            module = load_value_model(path, config, **options)
    add_lora(module.model, LoraConfig(lora_rank=2, lora_alpha=6), seed=3)
    enable_checkpointing(module.model, config)
    return smooth(strategy.trainable(module, learning_rate=1e-2, total_steps=10))


@torch.no_grad()
def say(model):
    """Log-probs or values of the sequence."""
    out = model(SEQUENCES, MASK)
    return out[0] if isinstance(out, tuple) else out


def stepper(strategy, engine, role):
    """A function that makes one optimizer step on the fixed samples."""
    from spmdrl.config import AlgoConfig, CriticConfig
    from spmdrl.trainer.policy_update import PolicyUpdate
    from spmdrl.trainer.value_update import ValueUpdate

    samples = fixed_samples()
    if role == "actor":
        update = PolicyUpdate(strategy, AlgoConfig(), strategy.optim, max_tokens=16, correction="none")
        return partial(update.optimizer_step, engine, samples, kl_coef=0.0)
    for i, sample in enumerate(samples):
        sample.values, sample.returns = torch.zeros(sample.action_mask.shape), sample.action_mask * (0.3 * i - 1)
    return partial(ValueUpdate(strategy, CriticConfig(), strategy.optim).optimizer_step, engine, samples)


def train(path, folder, zero_stage, role, reentrant=False):
    """Three optimizer steps; the adapter is saved in `folder`. What the model says before, after and without adapters,
    and the weights that the engine would get."""
    from spmdrl.config import ModelConfig
    from spmdrl.distributed.weight_sync import iter_adapter, iter_weights
    from spmdrl.models.lora import WithoutLora
    from spmdrl.models.tokenizer import load_tokenizer
    from spmdrl.trainer.export import hf_config_to_save, save_hf

    strategy = make_strategy(zero_stage)
    engine = build(strategy, path, role, reentrant)
    step = stepper(strategy, engine, role)
    seen = {"before": say(engine)}
    step()
    step()
    seen["without"] = say(WithoutLora(engine))  # between two steps: it leaves no trace in the next
    step()
    seen["after"] = say(engine)
    config = ModelConfig(pretrain=path)
    own = hf_config_to_save(path, config, dtype=torch.float32, **({"num_labels": 1} if role == "critic" else {}))
    save_hf(engine, load_tokenizer(config), folder, hf_config=own)
    seen["adapter"] = {name: w.clone() for name, w in iter_adapter(engine, bucket_mb=1)}
    seen["merged"] = {name: w.clone() for name, w in iter_weights(engine, bucket_mb=1)}
    return seen


def train_each(path, folder, *runs):
    """In one process a rank: starting ranks takes longer than the training."""
    return {run: train(path, f"{folder}/{'_'.join(map(str, run))}", *run) for run in runs}


@pytest.mark.slow
def test_every_stage_trains_the_adapters_alike_and_saves_them_whole(tmp_path):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    path = make_model(tmp_path / "model", "llama")
    alone = run_ranks(1, train_each, path, str(tmp_path / "alone"), (0, "actor"), (0, "critic"))[0]
    runs = [(0, "actor"), (1, "actor"), (2, "actor"), (3, "actor"), (0, "critic"), (3, "critic")]
    runs += [(2, "actor", True), (3, "actor", True), (3, "critic", True)]  # torch's older checkpointing
    first, second = run_ranks(2, train_each, path, str(tmp_path / "two"), *runs)
    classes = {"actor": AutoModelForCausalLM, "critic": AutoModelForSequenceClassification}
    bases = {role: cls.from_pretrained(path, dtype=torch.float32, num_labels=1) for role, cls in classes.items()}
    for run, seen in first.items():
        role, expected = run[1], alone[0, run[1]]
        assert_same_weights(seen["adapter"], expected["adapter"], atol=2e-5)
        assert_same_weights(seen["merged"], expected["merged"], atol=2e-5)
        assert_same_weights(second[run]["adapter"], seen["adapter"], atol=0)
        assert role == "critic" or torch.equal(seen["without"], seen["before"])  # the critic's head is trained
        assert (seen["after"] - seen["before"]).abs().max() > 0.01
        folder = tmp_path / "two" / "_".join(map(str, run))
        saved = load_file(folder / "adapter_model.safetensors")
        assert saved.keys() == seen["adapter"].keys()
        assert len(saved) == 2 * 7 * 2 + (role == "critic")
        assert all(w.abs().max() > 0 for w in saved.values())  # B is 0 until it is trained
        loaded = PeftModel.from_pretrained(bases[role], folder).eval()
        logits = loaded(SEQUENCES[:, :5]).logits
        if role == "actor":
            logits = logits.log_softmax(-1).gather(-1, SEQUENCES[:, 1:, None])[0, :, 0]
            torch.testing.assert_close(seen["after"][0], logits, atol=1e-5, rtol=1e-5)
        else:
            torch.testing.assert_close(seen["after"][0, -1], logits[0, 0], atol=1e-5, rtol=1e-5)
        bases[role] = loaded.unload()
    start = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    merged = first[3, "actor"]["merged"]
    assert list(merged) == list(start)
    changed = {name for name in start if not torch.equal(merged[name], start[name])}
    assert changed == {name for name in start if name.endswith("_proj.weight")}
