"""PPO with a critic, and texts mixed in: what the trainer does with values, returns, truncated samples and texts."""

from pathlib import Path

import pytest
import torch

from spmdrl.algos.losses import BatchCounts
from spmdrl.config import CriticConfig, OptimConfig
from spmdrl.distributed.weight_sync import iter_weights
from spmdrl.errors import UserError
from spmdrl.experience import collate, make_sample
from spmdrl.trainer.ptx import PtxLoss
from spmdrl.trainer.value_update import ValueUpdate, value_metrics
from tests.ranks import run_ranks
from tests.rewards.reward_models import permuted
from tests.tiny import make_model, write_jsonl
from tests.trainer.runs import FakeEngine, build, canned, completion, run, write_inputs

GAE = {"advantage_estimator": "gae", "critic_learning_rate": 1e-3}


# ---- parts ----------------------------------------------------------------------------------------------------------
def scored(prompt_len, values, returns, *, index=0):
    """A sample with a response of one token for each value."""
    n = len(values)
    sample = make_sample([5] * prompt_len, [6] * n, [0.0] * n, finish_reason="stop", group_id=0, index=index, row=0)
    before = [9.0] * (prompt_len - 1)  # off the mask: must not be read
    sample.values, sample.returns = torch.tensor(before + values), torch.tensor(before + returns)
    return sample


def test_explained_variance_by_hand():
    """Returns 1, 2, 3 have variance 2/3; the errors 0, 0, 1 have variance 2/9: 1 - 1/3."""
    samples = [scored(3, [1.0, 2.0], [1.0, 2.0]), scored(1, [2.0], [3.0], index=1)]
    metrics = value_metrics(samples)
    assert metrics["critic/explained_variance"] == pytest.approx(2 / 3)
    assert metrics["critic/value_mean"] == pytest.approx(5 / 3)
    assert metrics["critic/return_mean"] == pytest.approx(2)


def test_there_is_no_explained_variance_where_returns_do_not_vary():
    almost = 1.0 + 1e-7  # the next fp32 number
    assert "critic/explained_variance" not in value_metrics([scored(2, [0.5, 0.0], [1.0, almost])])
    sample = scored(1, [1.0], [2.0])
    sample.action_mask[:] = False
    assert value_metrics([sample]) == {}


def test_the_value_loss_is_a_mean_over_the_tokens_of_the_step():
    """New values 1 and 0 against old 0 and returns 2 and 0: unclipped errors 1 and 0; clipped to 0.2 the first has
    error 1.8 and counts: 0.5 x 1.8^2 / 2 tokens, and half of the tokens are clipped."""
    exp = collate([scored(2, [0.0, 0.0], [2.0, 0.0])])
    update = ValueUpdate(None, CriticConfig(value_clip=0.2), OptimConfig())  # type: ignore[arg-type]
    loss, metrics = update.loss(lambda *_: torch.tensor([[7.0, 1.0, 0.0]]), exp, BatchCounts.of(exp.action_mask))
    assert float(loss) == pytest.approx(0.5 * 1.8**2 / 2)
    assert float(metrics["step/critic/loss"]) == pytest.approx(float(loss))
    assert float(metrics["sum/critic/clip_frac"]) == 1


class Texts:
    def take(self, count):
        return [make_sample([5], [6] * n, [0.0] * n, finish_reason="stop", group_id=0, index=0, row=0) for n in (3, 1)]


def test_the_texts_loss_is_the_mean_over_their_tokens_at_temperature_1():
    """log p -1, -2, -3 and -6 over 4 tokens: 3, times ptx_coef 0.1; in two micro-batches 0.15 and 0.15."""
    asked = []

    def engine(sequences, action_mask, temperature):
        asked.append(temperature)
        log_probs = torch.tensor([[-1.0, -2.0, -3.0]]) if action_mask.sum() == 3 else torch.tensor([[-6.0]])
        return log_probs, None

    ptx = PtxLoss(Texts(), ptx_coef=0.1)  # type: ignore[arg-type]
    part = ptx.part(2)
    counts = BatchCounts(num_tokens=4, num_sequences=2)
    losses = [part.loss(engine, collate([sample]), counts) for sample in part.samples]
    assert [float(loss) for loss, _ in losses] == pytest.approx([0.15, 0.15])
    assert sum(float(metrics["step/policy/ptx_loss"]) for _, metrics in losses) == pytest.approx(3)
    assert asked == [1.0, 1.0]


# ---- one rank -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


def weights_of(engine):
    return {name: w.clone() for name, w in iter_weights(engine, bucket_mb=64)}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_with_gae_trains_both_and_logs_the_critic(tmp_path, one_rank, inputs):
    """The saved critic scores like the trained one, and starts another run with the head it has."""
    from transformers import AutoModelForSequenceClassification

    trainer = build(tmp_path, **inputs, **GAE, save_value_network=True)
    before = weights_of(trainer.actor), weights_of(trainer.critic)
    trainer.fit()
    assert not same(before[0], weights_of(trainer.actor))
    assert not same(before[1], weights_of(trainer.critic))
    for row in trainer.result().metrics:
        for name in ("loss", "clip_frac", "grad_norm", "lr", "explained_variance", "value_mean"):
            assert row[f"critic/{name}"] is not None, name
        assert row["critic/explained_variance"] < 1
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        values = trainer.critic(torch.tensor([[5, 6, 7, 8, 9, 0]]), torch.ones(1, 5, dtype=torch.bool))
        torch.testing.assert_close(classifier(input_ids=ids).logits[0, 0], values[0, -1], atol=1e-5, rtol=1e-5)


def test_the_critic_trains_alone_first_and_the_actors_schedule_waits(tmp_path, one_rank, inputs):
    """4 steps of one optimizer step: the actor has a schedule over its own 2, the critic one over all 4."""
    flags = {**inputs, **GAE, "num_episodes": 2, "lr_scheduler": "linear"}
    trainer = build(tmp_path, **flags, freezing_actor_steps=2)
    first = weights_of(trainer.actor)
    own_train, unchanged = trainer.train, []

    def train(samples):
        metrics = own_train(samples)
        unchanged.append(same(first, weights_of(trainer.actor)))
        return metrics

    trainer.train = train
    trainer.fit()
    result = trainer.result()
    assert unchanged == [True, True, False, False]
    assert ["policy/loss" in row for row in result.metrics] == [False, False, True, True]
    assert [row.get("policy/lr") for row in result.metrics] == [None, None, 1e-3, pytest.approx(0.5e-3)]
    assert result.column("critic/lr") == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])


def test_returns_are_the_rewards_to_go_where_lambda_is_1(tmp_path, one_rank, inputs):
    """gamma = lambda = 1 and no KL: every token's return is the reward of its response, wherever it was cut, and
    values change the advantages only. Responses of 1, 3 and 8 tokens, 8 being the longest; pad == eos."""
    answers = completion([9, 10, 2]), completion([2]), completion(range(20, 28), "length")
    flags = {**inputs, **GAE, "lambd": 1.0, "gamma": 1.0, "init_kl_coef": 0.0, "max_samples": 3}
    trainer = build(tmp_path, FakeEngine(canned(*answers)), **flags, rollout_batch_size=3, train_batch_size=6)
    samples = trainer.generate(1, [0, 1, 2], 0)
    trainer.score(samples)
    for sample in trainer.compute_advantages(samples):
        assert sample.returns is not None and sample.values is not None and sample.advantages is not None
        mask = sample.action_mask
        torch.testing.assert_close(sample.returns[mask], torch.full((int(mask.sum()),), sample.rewards))
        assert (sample.values[mask] != 0).all()
        assert (
            not sample.returns[~mask].any() and not sample.values[~mask].any() and not sample.advantages[~mask].any()
        )


@pytest.mark.parametrize("estimator", ["dr_grpo", "gae"])
def test_truncated_samples_leave_the_loss_and_not_the_baseline(tmp_path, one_rank, inputs, estimator):
    """Of each pair the second is cut. Its reward stays in the mean that the first one's advantage is taken from; its
    tokens train nothing, count nowhere, and gae's whitening leaves them out: mean 0, variance 1 over the others."""
    answers = completion([9, 10, 2]), completion(range(20, 28), "length")
    flags = {**inputs, **GAE, "advantage_estimator": estimator, "init_kl_coef": 0.0, "mask_truncated": True}
    if estimator != "gae":
        flags["critic_learning_rate"] = None
    trainer = build(tmp_path, FakeEngine(canned(*answers)), **flags)
    samples = trainer.generate(1, [0, 1, 2, 3], 0)
    rewards = {(s.group_id, s.index): s.rewards for s in samples}
    trainer.score(samples)
    samples = trainer.compute_advantages(samples)
    assert [s.response_length for s in samples] == [3, 0] * 4
    assert [s.num_sampled for s in samples] == [3, 8] * 4
    kept = torch.stack([s.advantages[s.action_mask] for s in samples[::2]])
    if estimator == "gae":
        assert float(kept.mean()) == pytest.approx(0, abs=1e-5)
        assert float(kept.var(correction=0)) == pytest.approx(1, abs=1e-4)
        return
    for sample, advantages in zip(samples[::2], kept, strict=True):
        mine, other = rewards[sample.group_id, 0], rewards[sample.group_id, 1]
        torch.testing.assert_close(advantages, torch.full((3,), (mine - other) / 2))


def test_texts_lower_their_own_loss(tmp_path, one_rank, inputs):
    """Rewards without spread give no policy gradient: what is left to learn is one text, over and over."""
    texts = write_jsonl(tmp_path / "texts.jsonl", [{"text": "The answer is"}])
    flags = {**inputs, "pretrain_data": texts, "pretrain_key": "text", "ptx_coef": 1.0, "init_kl_coef": 0.0}
    engine = FakeEngine(canned(completion([9, 2])))
    losses = run(tmp_path / "out", engine, **flags, num_episodes=3, lr_scheduler="constant").column("policy/ptx_loss")
    assert len(losses) == 6
    assert losses[-1] < 0.9 * losses[0]


def test_a_critic_of_another_vocabulary_is_refused(tmp_path, one_rank, inputs):
    import json

    path = Path(make_model(tmp_path / "critic", "llama"))
    from safetensors.torch import load_file, save_file

    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:300].clone()
    weights["lm_head.weight"] = weights["lm_head.weight"][:300].clone()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": 300}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"--critic_pretrain .* knows 300 tokens, the tokenizer of --pretrain 320"):
        build(tmp_path / "out", **inputs, **GAE, critic_pretrain=path)


def test_a_critic_with_other_ids_for_the_same_tokens_is_refused(tmp_path, one_rank, inputs):
    other = permuted(make_model(tmp_path / "critic", "llama"), torch.randperm(320).tolist())
    with pytest.raises(UserError, match=f"^--critic_pretrain {other} has other token ids than --pretrain"):
        build(tmp_path / "out", **inputs, **GAE, critic_pretrain=other)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_each_role_has_the_adam_that_its_flag_asks_for_and_trains_the_same(tmp_path, one_rank, inputs):
    """Weights move by about 1e-3 a step, and agree to fp32 noise of both implementations."""
    weights = {}
    for name, flags, adams in (
        ("device", {}, ("AdamW", "AdamW")),
        ("host", {"adam_offload": True}, ("DeepSpeedCPUAdam", "DeepSpeedCPUAdam")),
        ("actor", {"adam_offload": True, "critic_adam_offload": False}, ("DeepSpeedCPUAdam", "AdamW")),
        ("critic", {"critic_adam_offload": True}, ("AdamW", "DeepSpeedCPUAdam")),
    ):
        trainer = build(tmp_path / name, **{**inputs, **GAE, "zero_stage": 2, "max_samples": 4, **flags})
        assert tuple(type(e.basic_optimizer).__name__ for e in (trainer.actor, trainer.critic)) == adams
        trainer.fit()
        weights[name] = [weights_of(trainer.actor), weights_of(trainer.critic)]
    for name in ("host", "actor", "critic"):
        for expected, found in zip(weights["device"], weights[name], strict=True):
            for key in expected:
                torch.testing.assert_close(
                    found[key], expected[key], atol=2e-5, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
                )


# ---- two ranks ------------------------------------------------------------------------------------------------------
def train_everything(folder, inputs, zero_stage):
    """Actor's and critic's weights and the metrics of two steps with critic, texts and normalised rewards."""
    flags = {**inputs, **GAE, "zero_stage": zero_stage, "normalize_reward": True, "mask_truncated": True}
    flags |= {
        "generate_max_len": 8,
        "stop": list("aeiounrst"),
        "train_batch_size": 4,
        "pretrain_key": "text",
        "verify_weight_sync": True,
    }
    trainer = build(folder, **flags)
    trainer.fit()
    result = trainer.result()
    return result.weights, weights_of(trainer.critic), result.metrics, trainer.texts.state_dict()


@pytest.mark.slow
def test_two_ranks_under_zero_3_train_what_one_rank_trains(tmp_path):
    """Samples, values, whitening, moments of the rewards, texts and both updates: 2 steps of 2 optimizer steps."""
    inputs = write_inputs(tmp_path / "inputs")
    texts = [{"text": "ab" * i} for i in range(1, 6)]
    inputs["pretrain_data"] = write_jsonl(tmp_path / "texts.jsonl", texts)
    actor, critic, rows, state = run_ranks(1, train_everything, str(tmp_path / "one"), inputs, 0)[0]
    assert 0 < rows[0]["rollout/truncated"] < 1
    ranks = run_ranks(2, train_everything, str(tmp_path / "two"), inputs, 3)
    for other_actor, other_critic, _, other_state in ranks:
        assert other_state == state
        for ours, theirs in ((actor, other_actor), (critic, other_critic)):
            gaps = torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours])
            assert float(gaps.max()) < 5e-4  # of 4e-3; Adam divides rounding by rounding where gradients cancel
            assert float(gaps.mean()) < 5e-6
    for row, other in zip(rows, ranks[0][2], strict=True):
        for name in ("rollout/reward", "critic/loss", "critic/explained_variance", "policy/ptx_loss", "policy/loss"):
            assert other[name] == pytest.approx(row[name], rel=1e-3, abs=1e-4), name
