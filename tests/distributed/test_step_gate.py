"""An optimizer step that is refused, or whose gradients are not finite, changes nothing, whatever the ZeRO stage."""

import pytest
import torch

from tests.ranks import run_ranks

STAGES = [(stage, dtype, None) for stage in range(4) for dtype in ("float32", "bfloat16")] + [(1, "bfloat16", "fp32")]


def trained(stage, dtype_name, grad_accum_dtype, refuse, max_norm=1.0):
    """Weights, learning rates and norms after three optimizer steps with the gradients 1, 2 and 3 times a constant,
    of which the second is refused by the caller, or spoilt on the last rank ("nan"), or left out."""
    from torch import nn

    from spmdrl.config import DeepSpeedConfig, OptimConfig
    from spmdrl.distributed import comm
    from spmdrl.distributed.strategy import Strategy
    from spmdrl.distributed.weight_sync import iter_weights

    torch.manual_seed(0)
    dtype = getattr(torch, dtype_name)
    optim = OptimConfig(lr_scheduler="linear", lr_warmup_ratio=0.0, max_norm=max_norm)
    deepspeed = DeepSpeedConfig(zero_stage=stage, grad_accum_dtype=grad_accum_dtype)
    strategy = Strategy(deepspeed, optim, dtype=dtype)
    model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 2)).to(dtype)
    engine = strategy.trainable(model, learning_rate=1e-2, total_steps=10)
    norms, rates = [], []
    for number in (1, 3) if refuse == "left out" else (1, 2, 3):
        loss = number * engine(torch.ones(1, 4, dtype=dtype)).float().sum() / comm.world_size()
        if number == 2 and refuse == "nan" and comm.rank() == comm.world_size() - 1:
            loss = loss * float("nan")
        strategy.backward(engine, loss)
        norms.append(strategy.step(engine, lambda norm, n=number: n != 2 or refuse == "nan"))
        rates.append(engine.get_lr()[0])
    return {name: w.float().clone() for name, w in iter_weights(engine, bucket_mb=1)}, rates, norms


def check_that_a_refused_step_changes_nothing(stage, dtype, grad_accum_dtype):
    expected, rates, norms = trained(stage, dtype, grad_accum_dtype, "left out")
    for refuse in ("caller", "nan"):
        weights, rates_then, norms_then = trained(stage, dtype, grad_accum_dtype, refuse)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=0, atol=0, msg=f"{name}: {refuse}")
        assert rates_then == [rates[0], rates[0], rates[1]], "the schedule went on"
        assert norms_then[0] == norms[0]
        assert norms_then[2] == norms[1], "stale gradients"
        assert norms_then[1] == (float("inf") if refuse == "nan" else pytest.approx(2 * norms[0], rel=2e-2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_refused_step_changes_nothing_without_zero(one_rank, dtype):
    check_that_a_refused_step_changes_nothing(0, dtype, None)


def test_the_norm_is_known_without_clipping(one_rank):
    """--max_norm 0."""
    first, second = trained(0, "float32", None, "left out", max_norm=0.0)[2]
    assert second == pytest.approx(3 * first, rel=0.2)
    assert first > 0


def check_all():
    for stage, dtype, grad_accum_dtype in STAGES:
        check_that_a_refused_step_changes_nothing(stage, dtype, grad_accum_dtype)


@pytest.mark.slow
def test_a_refused_step_changes_nothing_on_two_ranks():
    run_ranks(2, check_all)
