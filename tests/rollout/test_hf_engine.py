"""Sampling with Hugging Face generate."""

import pytest
import torch

from tests.rollout import contract
from tests.rollout.contract import EngineContract


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
