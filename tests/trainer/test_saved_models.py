"""Every kind of model that the programs save gives the trained model's outputs in a process that has never heard of
spmdrl: whole models, adapters, merged ones, critics, averages, the best, and those of checkpoints."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spmdrl.config.merge import MergeLoraConfig
from spmdrl.distributed.strategy import unwrap
from spmdrl.models.merge import merge_lora
from tests.programs.plain_outputs import IDS
from tests.trainer import runs, supervised

PROGRAM = Path(__file__).parents[1] / "programs" / "plain_outputs.py"
LM, CLASSIFIER = "AutoModelForCausalLM", "AutoModelForSequenceClassification"
ONE_STEP = {"train_batch_size": 16, "eval_steps": 1, "save_steps": 1, "save_hf_ckpt": True}


def logits_of(engine):
    with torch.no_grad():
        return unwrap(engine).model(input_ids=torch.tensor(IDS)).logits[0, -1].tolist()


def score_of(engine):
    with torch.no_grad():
        return unwrap(engine)(torch.tensor(IDS), torch.tensor([len(IDS[0])])).tolist()


def value_of(critic):
    """Of the state after the last of IDS: a step further, so that it has one."""
    sequences = torch.tensor([[*IDS[0], 0]])
    with torch.no_grad():
        return unwrap(critic)(sequences, torch.ones(1, len(IDS[0]), dtype=torch.bool))[0, -1:].tolist()


def copies(folder):
    """The model itself, and the same after the only step in the checkpoint and as the best."""
    hf = [path / "hf" for path in Path(folder, "checkpoints").rglob("step_*") if (path / "hf").is_dir()]
    assert len(hf) == 2, hf
    return [folder, *hf]


def ppo_models(folder):
    """One step, so that the average with --ema_beta 0 is the policy too."""
    inputs = runs.write_inputs(folder / "inputs")
    flags = {"advantage_estimator": "gae", "critic_learning_rate": 1e-2, "max_samples": 4, "eval_steps": 1}
    flags |= {"save_value_network": True, "enable_ema": True, "ema_beta": 0.0, "save_hf_ckpt": True, "save_steps": 1}
    out = folder / "ppo"
    trainer = runs.build(out, **inputs, **flags, eval_dataset=inputs["prompt_data"], ckpt_path=out / "checkpoints")
    trainer.fit()
    assert trainer.critic is not None
    policy = [(LM, path, logits_of(trainer.actor)) for path in (*copies(out), out / "ema")]
    return [*policy, (CLASSIFIER, out / "critic", value_of(trainer.critic))]


def supervised_models(folder, program, **model):
    """A whole model, an adapter, and what the adapter makes of its base."""
    inputs = supervised.write_inputs(folder / f"{program}_inputs", **model)
    auto, outputs_of = (CLASSIFIER, score_of) if program == "rm" else (LM, logits_of)
    whole = supervised.run(program, folder / program, **inputs, **ONE_STEP)
    found = [(auto, path, outputs_of(whole.engine)) for path in copies(folder / program)]
    adapter, merged = folder / f"{program}_lora", folder / f"{program}_merged"
    lora = supervised.run(program, adapter, **inputs, **ONE_STEP, lora_rank=2, gradient_checkpointing=True)
    merge_lora(MergeLoraConfig(lora_path=str(adapter), output_path=str(merged), is_rm=program == "rm"))
    expected = outputs_of(lora.engine)
    of_peft = auto.replace("AutoModel", "AutoPeftModel")
    return [*found, *((of_peft, path, expected) for path in copies(adapter)), (auto, merged, expected)]


@pytest.mark.slow
def test_every_saved_model_is_the_trained_one_elsewhere(tmp_path, one_rank):
    models = [
        *ppo_models(tmp_path),
        *supervised_models(tmp_path, "sft", tie=True),
        *supervised_models(tmp_path, "rm"),
        *supervised_models(tmp_path, "dpo", arch="gpt2"),
    ]
    argument = json.dumps([[auto, str(path)] for auto, path, _ in models])
    done = subprocess.run([sys.executable, PROGRAM, argument], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr[-3000:]
    for (_, path, expected), found in zip(models, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert found == pytest.approx(expected, abs=1e-5), path
