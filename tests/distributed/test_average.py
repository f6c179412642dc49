"""The moving average of the weights under each ZeRO stage, against the recursion on whole weights."""

import pytest
import torch

from tests.distributed.test_strategy import assert_same_weights, fixed_samples, smooth
from tests.ranks import run_ranks
from tests.tiny import make_model

BETA = 0.7


def weights_of(engine):
    from spmdrl.distributed.weight_sync import iter_weights

    return {name: w.float().clone() for name, w in iter_weights(engine, bucket_mb=1)}


def build(path, zero_stage, dtype):
    from spmdrl.config import DeepSpeedConfig, ModelConfig, OptimConfig
    from spmdrl.distributed.average import WeightAverage
    from spmdrl.distributed.strategy import Strategy
    from spmdrl.models.actor import Actor
    from spmdrl.models.loading import load_causal_lm

    optim = OptimConfig(lr_warmup_ratio=0.0)
    strategy = Strategy(DeepSpeedConfig(zero_stage=zero_stage), optim, dtype=dtype)
    with strategy.loading():
        model = load_causal_lm(ModelConfig(pretrain=path), dtype=dtype)
    engine = smooth(strategy.trainable(Actor(model), learning_rate=1e-2, total_steps=10))
    return strategy, engine, WeightAverage(engine, ema_beta=BETA)


def averaged(path, zero_stage, dtype):
    """Three updates: the average that is exported, the recursion on exported weights, the weights before and after the
    export, and what a second average says that has read the fragments of all ranks' first."""
    from spmdrl.config import AlgoConfig
    from spmdrl.distributed import comm
    from spmdrl.distributed.average import WeightAverage
    from spmdrl.trainer.policy_update import PolicyUpdate

    strategy, engine, average = build(path, zero_stage, dtype)
    update = PolicyUpdate(strategy, AlgoConfig(), strategy.optim, max_tokens=16, correction="none", average=average)
    expected = weights_of(engine)
    for _ in range(3):
        update.optimizer_step(engine, fixed_samples(), kl_coef=0.0)
        weights = weights_of(engine)
        expected = {name: BETA * a + (1 - BETA) * weights[name] for name, a in expected.items()}
    before = weights_of(engine)
    with average.in_place():
        exported = weights_of(engine)
    after = weights_of(engine)
    shares = {}
    for fragment in (f for share in comm.all_gather_object(average.fragments()) for f in share):
        whole = shares.setdefault(fragment.name, torch.full((fragment.total,), float("nan")))
        whole[fragment.start : fragment.start + len(fragment.tensor)] = fragment.tensor
    assert not any(whole.isnan().any() for whole in shares.values())
    other = WeightAverage(engine, ema_beta=BETA)
    other.load({}, lambda f: shares[f.name][f.start : f.start + len(f.tensor)])
    with other.in_place():
        restored = weights_of(engine)
    num_elements = sum(len(f.tensor) for f in average.fragments())
    return exported, expected, before, after, restored, num_elements


def each(path, stages, dtype):
    return [averaged(path, stage, dtype) for stage in stages]


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "stages"), [(torch.float32, (0, 1, 2, 3)), (torch.bfloat16, (2, 3))])
def test_the_average_is_that_of_the_weights_whatever_the_zero_stage(tmp_path, dtype, stages):
    """fp32: to rounding. bf16: the average is of the fp32 masters and rounded once, the recursion here of weights that
    were rounded before. The two ranks share the work, and the weights are untouched by an export."""
    path = make_model(tmp_path / "model", "llama")
    ranks = run_ranks(2, each, path, stages, dtype)
    total = None
    for (exported, expected, before, after, restored, size), other in zip(*ranks, strict=True):
        atol = 1e-6 if dtype == torch.float32 else 8e-3
        assert_same_weights(exported, expected, atol=atol)
        assert max(float((before[name] - exported[name]).abs().max()) for name in before) > 5e-3
        assert_same_weights(before, after, atol=0)
        assert_same_weights(restored, exported, atol=0)
        total = total or sum(w.numel() for w in before.values())
        assert size + other[-1] == total
        assert min(size, other[-1]) > 0.4 * total
