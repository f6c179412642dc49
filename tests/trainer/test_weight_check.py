"""When the engine's log-probs of a probe say that it has other weights than the trainer."""

import pytest
import torch

from spmdrl.experience import make_sample
from spmdrl.trainer.weight_check import check_weights


def probe(engine, trainer):
    sample = make_sample(
        [5, 6], range(10, 10 + len(engine)), engine, finish_reason="length", group_id=0, index=0, row=3
    )
    sample.log_probs = torch.tensor([0.0, *trainer])
    return sample


def test_the_largest_gap_is_returned_where_the_dtype_explains_it():
    samples = [probe([-1.0, -2.0], [-1.25, -2.0]), probe([-1.0, -1.0, -1.0], [-1.0, -1.0, -1.0])]
    assert check_weights(samples, torch.bfloat16) == pytest.approx(0.25)


def test_one_token_far_off_is_named_with_both_numbers():
    with pytest.raises(RuntimeError, match=r"row 3, token 11 at position 3: engine -2\.0+, trainer -2\.5"):
        check_weights([probe([-1.0, -2.0], [-1.0, -2.5])], torch.float32)


def test_all_tokens_a_little_off_are_a_fault_too():
    """0.4 everywhere is below what bf16 does to one token in many, and far above what it does to their mean."""
    with pytest.raises(RuntimeError, match=r"0\.400000 on the mean"):
        check_weights([probe([-1.0] * 8, [-1.4] * 8)], torch.bfloat16)


@pytest.mark.parametrize("side", ["engine", "trainer"])
def test_nan_is_a_disagreement(side):
    nan = [float("nan"), -1.0]
    with pytest.raises(RuntimeError, match="inf on the worst token"):
        check_weights([probe(*((nan, [-1.0, -1.0]) if side == "engine" else ([-1.0, -1.0], nan)))], torch.bfloat16)


def test_a_rank_without_a_probe_agrees():
    assert check_weights([], torch.float32) == 0.0
