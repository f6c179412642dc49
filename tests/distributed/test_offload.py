"""States that lie in host memory during a rollout come back as they were, under every optimizer of DeepSpeed's."""

import pytest
import torch

from tests.distributed.test_strategy import assert_same_weights, fixed_samples
from tests.ranks import run_ranks
from tests.tiny import make_model

SETTINGS = [
    *((stage, torch.float32, None) for stage in range(4)),
    (0, torch.bfloat16, None),
    (1, torch.bfloat16, "fp32"),
    (2, torch.bfloat16, None),
    (3, torch.bfloat16, None),
]


def make_engine(path, zero_stage, dtype, grad_accum_dtype):
    from spmdrl.config import DeepSpeedConfig, ModelConfig, OptimConfig
    from spmdrl.distributed.strategy import Strategy
    from spmdrl.models.actor import Actor
    from spmdrl.models.loading import load_causal_lm

    config = DeepSpeedConfig(zero_stage=zero_stage, grad_accum_dtype=grad_accum_dtype)
    strategy = Strategy(config, OptimConfig(micro_train_batch_size=2, lr_warmup_ratio=0.0), dtype=dtype)
    with strategy.loading():
        model = load_causal_lm(ModelConfig(pretrain=path), dtype=dtype)
    for param in model.parameters():
        param.data = param.data.clone()  # on the host weights are the file itself, which has no memory to give back
    return strategy, strategy.trainable(Actor(model), learning_rate=1e-2, total_steps=10)


def train(path, setting, handed_over):
    """Weights after four optimizer steps, and of each hand-over the states' bytes, and those left on the device."""
    from spmdrl.config import AlgoConfig
    from spmdrl.distributed.weight_sync import iter_weights
    from spmdrl.trainer.policy_update import PolicyUpdate

    strategy, engine = make_engine(path, *setting)
    update = PolicyUpdate(strategy, AlgoConfig(), strategy.optim, max_tokens=16, correction="none")
    sizes = []
    for step in range(4):
        update.optimizer_step(engine, fixed_samples(), kl_coef=0.0)
        if handed_over:
            sizes.append(hand_over(engine, weights=step % 2 == 0))
    return {name: w.clone() for name, w in iter_weights(engine, bucket_mb=1)}, sizes


def hand_over(engine, *, weights):
    from spmdrl.distributed import comm
    from spmdrl.distributed.engine_state import state_tensors
    from spmdrl.distributed.weight_sync import iter_weights

    tensors = [t for t in state_tensors(engine, weights=weights) if t.dim()]
    before = num_bytes(tensors)
    with engine.host_copy.holds(comm.device().type, weights=weights):
        after = num_bytes(tensors)
        if not weights:
            assert all(w.isfinite().all() for _, w in iter_weights(engine, bucket_mb=1))
    return before, after


def num_bytes(tensors):
    return sum({s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in tensors)}.values())


def train_each(path, settings, handed_over):
    return [train(path, setting, handed_over) for setting in settings]


@pytest.mark.slow
def test_training_goes_on_bit_for_bit_after_states_were_in_host_memory(tmp_path):
    """Two ranks, all of DeepSpeed's optimizers, with and without the weights; fp32 or bf16 with fp32 masters, so that
    at least three quarters of what an engine has are states: 12 of 16 bytes, or 12 of 14."""
    path = make_model(tmp_path / "model", "llama")
    stayed = run_ranks(2, train_each, path, SETTINGS, False)
    moved = run_ranks(2, train_in_small_chunks, path, SETTINGS)
    for one, other in zip(stayed, moved, strict=True):
        for setting, (weights, _), (after, sizes) in zip(SETTINGS, one, other, strict=True):
            assert_same_weights(after, weights, atol=0)
            assert all(left == 0 for _, left in sizes), setting
            num_params = sum(w.numel() for w in weights.values())
            assert min(before for before, _ in sizes) >= 8 * num_params // (2 if setting[0] else 1), setting


def train_in_small_chunks(path, settings):
    """States end in the middle of a piece of host memory, and begin there."""
    from spmdrl.distributed import offload

    offload.CHUNK_BYTES = 10_007
    return train_each(path, settings, True)


def test_what_is_on_another_device_stays_where_it_is(tmp_path):
    ((weights, sizes),) = run_ranks(1, stay_on_host, make_model(tmp_path / "model", "llama"))
    assert sizes[0] == sizes[1] > 0
    assert weights


def stay_on_host(path):
    from spmdrl.distributed.engine_state import state_tensors

    _, engine = make_engine(path, 1, torch.float32, None)
    tensors = list(state_tensors(engine, weights=True))
    before = num_bytes(tensors)
    with engine.host_copy.holds("cuda", weights=True):
        return True, (before, num_bytes(tensors))
