"""Sampling with Hugging Face generate."""

from dataclasses import replace

import pytest
import torch

from spmdrl.experience import collate
from spmdrl.models.actor import Actor
from tests.rollout import contract
from tests.rollout.contract import FREE, REQUESTS, EngineContract


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return contract.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def make_engine(path, dtype=torch.float32, batch_size=3):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from spmdrl.rollout.hf_engine import HFEngine

    own = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return HFEngine(own, AutoTokenizer.from_pretrained(path), device=torch.device("cpu"), batch_size=batch_size)


@pytest.fixture(scope="module")
def answers(path, model):
    return contract.ask(make_engine(path), model)


class TestHFEngine(EngineContract):
    tolerance = 1e-5


def test_a_bf16_model_samples_with_fp32_log_probs(path):
    """Its own, not the fp32 model's: the actor in bf16 recomputes them to the rounding of another forward."""
    from transformers import AutoModelForCausalLM

    own = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()
    actor = Actor(own)
    for request, completion in zip(REQUESTS, make_engine(path, torch.bfloat16).generate(REQUESTS, FREE), strict=True):
        assert max(completion.log_probs) < 0
        exp = collate([contract.sample_of(request, completion)])
        with torch.no_grad():
            recomputed = actor(exp.sequences, exp.action_mask)[0]
        assert (recomputed - exp.rollout_log_probs).abs().max() < 0.1


def test_a_response_without_room_for_another_token_ends_by_length(path):
    """--max_len counts the prompt: 5 tokens of it leave 1 of 6."""
    (one,) = make_engine(path).generate(REQUESTS[:1], replace(FREE, max_len=6))
    assert len(one.token_ids) == 1
