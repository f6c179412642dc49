"""The trainer with engines that return what a test wants: order of calls, odd responses, every phase's numbers."""

import math
import re

import pytest
import torch

from spmdrl.errors import UserError
from spmdrl.rollout.engine import Completion
from tests.tiny import make_tokenizer
from tests.trainer.runs import FakeEngine, PerturbedEngine, build, canned, completion, run, write_inputs

TOKENIZER = make_tokenizer()
A, B, C = (TOKENIZER.convert_tokens_to_ids(letter) for letter in "abc")
EOS = TOKENIZER.eos_token_id
# 1 for each a, 3 for each c; so a test sets rewards by choosing the response.
COUNTING_REWARD = """
def reward_func(queries, prompts, labels, **columns):
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return [response.count("a") + 3 * response.count("c") for response in responses]
"""
TWO_PROMPTS = {"rollout_batch_size": 2, "train_batch_size": 4, "init_kl_coef": 0, "rollout_correction": "none"}
# Group 0: reward 1 with 2 tokens, 0 with 4. Group 1: reward 3 with 1 token, 1 with 3.
FOUR = (completion([A, EOS]), completion([B, B, B, EOS]), completion([C], "length"), completion([A, B, B], "length"))


@pytest.fixture
def inputs(tmp_path, one_rank):
    return write_inputs(tmp_path / "in", num_prompts=4)


@pytest.fixture
def two_prompts(tmp_path, one_rank):
    return write_inputs(tmp_path / "in", num_prompts=2, reward=COUNTING_REWARD) | TWO_PROMPTS


def all_finite(result):
    return all(math.isfinite(value) for row in result.metrics for value in row.values()) and all(
        bool(torch.isfinite(w).all()) for w in result.weights.values()
    )


def moved(trainer_weights, path):
    from transformers import AutoModelForCausalLM

    start = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    return max(float((w - start[name].detach()).abs().max()) for name, w in trainer_weights.items())


# ---- the engine -----------------------------------------------------------------------------------------------------
def test_every_step_sends_all_weights_and_resets_the_prefix_cache_before_it_generates(tmp_path, inputs):
    engine = FakeEngine(canned(completion([A, EOS])))
    trainer = build(tmp_path / "out", engine, **inputs, rollout_batch_size=2, train_batch_size=4)
    names = [name for name, _ in trainer.actor.module.model.named_parameters()]
    trainer.fit()
    step = [
        ("wake_up", ("weights",)),
        ("load_weights", names),
        "reset_prefix_cache",
        ("wake_up", ("kv_cache",)),
        "generate",
        "sleep",
    ]
    assert engine.calls == step * 2


def test_remax_samples_its_greedy_baseline_while_the_engine_is_awake(tmp_path, inputs):
    engine = FakeEngine(canned(completion([A, EOS])))
    run(tmp_path / "out", engine, **inputs, advantage_estimator="remax")
    assert engine.calls[3:] == [("wake_up", ("kv_cache",)), "generate", "generate", "sleep"]


def test_a_prefix_cache_that_cannot_be_reset_stops_the_run(tmp_path, inputs):
    engine = FakeEngine(canned(completion([A, EOS])), resets=False)
    with pytest.raises(RuntimeError, match="prefix cache"):
        run(tmp_path / "out", engine, **inputs)
    assert "generate" not in engine.calls


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.5, "top_k": 5}])
def test_verify_weight_sync_passes_with_the_right_weights(tmp_path, inputs, filters):
    """Also where rollouts are sampled from a part of the distribution: the probe is not."""
    trainer = build(tmp_path / "out", **inputs, **filters, verify_weight_sync=True, temperature=0.6)
    trainer.fit()
    assert 0 < trainer.weight_gap < 1e-4


def test_verify_weight_sync_stops_with_the_worst_tokens_numbers(tmp_path, inputs):
    with pytest.raises(RuntimeError, match="verify_weight_sync") as error:
        run(tmp_path / "out", PerturbedEngine, **inputs, verify_weight_sync=True)
    where = r"row \d, token \d+ at position \d+: engine (-[\d.]+), trainer (-[\d.]+)"
    found = re.search(rf"disagree by ([\d.]+) .*{where}", str(error.value))
    assert found, error.value
    gap, engine, trainer = map(float, found.groups())
    assert gap > 2e-3
    assert abs(engine - trainer) == pytest.approx(gap, abs=2e-6)


def test_verify_weight_sync_does_not_take_nan_for_agreement(tmp_path, inputs):
    with pytest.raises(RuntimeError, match="verify_weight_sync"):
        run(tmp_path / "out", lambda engine: ShiftedEngine(engine, by=math.nan), **inputs, verify_weight_sync=True)


# ---- odd responses --------------------------------------------------------------------------------------------------
ODD = (completion([]), completion([EOS]), completion([EOS, EOS]), completion([A, B, C, EOS]))


@pytest.mark.parametrize("responses", [ODD, ODD[:1]], ids=["some", "all empty"])
@pytest.mark.parametrize("estimator", ["group_norm", "reinforce", "opo", "remax"])
def test_empty_responses_and_lone_eos_leave_everything_finite(tmp_path, one_rank, estimator, responses):
    """Also after prompts of one token, where an empty response has no next-token step at all."""
    rows = [{"question": "?", "answer": 0}, {"question": "b?", "answer": 0}, {"question": "?", "answer": 0}] * 2
    inputs = write_inputs(tmp_path / "in", rows=rows)
    flags = {"rollout_batch_size": 3, "train_batch_size": 6, "micro_train_batch_size": 2}
    if estimator in ("group_norm", "opo"):
        flags |= {"use_kl_loss": True, "kl_estimator": "k2"}
    engine = FakeEngine(canned(*responses))
    result = run(tmp_path / "out", engine, **inputs, **flags, advantage_estimator=estimator)
    assert len(result.metrics) == 2
    assert all_finite(result)
    if responses == ODD[:1]:
        assert result.column("policy/loss") == [0, 0]
        assert moved(result.weights, inputs["pretrain"]) == 0


def test_an_empty_response_counts_in_its_groups_baseline(tmp_path, two_prompts):
    """Rewards 0 (empty) and 1: centred -1/2 and 1/2."""
    engine = FakeEngine(canned(completion([]), completion([A, EOS])))
    result = run(tmp_path / "out", engine, **two_prompts, advantage_estimator="dr_grpo")
    empty, full = result.samples[0][:2]
    assert (empty.rewards, full.rewards) == (0, 1)
    assert empty.advantages.tolist() == [0.0] * len(empty.action_mask)
    assert full.advantages[full.action_mask].tolist() == [0.5, 0.5]


def test_ids_that_no_tokenizer_would_write_are_trained_as_they_are(tmp_path, two_prompts):
    """ " the" letter by letter, where the tokenizer has one token for it; an EOS that was not the end; a truncated
    response without EOS."""
    letters = [TOKENIZER.convert_tokens_to_ids(piece) for piece in ("Ġ", "t", "h", "e")]
    assert TOKENIZER(" the")["input_ids"] != letters
    responses = [[*letters, EOS], [EOS, A, EOS], [A, B, C, A], letters]
    reasons = ["stop", "stop", "length", "length"]
    engine = FakeEngine(canned(*map(completion, responses, reasons)))
    result = run(tmp_path / "out", engine, **two_prompts)
    for sample, ids, reason in zip(result.samples[0], responses, reasons, strict=True):
        assert sample.sequence[-len(ids) :].tolist() == ids
        assert sample.action_mask.sum() == len(ids)
        assert sample.truncated == (reason == "length")
    assert result.column("rollout/truncated") == [0.5]
    assert [row["response"] for row in result.rows] == [" the", "<|im_end|>a", "abca", " the"]


# ---- rewards and advantages -----------------------------------------------------------------------------------------
def test_reward_functions_get_the_label_and_columns_of_the_right_row(tmp_path, one_rank):
    """The prompt of row i has i times "ab": checked for every sample after shuffling and n samples a prompt."""
    reward = """
seen = []

def reward_func(queries, prompts, labels, number):
    for query, prompt, label, n in zip(queries, prompts, labels, number, strict=True):
        assert prompt == "ab" * n + "?" and label == {"value": n} and query.startswith(prompt), (prompt, label, n)
    return {"rewards": number, "extra_logs": {"number": number}}
"""
    inputs = write_inputs(tmp_path / "in", num_prompts=8, reward=reward)
    result = run(tmp_path / "out", FakeEngine(canned(completion([A, EOS]))), **inputs)
    assert sorted(row["number"] for row in result.rows) == sorted([*range(1, 9)] * 2)
    assert [row["number"] for row in result.rows] != sorted(row["number"] for row in result.rows)
    assert all(row["number"] == row["row"] + 1 for row in result.rows)


# Rewards (1, 0), (3, 1); lengths (2, 4), (1, 3).
EXPECTED = {
    "group_norm": [0.7071, -0.7071, 0.7071, -0.7071],  # (r - mean) / std, std with G - 1: 0.7071 and 1.4142
    "rloo": [1, -1, 2, -2],  # r - the other's
    "dr_grpo": [0.5, -0.5, 1, -1],  # r - mean
    "opo": [2 / 3, -1 / 3, 1.5, -0.5],  # baselines by length: (2*1 + 4*0)/6 and (1*3 + 3*1)/4
    "remax": [0, -1, 3, 1],  # greedy rewards 1 and 0
    # Centred, then over the 10 tokens: mean -0.3, variance 5.5/10 - 0.09 = 0.46.
    "reinforce_baseline": [0.8 / 0.46**0.5, -0.2 / 0.46**0.5, 1.3 / 0.46**0.5, -0.7 / 0.46**0.5],
    # Rewards over the 10 tokens: mean 0.8, variance 14/10 - 0.64 = 0.76.
    "reinforce": [0.2 / 0.76**0.5, -0.8 / 0.76**0.5, 2.2 / 0.76**0.5, 0.2 / 0.76**0.5],
}


def answer_four(number, request, options):
    """FOUR in turn; greedy requests, one a prompt, come after them: rewards 1 and 0."""
    if options.temperature == 0:
        return (completion([A, EOS]), completion([B, EOS]))[number - len(FOUR)]
    return FOUR[number]


@pytest.mark.parametrize("estimator", EXPECTED)
def test_advantages_of_each_estimator(tmp_path, two_prompts, estimator):
    result = run(tmp_path / "out", FakeEngine(answer_four), **two_prompts, advantage_estimator=estimator)
    samples = result.samples[0]
    assert [s.rewards for s in samples] == [1, 0, 3, 1]
    for sample, expected in zip(samples, EXPECTED[estimator], strict=True):
        own = sample.advantages[sample.action_mask]
        assert own.tolist() == pytest.approx([expected] * sample.response_length, abs=1e-4)
        assert not sample.advantages[~sample.action_mask].any()
    assert result.metrics[0]["rollout/reward"] == 1.25
    assert result.metrics[0]["rollout/response_length"] == 2.5


def test_gamma_discounts_towards_the_start(tmp_path, two_prompts):
    result = run(tmp_path / "out", FakeEngine(answer_four), **two_prompts, advantage_estimator="dr_grpo", gamma=0.5)
    first, second, *_ = result.samples[0]
    assert first.advantages[first.action_mask].tolist() == [0.25, 0.5]
    assert second.advantages[second.action_mask].tolist() == [-0.0625, -0.125, -0.25, -0.5]


def shift_reference(trainer):
    """Another reference model, so that the KL is not 0."""
    generator = torch.Generator().manual_seed(0)
    for p in trainer.ref_model.parameters():
        p.data += 0.02 * torch.randn(p.shape, generator=generator)


def test_kl_in_the_reward_is_taken_off_from_each_token_on(tmp_path, two_prompts):
    """Advantage at t = centred reward - 0.5 * sum over s >= t of (log-prob - reference's)."""
    flags = two_prompts | {"init_kl_coef": 0.5, "advantage_estimator": "dr_grpo"}
    trainer = build(tmp_path / "out", FakeEngine(answer_four), **flags)
    shift_reference(trainer)
    trainer.fit()
    result = trainer.result()
    kls = []
    for sample, reward in zip(result.samples[0], EXPECTED["dr_grpo"], strict=True):
        mask = sample.action_mask
        kl = (sample.log_probs - sample.ref_log_probs)[mask]
        kls += kl.tolist()
        to_come = kl.flip(0).cumsum(0).flip(0)
        torch.testing.assert_close(sample.advantages[mask], reward - 0.5 * to_come, atol=1e-5, rtol=0)
    assert max(map(abs, kls)) > 0.05
    metrics = result.metrics[0]
    assert metrics["policy/kl"] == pytest.approx(sum(kls) / 10, abs=1e-6)
    assert metrics["policy/kl_coef"] == 0.5
    assert metrics["policy/loss"] == metrics["policy/pg_loss"]


def test_kl_as_a_loss_leaves_advantages_alone_and_enters_the_loss(tmp_path, two_prompts):
    """loss = policy loss + 0.5 * mean over tokens of k2."""
    flags = {"init_kl_coef": 0.5, "use_kl_loss": True, "kl_estimator": "k2", "advantage_estimator": "dr_grpo"}
    trainer = build(tmp_path / "out", FakeEngine(answer_four), **two_prompts | flags)
    shift_reference(trainer)
    trainer.fit()
    result = trainer.result()
    for sample, expected in zip(result.samples[0], EXPECTED["dr_grpo"], strict=True):
        assert sample.advantages[sample.action_mask].tolist() == [expected] * sample.response_length
    metrics = result.metrics[0]
    assert metrics["policy/kl"] > 1e-4
    assert metrics["policy/loss"] - metrics["policy/pg_loss"] == pytest.approx(0.5 * metrics["policy/kl"], abs=1e-6)


def test_the_kl_weight_moves_towards_its_target(tmp_path, inputs):
    """Each step: times 1 + clip(kl / target - 1, -0.2, 0.2) * 4 samples / horizon 40."""
    flags = {"rollout_batch_size": 2, "train_batch_size": 4, "init_kl_coef": 0.5, "kl_target": 0.1, "kl_horizon": 40}
    engine = FakeEngine(canned(*FOUR))
    trainer = build(tmp_path / "out", engine, **inputs, **flags, kl_estimator="k3")
    shift_reference(trainer)
    trainer.fit()
    first, second = trainer.result().metrics
    error = min(max(first["policy/kl"] / 0.1 - 1, -0.2), 0.2)
    assert error != 0
    assert first["policy/kl_coef"] == 0.5
    assert second["policy/kl_coef"] == pytest.approx(0.5 * (1 + error * 4 / 40))


def test_truncated_responses_leave_the_loss_but_not_the_reward(tmp_path, two_prompts):
    """Group 1 is truncated: 6 tokens are trained on, those of group 0, with half a reward each way: the first pass of
    the policy loss is -(2 * 0.5 - 4 * 0.5) / 6."""
    flags = two_prompts | {"mask_truncated": True, "advantage_estimator": "dr_grpo"}
    result = run(tmp_path / "out", FakeEngine(answer_four), **flags)
    assert [s.response_length for s in result.samples[0]] == [2, 4, 0, 0]
    metrics = result.metrics[0]
    assert metrics["rollout/reward"] == 1.25
    assert metrics["rollout/num_tokens"] == 10
    assert metrics["policy/pg_loss"] == pytest.approx(1 / 6, abs=1e-6)


# ---- engine and trainer disagree ------------------------------------------------------------------------------------
class ShiftedEngine:
    """An engine that reports log-probs off by a constant, as one with other kernels might."""

    own_forward = False

    def __init__(self, engine, by=-0.5):
        self.engine, self.by = engine, by

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, requests, options):
        return [
            Completion(c.token_ids, [x + self.by for x in c.log_probs], c.finish_reason)
            for c in self.engine.generate(requests, options)
        ]


def test_the_gap_between_engine_and_trainer_is_logged_and_its_weights_are_capped(tmp_path, inputs):
    """Trainer over engine is exp(0.5) = 1.65 everywhere; tis keeps it below 2, and below 1.2 if told so."""
    free = run(tmp_path / "a", ShiftedEngine, **inputs).metrics[0]
    assert free["mismatch/abs_diff"] == pytest.approx(0.5, abs=1e-5)
    assert free["mismatch/max_abs_diff"] == pytest.approx(0.5, abs=1e-5)
    assert free["mismatch/outside"] == 1
    assert free["mismatch/weight"] == pytest.approx(math.exp(0.5), abs=1e-4)
    capped = run(tmp_path / "b", ShiftedEngine, **inputs, rollout_correction_range=(0, 1.2)).metrics[0]
    assert capped["mismatch/weight"] == pytest.approx(1.2, abs=1e-6)
    assert capped["policy/pg_loss"] == pytest.approx(free["policy/pg_loss"] * 1.2 / math.exp(0.5), abs=1e-5)


def test_without_correction_the_engines_log_probs_do_not_enter_the_loss(tmp_path, inputs):
    plain = run(tmp_path / "a", **inputs, rollout_correction="none")
    shifted = run(tmp_path / "b", ShiftedEngine, **inputs, rollout_correction="none")
    assert shifted.metrics[0]["mismatch/abs_diff"] == pytest.approx(0.5, abs=1e-5)
    assert all(torch.equal(plain.weights[name], shifted.weights[name]) for name in plain.weights)


def test_the_engines_log_probs_can_be_the_behaviour_policy(tmp_path, inputs):
    """The ratio is then exp(0.5) on the first pass."""
    result = run(tmp_path / "a", ShiftedEngine, **inputs, old_log_probs="engine")
    assert result.metrics[0]["policy/ratio_first_pass"] == pytest.approx(math.exp(0.5) - 1, abs=1e-4)
    assert result.metrics[0]["policy/ratio"] == pytest.approx(math.exp(0.5), abs=1e-4)


# ---- counts and schedule --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zero_stage", [0, 2])
def test_the_number_of_optimizer_steps_is_the_planned_one_and_the_last_rate_is_the_minimum(
    tmp_path, one_rank, zero_stage
):
    """10 prompts: 2 steps of 4 an episode, 2 episodes; 8 samples make 2 optimizer steps of 4, twice: 16 in all. A
    micro-batch of 3 does not divide 4, and no gradient is left over for the next rollout. The rate that is logged is
    that of a step's fourth: with 4 of warmup, of numbers 3, 7, 11 and 15."""
    inputs = write_inputs(tmp_path / "in", num_prompts=10)
    flags = {"num_episodes": 2, "max_epochs": 2, "train_batch_size": 4, "zero_stage": zero_stage}
    trainer = build(tmp_path / "out", FakeEngine(canned(*FOUR)), **inputs, **flags, lr_warmup_ratio=0.2)
    left_over = []
    own = trainer.finish_step
    trainer.finish_step = lambda *args: (left_over.append(gradients(trainer)), own(*args))
    trainer.fit()
    result = trainer.result()
    assert trainer.sizes.total_optimizer_steps == trainer.actor.global_steps == 16
    assert [row["step"] for row in result.metrics] == [1, 2, 3, 4]
    last_ones = [3 / 4, *(0.1 + 0.9 * (1 + math.cos(math.pi * (i - 4) / 12)) / 2 for i in (7, 11, 15))]
    assert result.column("policy/lr") == pytest.approx([1e-3 * factor for factor in last_ones])
    assert trainer.actor.get_lr()[0] == pytest.approx(1e-4)
    assert left_over == [0.0] * 4


def gradients(trainer):
    """The largest gradient that waits for the next optimizer step, wherever the ZeRO stage keeps it."""
    grads = [p.grad for p in trainer.actor.module.parameters() if p.grad is not None]
    averaged = getattr(trainer.actor.optimizer, "averaged_gradients", {})
    grads += [g for group in averaged.values() if group for g in group]
    return max((float(g.abs().max()) for g in grads), default=0.0)


# ---- dynamic filtering ----------------------------------------------------------------------------------------------
FILTER_REWARD = """
def reward_func(queries, prompts, labels, flat):
    return [0.0 if f else float(query[len(prompt):].startswith("a")) for query, prompt, f in
            zip(queries, prompts, flat)]
"""
MIXED = (completion([A, EOS]), completion([B, EOS]))


def filter_inputs(folder, flat):
    rows = [{"question": "ab" * (i % 8) + "?", "answer": i, "flat": bool(f)} for i, f in enumerate(flat)]
    flags = {"rollout_batch_size": 2, "train_batch_size": 4, "dynamic_filtering": True}
    return write_inputs(folder, rows=rows, reward=FILTER_REWARD) | flags


def test_dynamic_filtering_fills_each_step_with_informative_groups(tmp_path, one_rank):
    """A third of 24 prompts give equal rewards: 16 groups are left, in steps of exactly 2, until the prompts end. Some
    draws bring a group too many, which is not trained on."""
    inputs = filter_inputs(tmp_path / "in", [1, 0, 0] * 8)
    engine = FakeEngine(canned(*MIXED))
    result = run(tmp_path / "out", engine, **inputs)
    assert len(engine.requests) == 48
    assert sum(len(samples) for samples in result.samples) < 32
    for samples in result.samples[:-1]:
        assert len({s.group_id for s in samples}) == 2
        assert len(samples) == 4
    for samples in result.samples:
        assert all(s.row % 3 for s in samples)
        assert sorted(s.rewards for s in samples) == [0.0] * (len(samples) // 2) + [1.0] * (len(samples) // 2)


def test_dynamic_filtering_gives_up_with_the_flags_to_change(tmp_path, one_rank):
    inputs = filter_inputs(tmp_path / "in", [1] * 12)
    with pytest.raises(UserError, match="--dynamic_filtering: 3 draws of --rollout_batch_size 2 did not give"):
        run(tmp_path / "out", FakeEngine(canned(*MIXED)), **inputs, dynamic_filtering_max_draws=3)


def test_dynamic_filtering_ends_with_the_prompts_and_saves(tmp_path, one_rank):
    """No group is informative: nothing to train on, the model is saved as it was."""
    inputs = filter_inputs(tmp_path / "in", [1] * 4)
    result = run(tmp_path / "out", FakeEngine(canned(*MIXED)), **inputs)
    assert result.samples == []
    assert (tmp_path / "out" / "model.safetensors").exists()
    assert moved(result.weights, inputs["pretrain"]) == 0


# ---- what is saved --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("zero_stage", [0, 3])
@pytest.mark.parametrize(("arch", "tie"), [("llama", False), ("qwen2", True), ("gpt2", True)])
def test_plain_transformers_loads_the_final_checkpoint(tmp_path, one_rank, arch, tie, zero_stage):
    """No key too many or too few, the live actor's logits, the tokenizer's template, the checkpoint's own dropout."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    dropout = {"resid_pdrop": 0.1} if arch == "gpt2" else {"attention_dropout": 0.1}
    inputs = write_inputs(tmp_path / "in", num_prompts=4, arch=arch, tie=tie, config=dropout)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    trainer = build(
        tmp_path / "out",
        FakeEngine(canned(*FOUR)),
        **inputs,
        zero_stage=zero_stage,
        apply_chat_template=True,
        tokenizer_chat_template=template,
        actor_learning_rate=1e-2,
    )
    trainer.fit()
    saved, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    ids = torch.randint(4, 300, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        live = trainer.actor.module.model(input_ids=ids).logits
        torch.testing.assert_close(saved.eval()(input_ids=ids).logits, live, atol=1e-5, rtol=0)
        start = AutoModelForCausalLM.from_pretrained(inputs["pretrain"], dtype=torch.float32).eval()
        assert (start(input_ids=ids).logits - live).abs().max() > 1e-3
    assert saved.config.tie_word_embeddings == tie
    assert all(getattr(saved.config, name) == value for name, value in dropout.items())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == template
    assert tokenizer.get_vocab() == TOKENIZER.get_vocab()
