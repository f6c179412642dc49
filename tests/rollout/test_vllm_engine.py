"""Sampling with vLLM's CPU build, in a process of its own: one start for all questions."""

import importlib.util
import os
from dataclasses import replace

import pytest
import torch

from spmdrl.rollout.engine import Request
from tests.ranks import run_ranks
from tests.rollout import contract
from tests.rollout.contract import FREE, REQUESTS, EngineContract

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),  # of the first test, which waits for all questions
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
SMALL = {"vllm_kv_cache_gb": 1, "enforce_eager": True}
engines = []  # vLLM's state is the process's: engines live as long as it does


def build(path, dtype=torch.float32, max_len=contract.MAX_LEN, **options):
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from spmdrl.config import ModelConfig, RolloutConfig
    from spmdrl.models.loading import CheckpointWeights
    from spmdrl.rollout.vllm_engine import VLLMEngine

    engine = VLLMEngine(
        path,
        RolloutConfig(**SMALL, **options),
        dtype=dtype,
        max_len=max_len,
        max_samples=64,
        weights=CheckpointWeights(ModelConfig(pretrain=path)),
    )
    engines.append(engine)
    return engine


def load(path, dtype=torch.float32):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


# A KV block holds 128 tokens on CPU, and only whole blocks are cached.
LONG = [Request([20 + i % 250 for i in range(150)], seed) for seed in range(2)]


def ask_about_the_prefix_cache(engine, model):
    """The same long prompt before a load, after it, and after a reset."""
    engine.generate(LONG, FREE)
    engine.load_weights(iter(contract.perturbed(model).items()))
    stale = engine.generate(LONG, FREE)
    engine.reset_prefix_cache()
    return {"stale": stale, "fresh": engine.generate(LONG, FREE)}


def ask_after_a_load(paths, names):
    out = {}
    for name in names:
        dtype = torch.bfloat16 if "bf16" in name else torch.float32
        model, engine = load(paths[name], dtype), build(paths[name], dtype)
        sent = list(contract.perturbed(model, scale=0.02).items())
        engine.load_weights(iter(sent))
        out[name] = {
            "sent": [n for n, _ in sent],
            "completions": engine.generate(REQUESTS, replace(FREE, max_len=None)),
        }
    return out


def ask_all(paths):
    """One process, several engines: the contract's questions of the first, and what differs of the others."""
    torch_threads = torch.get_num_threads()
    engine = build(paths["fp32"], enable_prefix_caching=True)
    model = load(paths["fp32"])
    out = contract.ask(engine, model)
    out["threads"] = torch_threads, torch.get_num_threads()
    out["prefix cache"] = ask_about_the_prefix_cache(
        build(paths["fp32"], max_len=200, enable_prefix_caching=True), model
    )
    out |= ask_after_a_load(paths, ["tied bf16", "tied fp32", "gpt2"])
    try:
        build(paths["fp32"], max_len=10_000)
    except ValueError as error:
        out["unsupported"] = str(error)
    return out


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "fp32": contract.write_model(folder / "fp32"),
        "tied bf16": contract.write_model(folder / "tied", "qwen2", tie=True, dtype="bfloat16"),
        "tied fp32": contract.write_model(folder / "tied32", "llama", tie=True),
        "gpt2": contract.write_model(folder / "gpt2", "gpt2", tie=True),
        "experts": contract.write_model(folder / "mixtral", "mixtral"),
        "chosen experts": contract.write_model(folder / "glm4_moe", "glm4_moe"),
    }


@pytest.fixture(scope="module")
def answers(paths):
    return run_ranks(1, ask_all, paths, timeout=500)[0]


@pytest.fixture(scope="module")
def experts(paths):
    """In a process whose first model has experts: vLLM makes their group of ranks only then."""
    return run_ranks(1, ask_after_a_load, paths, ["experts", "chosen experts"], timeout=500)[0]


@pytest.fixture(scope="module")
def model(paths):
    return load(paths["fp32"]).eval()


class TestVLLMEngine(EngineContract):
    tolerance = 1e-4


def test_training_keeps_its_threads(answers):
    before, after = answers["threads"]
    assert before == after


@pytest.mark.parametrize(("name", "tolerance"), [("gpt2", 1e-4), ("tied fp32", 1e-4), ("tied bf16", 0.3)])
def test_other_models_get_the_trainers_weights(answers, paths, name, tolerance):
    """Tied embeddings are sent once, under the name of the first; GPT-2's weights are transposed by vLLM."""
    assert "lm_head.weight" not in answers[name]["sent"]
    dtype = torch.bfloat16 if "bf16" in name else torch.float32
    samples_with_what_was_sent(answers[name], paths[name], tolerance, dtype)


@pytest.mark.parametrize("name", ["experts", "chosen experts"])
def test_models_of_experts_get_the_trainers_weights(experts, paths, name):
    """Experts are one tensor in memory and many in files, and some are chosen with the help of buffers."""
    samples_with_what_was_sent(experts[name], paths[name], 1e-4, torch.float32)


def samples_with_what_was_sent(answers, path, tolerance, dtype):
    own = load(path, dtype)
    own.load_state_dict(contract.perturbed(own, scale=0.02), strict=False)
    assert len(answers["sent"]) == len(set(answers["sent"]))
    assert largest_gap(own, REQUESTS, answers["completions"]) < tolerance


def test_a_reset_forgets_what_older_weights_computed(answers, paths):
    """Without it the cached block of a long prompt is used again: the log-probs are off."""
    own = load(paths["fp32"])
    own.load_state_dict(contract.perturbed(own), strict=False)
    assert largest_gap(own, LONG, answers["prefix cache"]["fresh"]) < 1e-4
    assert largest_gap(own, LONG, answers["prefix cache"]["stale"]) > 1e-2


def largest_gap(model, requests, completions):
    """Between the engine's log-probs and those of `model`."""
    gaps = []
    for request, completion in zip(requests, completions, strict=True):
        expected = contract.filtered_log_probs(contract.logits_of(model, request.prompt_ids, completion), FREE)
        picked = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gaps.append((torch.tensor(completion.log_probs).double() - picked).abs())
    return float(torch.cat(gaps).max())


def test_a_model_that_vllm_cannot_run_is_refused_with_a_way_out(answers):
    assert "--engine vllm cannot run" in answers["unsupported"]
    assert "try --engine hf" in answers["unsupported"]
