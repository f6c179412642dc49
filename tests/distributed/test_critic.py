"""Critic and actor on real ranks: one update whatever the dealing, and a saved folder that scores the same."""

from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.models.value_head import new_head
from tests.distributed.test_strategy import LENGTHS, assert_same_weights, fixed_samples, smooth
from tests.models.test_value_head import add_weights
from tests.ranks import run_ranks
from tests.tiny import make_model


def build_critic(strategy, path, prefix="score"):
    from spmdrl.config import ModelConfig
    from spmdrl.models.value_head import load_value_model

    with strategy.loading():
        critic = load_value_model(
            path, ModelConfig(), flag="--pretrain", value_head_prefix=prefix, dtype=torch.float32, seed=7
        )
    return strategy.trainable(critic, learning_rate=1e-2, total_steps=10)


def make_strategy(zero_stage, micro_batch_size=4):
    from spmdrl.config import DeepSpeedConfig, OptimConfig
    from spmdrl.distributed.strategy import Strategy

    optim = OptimConfig(micro_train_batch_size=micro_batch_size, lr_warmup_ratio=0.0)
    return Strategy(DeepSpeedConfig(zero_stage=zero_stage), optim, dtype=torch.float32)


def train_both(path, zero_stage, micro_batch_size, order):
    """Weights of critic and actor, critic's metrics and the values after two optimizer steps on the fixed samples."""
    from spmdrl.config import AlgoConfig, CriticConfig, ModelConfig
    from spmdrl.data.batching import split_evenly
    from spmdrl.distributed import comm
    from spmdrl.distributed.weight_sync import iter_weights
    from spmdrl.models.actor import Actor
    from spmdrl.models.loading import load_causal_lm
    from spmdrl.tracking import Progress
    from spmdrl.trainer.policy_update import PolicyUpdate
    from spmdrl.trainer.scoring import score_samples
    from spmdrl.trainer.update import TrainBatch, train_on
    from spmdrl.trainer.value_update import ValueUpdate

    strategy = make_strategy(zero_stage, micro_batch_size)
    with strategy.loading():
        model = load_causal_lm(ModelConfig(pretrain=path), dtype=torch.float32)
    actor = smooth(strategy.trainable(Actor(model), learning_rate=1e-2, total_steps=10))
    critic = smooth(build_critic(strategy, path))
    samples = fixed_samples()
    mine = [samples[i] for i in split_evenly(range(len(samples)), comm.world_size())[comm.rank()]]
    score_samples(critic, mine, "values", micro_batch_size=micro_batch_size)
    samples = [s for share in comm.all_gather_object(mine) for s in share]
    for i, sample in enumerate(samples):
        sample.returns = torch.where(sample.action_mask, 0.3 * i - 1.0, 0.0)
    batch = TrainBatch(samples, [list(order)] * 2)
    values = ValueUpdate(strategy, CriticConfig(), strategy.optim)
    policy = PolicyUpdate(strategy, AlgoConfig(), strategy.optim, max_tokens=16, correction="none")
    metrics = train_on(batch, partial(values.optimizer_step, critic), "critic", Progress())
    metrics |= train_on(batch, partial(policy.optimizer_step, actor, kl_coef=0.0), "policy", Progress())
    mine = [samples[i] for i in split_evenly(range(len(samples)), comm.world_size())[comm.rank()]]
    score_samples(critic, mine, "values", micro_batch_size=micro_batch_size)
    return (
        {name: w.clone() for name, w in iter_weights(critic, bucket_mb=1)},
        {name: w.clone() for name, w in iter_weights(actor, bucket_mb=1)},
        metrics,
        [s.values for share in comm.all_gather_object(mine) for s in share],
    )


def train_each(path, *settings):
    """`train_both` with each of the settings, in one process a rank: starting ranks takes longer than the training."""
    return [train_both(path, *setting) for setting in settings]


@pytest.mark.slow
def test_critic_and_actor_make_the_same_update_however_their_samples_are_dealt(tmp_path):
    """1 rank against 2, ZeRO-3 and 2, micro-batches of 1, 2 and 4; a sample without tokens is among the seven.

    The head has a bias, a parameter that transformers' classifier, sharded while it is read, does not have.
    """
    path = make_model(tmp_path / "model", "llama")
    generator = torch.Generator().manual_seed(3)
    weights = {"v_head.weight": torch.randn(1, 64, generator=generator) / 4, "v_head.bias": torch.tensor([0.5])}
    add_weights(tmp_path / "model", weights)
    critic, actor, report, values = run_ranks(1, train_each, path, (0, 8, range(7)))[0][0]
    assert [int((v != 0).sum()) for v in values] == list(LENGTHS)
    assert report["critic/clip_frac"] > 0
    assert critic["score.bias"].item() != 0.5
    settings = (3, 1, [6, 2, 0, 1, 5, 3, 4]), (3, 4, range(7)), (2, 2, range(7))
    results = [result for rank in run_ranks(2, train_each, path, *settings) for result in rank]
    for other_critic, other_actor, metrics, other_values in results:
        assert_same_weights(other_critic, critic, atol=2e-5)
        assert_same_weights(other_actor, actor, atol=2e-5)
        for name in ("critic/loss", "critic/clip_frac", "critic/grad_norm", "policy/loss", "policy/grad_norm"):
            assert metrics[name] == pytest.approx(report[name], rel=1e-4, abs=1e-6), name
        for a, b in zip(other_values, values, strict=True):
            torch.testing.assert_close(a, b, atol=1e-3, rtol=0)


SEQUENCES = [[5, 6, 7, 8, 9], [11, 12, 13]]


def save_critic(path, folder, zero_stage, prefix):
    """Saves the critic and returns its values of the last token of SEQUENCES."""
    from spmdrl.config import ModelConfig
    from spmdrl.models.tokenizer import load_tokenizer
    from spmdrl.trainer.export import hf_config_to_save, save_hf

    strategy = make_strategy(zero_stage)
    engine = build_critic(strategy, path, prefix)
    config = ModelConfig(pretrain=path)
    own = hf_config_to_save(path, config, dtype=torch.float32, num_labels=1)
    save_hf(engine, load_tokenizer(config), folder, hf_config=own, value_head_prefix=prefix)
    with torch.no_grad():
        sequences = [torch.tensor([[*ids, 0]]) for ids in SEQUENCES]
        return [float(engine(s, torch.ones(1, s.shape[1] - 1, dtype=torch.bool))[0, -1]) for s in sequences]


@pytest.mark.slow
def test_a_saved_critic_is_a_sequence_classifier_with_the_same_scores(tmp_path):
    """From ZeRO-3 shards of two ranks, with a new head and OpenRLHF's name for it."""
    from transformers import AutoModelForSequenceClassification

    path, folder = make_model(tmp_path / "model", "llama"), str(tmp_path / "critic")
    first, second = run_ranks(2, save_critic, path, folder, 3, "value_head")
    assert first == second
    model, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert model.config.num_labels == 1
    assert not report["missing_keys"] and not report["mismatched_keys"]
    padded = torch.tensor([[5, 6, 7, 8, 9], [11, 12, 13, 2, 2]])  # the pad of the model is 2
    torch.testing.assert_close(model(input_ids=padded).logits[:, 0], torch.tensor(first), atol=1e-5, rtol=1e-5)
    weights = load_file(f"{folder}/model.safetensors")
    assert torch.equal(weights["value_head.weight"], weights["score.weight"])
    torch.testing.assert_close(weights["score.weight"], new_head(64, seed=7))
