"""The supervised programs: losses by hand, whole runs, what they save, how they resume, and dealing to ranks."""

import json
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from spmdrl.algos.losses import BatchCounts
from spmdrl.algos.preference import kd_forward
from spmdrl.config.supervised import (
    DPOConfig,
    DPOLossConfig,
    KTOConfig,
    KTOLossConfig,
    PairDataConfig,
    RewardLossConfig,
    RMConfig,
    SFTConfig,
    TextDataConfig,
)
from spmdrl.errors import UserError
from spmdrl.experience import collate, make_sample
from spmdrl.trainer.dpo import DPO
from spmdrl.trainer.kto import KTO
from spmdrl.trainer.objectives import SFT
from spmdrl.trainer.reward_training import RewardTraining
from tests.ranks import run_ranks
from tests.rewards.reward_models import make_reward_model, permuted
from tests.tiny import make_model
from tests.trainer.supervised import CONFIGS, HELD_OUT, ROWS, build, logged, run, weights_of, write_inputs

SLOW = pytest.mark.slow
PROGRAMS = pytest.mark.parametrize("program", CONFIGS)
FAST_FIRST = pytest.mark.parametrize(
    "program", [pytest.param(name, marks=() if name in ("sft", "rm") else SLOW) for name in CONFIGS]
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    return write_inputs(tmp_path_factory.mktemp("inputs"))


# ---- losses by hand -------------------------------------------------------------------------------------------------
def batch(lengths, targets=None):
    """Sequences of a prompt of one token and responses of these lengths, with a dict of targets each."""
    return collate(
        [
            make_sample([5], [6] * n, [0.0] * n, finish_reason="stop", group_id=0, index=0, row=0, targets=t)
            for n, t in zip(lengths, targets or [{}] * len(lengths), strict=True)
        ]
    )


def says(rows):
    """An engine whose log-probs of the rows are these, padded."""
    length = max(map(len, rows))
    return lambda *_: (torch.tensor([[*row, *[0.0] * (length - len(row))] for row in rows]), None)


def test_the_sft_loss_is_a_mean_over_the_tokens_of_the_step():
    """-1 -2 -3 and -6 over 4 tokens are 3; in two micro-batches 1.5 and 1.5."""
    sft, counts = SFT(SFTConfig(data=TextDataConfig(pretrain_mode=True))), BatchCounts(num_tokens=4, num_sequences=2)
    both, _ = sft.loss(says([[-1.0, -2.0, -3.0], [-6.0]]), batch([3, 1]), counts)
    one, _ = sft.loss(says([[-1.0, -2.0, -3.0]]), batch([3]), counts)
    other, _ = sft.loss(says([[-6.0]]), batch([1]), counts)
    assert [float(loss) for loss in (both, one, other)] == pytest.approx([3, 1.5, 1.5])


def softplus(x):
    return math.log1p(math.exp(x))


@pytest.mark.parametrize("loss", ["sigmoid", "logexp"])
def test_the_reward_models_loss_and_statistics(loss):
    """Scores 2 over 1 and 0 over 1: differences 1 and -1, one of two pairs right, scores 2 1 0 1."""
    training = RewardTraining(RMConfig(reward=RewardLossConfig(loss=loss)))
    counts = BatchCounts(num_tokens=4, num_sequences=4)
    value, metrics = training.loss(lambda *_: torch.tensor([2.0, 1.0, 0.0, 1.0]), batch([1] * 4), counts)
    assert float(value) == pytest.approx((softplus(-1) + softplus(1)) / 2)
    summary = training.summary({name.removeprefix("step/"): float(m) for name, m in metrics.items()})
    assert summary["accuracy"] == 0.5
    assert summary["margin"] == 0
    assert summary["reward_mean"] == 1
    assert summary["reward_std"] == pytest.approx(math.sqrt(2 / 3))  # squares 1 0 1 0 over n - 1


def test_a_margin_is_asked_for_pair_by_pair():
    training = RewardTraining(RMConfig(reward=RewardLossConfig(margin_loss=True)))
    exp = batch([1] * 4, [{"margin": m} for m in (3.0, 3.0, 0.0, 0.0)])
    counts = BatchCounts(num_tokens=4, num_sequences=4)
    value, _ = training.loss(lambda *_: torch.tensor([2.0, 1.0, 0.0, 1.0]), exp, counts)
    assert float(value) == pytest.approx((softplus(3 - 1) + softplus(1)) / 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Policy -3 and -4, reference -5 and -2: h = (-3 + 4) - (-5 + 2) = 4.
        ({"beta": 0.5}, softplus(-2)),
        ({"beta": 0.5, "label_smoothing": 0.25}, 0.75 * softplus(-2) + 0.25 * softplus(2)),
        ({"beta": 0.5, "ipo": True}, (4 - 1) ** 2),
        ({"beta": 0.5, "nll_loss_coef": 0.1}, softplus(-2) + 0.1 * 1.5),  # the chosen one's mean is -1.5
    ],
)
def test_dpo_losses_and_rewards(options, expected):
    dpo = DPO(DPOConfig(dpo=DPOLossConfig(**options)))
    exp = batch([2, 1], [{"ref_log_probs": -5.0}, {"ref_log_probs": -2.0}])
    value, metrics = dpo.loss(says([[-1.0, -2.0], [-4.0]]), exp, BatchCounts(num_tokens=3, num_sequences=2))
    assert float(value) == pytest.approx(expected)
    assert float(metrics["step/rewards/chosen"]) == pytest.approx(0.5 * 2)
    assert float(metrics["step/rewards/rejected"]) == pytest.approx(0.5 * -2)
    assert float(metrics["step/accuracy"]) == 1


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_the_kto_loss_has_a_baseline_and_weights():
    """h is 2 where wanted and -1 where not, z is 1: 0.5 x sigmoid(-0.5 (2 - 1)) and 2 x sigmoid(-0.5 (1 + 1))."""
    config = KTOConfig(kto=KTOLossConfig(beta=0.5, desirable_loss_weight=0.5, undesirable_loss_weight=2.0))
    exp = batch([1, 1], [{"ref_log_probs": -5.0, "label": 1.0}, {"ref_log_probs": -2.0, "label": 0.0}])
    counts = BatchCounts(num_tokens=2, num_sequences=2)
    value, metrics = KTO(config).loss(says([[-3.0], [-3.0]]), exp, counts, kl=1.0)
    assert float(value) == pytest.approx((0.5 * sigmoid(-0.5) + 2 * sigmoid(-1)) / 2)
    summary = KTO(config).summary({name.removeprefix("step/"): float(m) for name, m in metrics.items()})
    assert summary["rewards/wanted"] == pytest.approx(0.5 * 2)
    assert summary["rewards/unwanted"] == pytest.approx(0.5 * -1)
    assert summary["margin"] == pytest.approx(1.5)
    assert summary["kl"] == 1


def test_the_kto_baseline_is_of_the_other_prompts_responses():
    """Of the second sequences log pi - log pi_ref is -3 + 1 and -6 + 1: -3.5 on average. The first are trained."""

    def sequence(ids, row, index):
        targets = {"ref_log_probs": -1.0, "label": 1.0}
        return make_sample(
            [5], ids, [0.0] * len(ids), finish_reason="stop", group_id=row, index=index, row=row, targets=targets
        )

    def engine(sequences, action_mask, **_):
        log_probs = torch.where(sequences[:, 1:] == 7, -3.0, -1.0)
        return torch.where(action_mask, log_probs, 0.0), None

    samples = [
        sequence(ids, row, i) for row, pair in enumerate([([6], [7]), ([6], [7, 7])]) for i, ids in enumerate(pair)
    ]
    (part,) = KTO(KTOConfig()).parts(engine, samples)
    assert part.loss.keywords["kl"] == pytest.approx(-3.5)
    assert [sample.index for sample in part.samples] == [0, 0]


def test_a_micro_batch_without_samples_weighs_nothing():
    like = make_sample(
        [5], [6], [0.0], finish_reason="stop", group_id=0, index=0, row=0, targets={"ref_log_probs": 1.0}
    )
    empty, counts = collate([], like=like), BatchCounts(num_tokens=4, num_sequences=4)
    weight = torch.zeros(1, requires_grad=True)
    dpo = DPO(DPOConfig(data=PairDataConfig()))
    for value, metrics in (
        dpo.loss(lambda *_: (weight[None] * torch.ones(1, 1), None), empty, counts),
        RewardTraining(RMConfig()).loss(lambda s, lengths: weight.expand(1)[: len(lengths)], empty, counts),
    ):
        value.backward()
        assert value.item() == 0
        assert all(float(metric) == 0 for metric in metrics.values())
    assert float(weight.grad) == 0


# ---- whole runs -----------------------------------------------------------------------------------------------------
@FAST_FIRST
def test_a_run_learns_logs_and_saves_a_model_that_transformers_loads_the_same(tmp_path, one_rank, inputs, program):
    trainer = run(program, tmp_path, **inputs, max_epochs=4)
    train, held_out = logged(trainer, "train"), logged(trainer, "eval")
    assert len(train) == trainer.total_steps == 4 * 3  # 10 rows in batches of 4, 4 and 2
    assert len(held_out) == 4
    assert held_out[-1]["eval/loss"] < train[0]["train/loss"]
    assert all(row["train/grad_norm"] > 0 for row in train)
    cosine = [0.1 + 0.9 * (1 + math.cos(math.pi * i / 12)) / 2 for i in range(12)]
    assert [row["train/lr"] for row in train] == pytest.approx([1e-3 * factor for factor in cosine])
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        if program == "rm":
            model = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32)
            torch.testing.assert_close(
                model(input_ids=ids).logits[:, 0], trainer.engine(ids, torch.tensor([5])), atol=1e-5, rtol=1e-5
            )
            return
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        theirs = model(input_ids=ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        ours, _ = trainer.engine(ids, torch.ones(1, 4, dtype=torch.bool))
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template


@pytest.mark.parametrize("pad", ["eos", pytest.param("own", marks=SLOW), pytest.param(None, marks=SLOW)])
def test_a_reward_model_gives_transformers_the_same_scores_of_padded_texts_whatever_pads(tmp_path, one_rank, pad):
    """Sequences end in EOS, which is the pad token too, in the model that training starts from."""
    inputs = write_inputs(tmp_path / "inputs", pad=pad)
    trainer = run("rm", tmp_path / "rm", **inputs, value_head_prefix="v_head")
    assert trainer.eval_set is not None
    samples = trainer.eval_set.samples(range(len(trainer.eval_set)))
    exp = collate(samples)
    with torch.no_grad():
        ours = trainer.engine(exp.sequences, exp.lengths)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "rm")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32)
    texts = [tokenizer.decode(s.sequence) for s in samples]
    for side in ("right", "left"):
        tokenizer.padding_side = side
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.no_grad():
            theirs = model(**inputs).logits[:, 0]
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)
    last = logged(trainer, "eval")[-1]
    assert model.config.mean == pytest.approx(float(ours.mean()), abs=1e-5) == last["eval/reward_mean"]
    assert model.config.std == pytest.approx(float(ours.std()), abs=1e-5) == last["eval/reward_std"]
    accuracy = float((ours[0::2] > ours[1::2]).float().mean())
    assert last["eval/accuracy"] == pytest.approx(accuracy)


def test_statistics_of_scores_are_not_those_of_the_model_that_training_starts_from(tmp_path, one_rank, inputs):
    """Without held-out rows there are none: --normalize_reward would divide by those of other scores."""
    start = make_reward_model(tmp_path / "start", mean=3.0, std=7.0)
    run("rm", tmp_path / "rm", **{**inputs, "pretrain": start, "eval_dataset": None})
    config = json.loads((tmp_path / "rm" / "config.json").read_text())
    assert not {"mean", "std"} & set(config)


@pytest.mark.parametrize("flag", [{"eval_on_start": True}, {"eval_steps": 2}])
def test_an_evaluation_of_no_rows_is_refused(tmp_path, one_rank, inputs, flag):
    with pytest.raises(UserError, match=f"--{next(iter(flag))}: there are no held-out rows"):
        run("sft", tmp_path, **{**inputs, "eval_dataset": None}, **flag)


def test_held_out_loss_is_that_of_transformers_with_prompts_masked(tmp_path, one_rank, inputs):
    trainer = run("sft", tmp_path, **inputs, max_epochs=1, eval_on_start=True)
    first, *_, last = logged(trainer, "eval")
    assert first["eval/loss"] > last["eval/loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    total, count = 0.0, 0
    for row in HELD_OUT:
        prompt = tokenizer(f"User: {row['prompt']}\nAssistant: ")["input_ids"]
        response = tokenizer(f"{row['chosen']}<|im_end|>")["input_ids"]
        labels = torch.tensor([[-100] * len(prompt) + response])
        with torch.no_grad():
            total += float(model(input_ids=torch.tensor([prompt + response]), labels=labels).loss) * len(response)
        count += len(response)
    assert last["eval/loss"] == pytest.approx(total / count, rel=1e-5)


@SLOW
def test_without_learning_policy_and_reference_are_the_same_model(tmp_path, one_rank, inputs):
    """DPO's loss is then log 2, KTO's 1/2, every reward and KL 0, also for a reference that is given; and with pairs
    that go through both models one at a time exactly so, every pair being a draw."""
    trainer = run("dpo", tmp_path / "draws", **inputs, learning_rate=0.0, micro_train_batch_size=1)
    assert {(row["train/margin"], row["train/accuracy"]) for row in logged(trainer, "train")} == {(0.0, 0.5)}
    for program, loss in (("dpo", math.log(2)), ("kto", 0.5)):
        for ref_pretrain in (None, inputs["pretrain"]):
            trainer = run(program, tmp_path / program, **inputs, learning_rate=0.0, ref_pretrain=ref_pretrain)
            for row in logged(trainer, "train"):
                assert row["train/loss"] == pytest.approx(loss, abs=1e-5)
                assert all(abs(row[name]) < 1e-4 for name in row if "rewards" in name or name.endswith("kl"))


@SLOW
def test_another_reference_is_the_one_that_counts(tmp_path, one_rank, inputs):
    other = write_inputs(tmp_path / "other", seed=9)["pretrain"]
    trainer = run("dpo", tmp_path / "dpo", **inputs, learning_rate=0.0, ref_pretrain=other)
    assert any(abs(row["train/rewards/chosen"]) > 0.1 for row in logged(trainer, "train"))


def told(row):
    """Without the accuracy of a policy that is still the reference: rounding decides which pairs it gets right."""
    is_even = abs(row.get("train/margin", 1.0)) < 1e-5
    return {name: value for name, value in row.items() if not (is_even and name == "train/accuracy")}


@SLOW
@PROGRAMS
def test_packed_or_padded_and_in_micro_batches_of_any_size_a_run_is_the_same(tmp_path, one_rank, inputs, program):
    runs = [
        run(program, tmp_path / str(i), **inputs, **flags)
        for i, flags in enumerate(
            [{}, {"micro_train_batch_size": 1}, {"packing_samples": True, "micro_train_batch_size": 2}]
        )
    ]
    for kind in ("train", "eval"):
        first, *others = [logged(trainer, kind) for trainer in runs]
        for other in others:
            for a, b in zip(first, other, strict=True):
                assert told(a) == pytest.approx(told(b), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("program", ["rm", pytest.param("kto", marks=SLOW)])
def test_three_steps_and_three_more_are_six(tmp_path, one_rank, inputs, program):
    """Bitwise, across an epoch's end; what is logged and the best model too."""
    flags = {**inputs, "max_epochs": 2, "save_steps": 3, "eval_steps": 2}
    whole = run(program, tmp_path / "whole", **flags)
    first = build(program, tmp_path / "parts", **flags)
    stop_after(first, 3)
    second = run(program, tmp_path / "parts", **flags, load_checkpoint=True)
    assert whole.total_steps == 6
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, weights_of(second)[name]), name
    for kind in ("train", "eval"):
        assert logged(whole, kind) == logged(second, kind)
    best = [next(Path(tmp_path, name, "checkpoints", "best").glob("step_*")).name[:11] for name in ("whole", "parts")]
    assert best[0] == best[1]


def test_nothing_is_trained_while_a_checkpoint_is_being_written(tmp_path, one_rank, inputs, monkeypatch):
    """With a disk that takes its time, what comes back is the state after the step that was saved."""
    from spmdrl.trainer import checkpoint

    write = checkpoint._write_own

    def slowly(*args):
        time.sleep(0.3)
        return write(*args)

    monkeypatch.setattr(checkpoint, "_write_own", slowly)
    flags = {**inputs, "save_steps": 2, "eval_dataset": None}
    trainer, seen = build("sft", tmp_path, **flags), []
    finish_step = trainer.finish_step

    def recorded(metrics):
        finish_step(metrics)
        seen.append(weights_of(trainer))

    monkeypatch.setattr(trainer, "finish_step", recorded)
    trainer.fit()
    restored = build("sft", tmp_path, **flags, load_checkpoint=True)
    assert restored.step == 2
    for name, weight in weights_of(restored).items():
        assert torch.equal(weight, seen[1][name]), name


def stop_after(trainer, steps):
    """Train that many steps as fit() does, and let the run end there."""
    for rows in trainer.sampler:
        trainer.finish_step(trainer.train(trainer.train_set.samples(rows)))
        if trainer.step == steps:
            trainer.saver.finish()
            return


def test_dropout_acts_in_optimizer_steps_only(tmp_path, one_rank, inputs):
    """Neither on held-out rows nor on KTO's baseline, whatever came before."""
    flags = {"lora_rank": 2, "lora_dropout": 0.5, "learning_rate": 1e-2}
    trainer = build("kto", tmp_path, **inputs, **flags)
    assert trainer.eval_set is not None
    assert isinstance(trainer.objective, KTO)
    samples = trainer.train_set.samples(range(4))
    trainer.train(samples)
    seen = []
    for _ in range(2):
        seen.append((trainer.evaluate(trainer.eval_set), trainer.objective.estimate_kl(trainer.engine, samples[1::2])))
    assert seen[0] == seen[1]
    assert seen[0][1] != 0


@SLOW
def test_the_best_model_is_kept_apart_from_the_last(tmp_path, one_rank, inputs):
    """A learning rate that destroys what it learned: the best held-out loss is not the last."""
    trainer = run("sft", tmp_path, **inputs, max_epochs=2, learning_rate=0.03, eval_steps=1, lr_scheduler="constant")
    losses = [row["eval/loss"] for row in logged(trainer, "eval")]
    best = losses.index(min(losses)) + 1
    folder = next(Path(tmp_path, "checkpoints", "best").glob("step_*"))
    assert folder.name.startswith(f"step_{best:06d}")
    assert best < len(losses)
    AutoModelForCausalLM.from_pretrained(folder / "hf")


@SLOW
@pytest.mark.parametrize("program", ["sft", "rm", "dpo"])
def test_with_lora_the_adapter_that_is_saved_gives_the_trained_models_outputs(tmp_path, one_rank, inputs, program):
    """Also with the memory saved that LoRA is taken for; loaded by peft on the base that the adapter names."""
    from peft import AutoPeftModelForCausalLM, AutoPeftModelForSequenceClassification

    flags = {"lora_rank": 4, "learning_rate": 1e-2, "gradient_checkpointing": True}
    trainer = run(program, tmp_path, **inputs, **flags, max_epochs=2)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert logged(trainer, "eval")[-1]["eval/loss"] < logged(trainer, "train")[0]["train/loss"]
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        trainer.engine.eval()
        if program == "rm":
            model = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path, num_labels=1, dtype=torch.float32)
            ours, theirs = trainer.engine(ids, torch.tensor([5])), model(input_ids=ids).logits[:, 0]
        else:
            model = AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
            logits = model(input_ids=ids).logits[:, :-1]
            theirs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
            ours, _ = trainer.engine(ids, torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=1e-5)


# ---- distillation ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kd_coef", "arch"), [(0.0, "llama"), (0.4, "llama"), (1.0, "llama"), (0.4, "granite")])
def test_distillation_is_the_weighted_sum_of_both_losses_in_value_and_gradient(tmp_path, kd_coef, arch, monkeypatch):
    """In blocks of 3 rows that 7 tokens do not fill; the teacher has fewer ids, as models of a family may have.
    Granite divides its logits."""
    from functools import partial

    from spmdrl.models import distillation
    from spmdrl.models.distillation import Student, Teacher

    monkeypatch.setitem(distillation.BLOCK_LOGITS, "cpu", 3 * 320)
    paths = write_inputs(tmp_path)
    for name, divisor in (("pretrain", 5.0), ("teacher_model", 0.5)):
        if arch == "granite":
            as_granite(paths[name], divisor)
    student, plain, teacher, their = (
        AutoModelForCausalLM.from_pretrained(paths[name], dtype=torch.float32)
        for name in ("pretrain", "pretrain", "teacher_model", "teacher_model")
    )
    teacher.resize_token_embeddings(300)
    their.resize_token_embeddings(300)
    sequences = torch.randint(4, 300, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[0, 2:6], mask[1, 3:6] = True, True
    teacher = Teacher(teacher)
    over_teacher = partial(teacher, teacher(sequences, mask))
    student = Student(student)
    loss, ce, kl = student(sequences, mask, over_teacher=over_teacher, kd_coef=kd_coef)
    (2 * loss).backward()

    logits = plain(input_ids=sequences).logits[:, :-1]
    with torch.no_grad():
        wide = torch.nn.functional.pad(their(input_ids=sequences).logits[:, :-1], (0, 20), value=-1e9)
    kd = kd_forward(logits, wide, mask).sum()
    nll = -(logits.log_softmax(-1).gather(-1, sequences[:, 1:, None])[..., 0] * mask).sum()
    expected = (1 - kd_coef) * nll + kd_coef * kd
    (2 * expected).backward()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(ce, nll, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(kl, kd, atol=1e-4, rtol=1e-5)
    theirs = dict(plain.named_parameters())
    for name, param in student.model.named_parameters():
        torch.testing.assert_close(param.grad, theirs[name].grad, atol=1e-4, rtol=1e-4)


def as_granite(folder, divisor):
    """Granite is Llama with four constants."""
    path = Path(folder) / "config.json"
    config = json.loads(path.read_text()) | {"model_type": "granite", "architectures": ["GraniteForCausalLM"]}
    constants = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}
    path.write_text(json.dumps(config | constants | {"logits_scaling": divisor}))


# ---- models that read the ids of --pretrain -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("program", "flag"), [("kd", "teacher_model"), ("dpo", "ref_pretrain"), ("kto", "ref_pretrain")]
)
def test_a_second_model_with_other_ids_for_the_same_tokens_is_refused(tmp_path, one_rank, inputs, program, flag):
    other = permuted(make_model(tmp_path / "other", "llama"), torch.randperm(320).tolist())
    with pytest.raises(UserError, match=f"^--{flag} {other} has other token ids than --pretrain"):
        build(program, tmp_path, **{**inputs, flag: other})


def test_the_reference_model_is_packed_as_the_policy_is(tmp_path, one_rank, inputs, monkeypatch):
    """--load_in_4bit: else the two would not begin as the same function. Packing itself needs a GPU."""
    from spmdrl.trainer import build as roles
    from spmdrl.trainer import dpo, objectives

    asked = []
    load = dpo.load_causal_lm

    def recorded(*args, quantization_config, **options):
        asked.append(quantization_config)
        return load(*args, **options)

    for module in (dpo, objectives):
        monkeypatch.setattr(module, "load_causal_lm", recorded)
    for module in (dpo, objectives, roles):
        monkeypatch.setattr(module, "quantization", lambda config, dtype: {"quantization_config": config.load_in_4bit})
    build("dpo", tmp_path, **inputs, lora_rank=2, load_in_4bit=True)
    assert asked == [True, True]


@SLOW
def test_a_teacher_may_have_embeddings_beyond_the_tokenizer(tmp_path, one_rank, inputs):
    """Rows for ids that no text has change nothing, whatever they hold: the student has no such ids."""
    teacher = AutoModelForCausalLM.from_pretrained(inputs["teacher_model"], dtype=torch.float32)
    teacher.resize_token_embeddings(384, mean_resizing=False)
    with torch.no_grad():
        teacher.lm_head.weight[320:] = 3.0
    padded = tmp_path / "padded"
    teacher.save_pretrained(padded)
    AutoTokenizer.from_pretrained(inputs["teacher_model"]).save_pretrained(padded)
    runs = [
        logged(run("kd", tmp_path / name, **{**inputs, "teacher_model": path}), "train")
        for name, path in (("plain", inputs["teacher_model"]), ("more", padded))
    ]
    for a, b in zip(*runs, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


# ---- several ranks --------------------------------------------------------------------------------------------------
def train_each(inputs, folder, settings):
    """Weights and metrics of runs of (program, name, flags), in one process a rank."""
    from tests.distributed.test_strategy import smooth

    results = []
    for program, name, flags in settings:
        trainer = build(program, Path(folder, name), **inputs, **flags)
        smooth(trainer.engine)
        trainer.fit()
        results.append((weights_of(trainer), logged(trainer, "train"), logged(trainer, "eval")))
    return results


@SLOW
def test_every_program_makes_the_same_updates_however_rows_are_dealt(tmp_path):
    """One rank, ZeRO-0 and micro-batches of 4, against two with ZeRO-3 or 2 and micro-batches of 1, padded or packed.

    The last batch of an epoch has 2 rows, so that ranks have one each, and pairs are never parted.
    """
    inputs = write_inputs(tmp_path / "inputs")
    one = [(p, f"{p}_one", {"micro_train_batch_size": 4, "learning_rate": 1e-2}) for p in CONFIGS]
    two = [
        (
            p,
            f"{p}_{stage}",
            {"zero_stage": stage, "micro_train_batch_size": 1, "packing_samples": packs} | {"learning_rate": 1e-2},
        )
        for p in CONFIGS
        for stage, packs in ((3, False), (2, True))
    ]
    expected = dict(zip(CONFIGS, run_ranks(1, train_each, inputs, str(tmp_path), one)[0], strict=True))
    for rank in run_ranks(2, train_each, inputs, str(tmp_path), two):
        for (program, name, _), (weights, train, held_out) in zip(two, rank, strict=True):
            theirs, their_train, their_held_out = expected[program]
            assert weights.keys() == theirs.keys()
            saved = load_file(tmp_path / name / "model.safetensors")
            assert saved.keys() == theirs.keys()
            assert all(torch.equal(saved[key], weights[key]) for key in theirs), name
            for key in theirs:
                torch.testing.assert_close(
                    weights[key], theirs[key], atol=1e-4, rtol=0, msg=lambda m, n=f"{name} {key}": f"{n}: {m}"
                )
            for a, b in zip([*train, *held_out], [*their_train, *their_held_out], strict=True):
                assert told(a) == pytest.approx(told(b), rel=1e-3, abs=1e-4), name
    assert len(ROWS) % 4 == 2
