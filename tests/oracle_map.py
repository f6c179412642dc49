"""The peers' recorded operations in terms of spmdrl's functions: op name -> f(params, inputs) -> outputs by name.

Arguments are adapted here, arithmetic is not done: casts, names, the peer's own choice of an option, sums of parts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from spmdrl.algos import advantages as adv
from spmdrl.algos import corrections, kl, preference, shaping, tensor_ops
from spmdrl.algos.losses import AGGREGATIONS, POLICY_LOSSES, BatchCounts, value_loss

Case = dict[str, Any]
UNBOUNDED = (0.0, float("inf"))


class Inputs:
    """The inputs of a case as attributes: floats in the case's dtype, masks as bool, null as None."""

    BOOL = frozenset({"action_mask", "mask", "loss_mask", "attention_mask", "truncated"})
    LONG = frozenset({"index", "group_index", "labels", "response_length", "prompt_length"})

    def __init__(self, params: Case, inputs: Case):
        dtype = getattr(torch, params["dtype"])
        for name, value in inputs.items():
            kind = torch.bool if name in self.BOOL else torch.long if name in self.LONG else dtype
            setattr(self, name, None if value is None else torch.tensor(_numbers(value), dtype=kind))

    def __getattr__(self, name: str) -> Any:
        return None  # an input that this case does not have

    def track(self, *names: str) -> None:
        for name in names:
            getattr(self, name).requires_grad_()


def _numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_numbers(item) for item in value]
    return float(value) if isinstance(value, str) else value


def _plain(outputs: Case) -> Case:
    """Outputs as Python numbers and lists."""
    return {k: v.detach().tolist() if isinstance(v, Tensor) else v for k, v in outputs.items()}


def op(fn: Callable[..., Case], **fixed: Any) -> Callable[[Case, Case], Case]:
    """f(params, inputs) that hands `fn` the params and the inputs as tensors."""
    return lambda params, inputs: _plain(fn(params, Inputs(params, inputs), **fixed))


def grads(loss: Tensor, x: Inputs, *names: str) -> Case:
    """d loss / d input for each of the names, as grad_<name>."""
    parts = torch.autograd.grad(loss, [getattr(x, name) for name in names], allow_unused=True)
    return {
        f"grad_{n}": torch.zeros_like(getattr(x, n)) if g is None else g for n, g in zip(names, parts, strict=True)
    }


# --- advantages ------------------------------------------------------------------------------------------------------


def estimator(name: str, **options: float) -> adv.Estimator:
    """ESTIMATORS[name], its baseline with other options than ours."""
    base = adv.ESTIMATORS[name]
    return replace(base, baseline=partial(base.baseline, **options)) if options else base


def whiten(values: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return adv.whiten(values, mask, adv.masked_stats(values, mask), **options)


def pipeline(p: Case, x: Inputs, est: adv.Estimator) -> Case:
    """OpenRLHF's way from rewards to advantages: baseline, token rewards, returns or GAE, whitening."""
    mask, outputs, index = x.action_mask, {}, x.index
    shaped = x.rewards
    if index is not None:
        rewards, group_ids = x.rewards[index], index // p["n_samples_per_prompt"]
        shaped = adv.shape_rewards(rewards, group_ids, est, lengths=mask.sum(1))
        outputs = {"shaped_rewards": shaped, "group_reward_std": adv.group_std(rewards, group_ids)}
    settings = {"kl_coef": p["kl_coef"], "reward_clip_range": p["reward_clip_range"]}
    rewards = tensor_ops.token_rewards(shaped, x.kl, mask, **settings)
    if est.needs_critic:
        advantages, returns = adv.gae(rewards, x.values, mask, gamma=p["gamma"], lambd=p["lam"])
    else:
        advantages = returns = adv.cumulative_returns(rewards, mask, gamma=p["gamma"])
    if est.whiten:
        advantages = whiten(advantages, mask, no_std_norm=bool(p.get("no_std_norm")))
    # The peer's episode return sums the KL on padding too.
    episode = tensor_ops.token_rewards(shaped, x.kl, torch.ones_like(mask), **settings).sum(1)
    return {"advantages": advantages, "returns": returns, "episode_return": episode, **outputs}


def group_advantages(p: Case, x: Inputs, est: adv.Estimator, keep_singletons: bool = True) -> Case:
    """verl's outcome advantages: one number a row, on its action tokens."""
    lengths = x.action_mask.sum(1)
    shaped = adv.shape_rewards(x.rewards, x.group_index, est, lengths=lengths, keep_singletons=keep_singletons)
    tokens = tensor_ops.broadcast_rows(shaped, x.action_mask)
    return {"advantages": whiten(tokens, x.action_mask, unbiased=True) if est.whiten else tokens}


def trl_advantages(p: Case, x: Inputs, est: adv.Estimator) -> Case:
    """TRL's: groups of n in order, NaN rewards left out."""
    valid, group_ids = ~x.rewards.isnan(), torch.arange(len(x.rewards)) // p["n_samples_per_prompt"]
    rewards = shaping.clip_rewards(x.rewards, p.get("reward_clip_range"))
    shaped = adv.shape_rewards(rewards, group_ids, est, lengths=torch.ones_like(rewards), valid=valid)
    if p.get("normalize_advantages"):
        shaped[valid] = adv.standardize(shaped[valid], shaped[valid], eps=1e-4)
    return {"advantages": shaped}


def remax(p: Case, x: Inputs) -> Case:
    """Reward-to-go minus the greedy baseline: shaping is linear, so that of zero rewards is minus the baseline."""
    mask, zeros = x.action_mask, torch.zeros_like(x.reward_baselines)
    returns = adv.cumulative_returns(x.rewards, mask, gamma=1.0)
    settings = {"lengths": mask.sum(1), "greedy_rewards": x.reward_baselines}
    shaped = adv.shape_rewards(zeros, torch.arange(len(zeros)), adv.ESTIMATORS["remax"], **settings)
    return {"returns": returns, "advantages": returns + tensor_ops.broadcast_rows(shaped, mask)}


def gae(p: Case, x: Inputs, skip_holes: bool) -> Case:
    settings = {"gamma": p["gamma"], "lambd": p["lam"], "skip_holes": skip_holes}
    advantages, returns = adv.gae(x.rewards, x.values, x.action_mask, **settings)
    whitened = whiten(advantages, x.action_mask, unbiased=True)
    return {"advantages": advantages, "returns": returns, "whitened_advantages": whitened}


def returns(p: Case, x: Inputs, skip_holes: bool) -> Case:
    values = adv.cumulative_returns(x.rewards, x.action_mask, gamma=p["gamma"], skip_holes=skip_holes)
    return {"returns": values, "whitened_advantages": whiten(values, x.action_mask, unbiased=True)}


def normalize_rows(p: Case, x: Inputs) -> Case:
    rows = zip(x.values.split(1), x.mask.split(1), strict=True)
    return {"normalized": torch.cat([whiten(values, mask, eps=p["eps"]) for values, mask in rows])}


ADVANTAGES: dict[str, Callable[[Case, Case], Case]] = {
    "advantage_whitening": op(
        lambda p, x: {"advantages": whiten(x.advantages, x.action_mask, no_std_norm=bool(p["no_std_norm"]))}
    ),
    "advantages_gae": op(pipeline, est=estimator("gae")),
    "advantages_reinforce": op(pipeline, est=estimator("reinforce")),
    "advantages_reinforce_baseline": op(pipeline, est=estimator("reinforce_baseline")),
    "advantages_rloo": op(pipeline, est=estimator("rloo")),
    "advantages_group_norm": op(pipeline, est=estimator("group_norm", eps=1e-9)),
    "advantages_dr_grpo": op(pipeline, est=estimator("dr_grpo")),
    "rloo_verl": op(group_advantages, est=estimator("rloo")),
    "rloo_vectorized_verl": op(group_advantages, est=estimator("rloo"), keep_singletons=False),
    "group_norm_verl": op(group_advantages, est=estimator("group_norm")),
    "group_norm_vectorized_verl": op(group_advantages, est=estimator("group_norm", min_variance=1e-6)),
    "dr_grpo_verl": op(group_advantages, est=estimator("dr_grpo")),
    "opo_verl": op(group_advantages, est=estimator("opo")),
    "grpo_passk_verl": op(group_advantages, est=estimator("grpo_passk")),
    "reinforce_plus_plus_baseline_verl": op(group_advantages, est=estimator("reinforce_baseline")),
    "rloo_trl": op(trl_advantages, est=estimator("rloo")),
    "group_norm_trl": op(trl_advantages, est=estimator("group_norm", eps=1e-4)),
    "dr_grpo_trl": op(trl_advantages, est=estimator("dr_grpo")),
    "group_mean_batch_std_trl": op(trl_advantages, est=estimator("group_mean_batch_std")),
    "remax_verl": op(remax),
    "gae": op(gae, skip_holes=True),
    "gae_interior_mask": op(gae, skip_holes=False),
    "gae_whitened_verl": op(gae, skip_holes=True),
    "gae_whitened_interior_mask_verl": op(gae, skip_holes=True),
    "reinforce_returns": op(returns, skip_holes=True),
    "reinforce_returns_interior_mask": op(returns, skip_holes=False),
    "reinforce_plus_plus_verl": op(returns, skip_holes=True),
    "masked_normalize": op(normalize_rows),
    "masked_whiten_verl": op(
        lambda p, x: {"whitened": whiten(x.values, x.mask, unbiased=True, shift_mean=bool(p["shift_mean"]))}
    ),
    "masked_whiten_trl": op(
        lambda p, x: {"whitened": whiten(x.values, x.mask, unbiased=True, shift_mean=bool(p["shift_mean"]))}
    ),
}

# --- policy and value losses -----------------------------------------------------------------------------------------


def aggregation(p: Case) -> str:
    return p.get("loss_agg_mode") or ("token-mean" if p.get("token_level_loss", 1) else "seq-mean-token-mean")


def aggregate(p: Case, loss: Tensor, mask: Tensor, mode: str) -> Tensor:
    """`loss` by the peer's counts: the batch's own unless given; times dp_size, which DeepSpeed's mean undoes."""
    own = BatchCounts.of(mask)
    counts = BatchCounts(p.get("batch_num_tokens") or own.num_tokens, p.get("global_batch_size") or own.num_sequences)
    scale = p.get("dp_size") or 1
    if mode == "seq-mean-token-sum-norm":  # verl: a constant and no mean over rows
        counts, scale = BatchCounts(0, 1, p.get("loss_scale_factor") or mask.shape[1]), 1
    return scale * AGGREGATIONS[mode](loss, mask, counts)


def policy(p: Case, x: Inputs, name: str, mode: str | None = None, correction: str | None = None, **settings) -> Case:
    """A loss of OpenRLHF or verl with its gradient and metrics, weighted by a correction or by given weights."""
    x.track("log_probs")
    mask = x.action_mask
    loss, metrics = POLICY_LOSSES[name](x.log_probs, x.old_log_probs, x.advantages, mask, **settings)
    if correction is not None:
        weights = correct(p, x, correction)
        loss = loss * weights
        metrics |= corrections.mismatch_metrics(x.old_log_probs, x.rollout_log_probs, mask, weights)
    if x.rollout_is_weights is not None:
        loss = loss * x.rollout_is_weights
    total = aggregate(p, loss, mask, mode or aggregation(p))
    mean = {name: tensor_ops.masked_mean(value, mask) for name, value in metrics.items()}
    outputs = {
        "loss": total,
        "approx_kl": mean["policy/approx_kl"],
        "clip_fraction": mean.get("policy/clip_frac", 0.0),
        "dual_clip_fraction": mean.get("policy/dual_clip_frac", 0.0),
        "rollout_kl": mean.get("mismatch/kl", 0.0),
    }
    return {**outputs, **grads(total, x, "log_probs")}


def correct(p: Case, x: Inputs, name: str) -> Tensor:
    options = {"rollout_token_cap": None} if name == "seq-mask-tis" else {}
    bounds = tuple(p["rollout_ratio_bounds"])
    args = (x.old_log_probs, x.rollout_log_probs, x.action_mask)
    return corrections.CORRECTIONS[name](*args, rollout_correction_range=bounds, **options)


def openrlhf_policy(p: Case, x: Inputs, **fixed: Any) -> Case:
    clip = {"eps_clip_low_high": (p["clip_eps_low"], p["clip_eps_high"]), "dual_clip": p.get("dual_clip")}
    return policy(p, x, **{"name": "ppo", **clip, **fixed})


def gspo_from_engine(p: Case, x: Inputs) -> Case:
    """OpenRLHF's GSPO under rollout correction: the ratio is against the engine, approx_kl against the trainer."""
    trainer = openrlhf_policy(p, x, name="gspo", mode="seq-mean-token-mean")
    x.old_log_probs = x.rollout_log_probs
    engine = openrlhf_policy(p, x, name="gspo", mode="seq-mean-token-mean")
    return {**engine, "approx_kl": trainer["approx_kl"]}


def verl_policy(p: Case, x: Inputs, name: str, **fixed: Any) -> Case:
    clip = {"eps_clip_low_high": (p["clip_ratio_low"], p["clip_ratio_high"])} if "clip_ratio_low" in p else {}
    return policy(p, x, name, **{**clip, **fixed})


def gmpo(p: Case, x: Inputs) -> Case:
    """verl's GMPO: a mean over all rows, empty ones too; its two fractions are the two signs of A."""
    clip = {"eps_clip_low_high": (p["clip_ratio_low"], p["clip_ratio_high"])}
    counted = {**p, "global_batch_size": len(x.action_mask)}
    outputs = policy(counted, x, "gmpo", mode="seq-mean-token-mean", **clip)
    args = (x.log_probs, x.old_log_probs, x.advantages, x.action_mask)
    negative = tensor_ops.masked_mean(POLICY_LOSSES["gmpo"](*args, **clip)[1]["policy/clip_frac_negative"], args[3])
    return {**outputs, "clip_fraction": outputs["clip_fraction"] - negative, "dual_clip_fraction": negative}


def trl_policy(p: Case, x: Inputs, mode: str, name: str = "ppo") -> Case:
    """A loss type of TRL's GRPO trainer: one advantage a row, k3 without clamp added per token."""
    x.track("log_probs")
    mask, high = x.action_mask, p["epsilon_high"]
    # CISPO's epsilon_high is the cap of the ratio; `delta` beyond 1 + high is the dual clip.
    clip = (1.0, high - 1) if name == "cispo" else (p["epsilon_low"], high)
    dual = {} if name == "cispo" else {"dual_clip": p["upper_ratio_cap"]}
    advantages = x.advantages[:, None].expand(mask.shape)
    fn = POLICY_LOSSES[name]
    loss = fn(x.log_probs, x.old_log_probs, advantages, mask, eps_clip_low_high=clip, **dual)[0]
    outputs = {}
    if x.ref_log_probs is not None:
        token_kl = kl.k3(x.log_probs, x.ref_log_probs, mask, clamp=None)
        loss = loss + p["kl_coef"] * token_kl
        outputs["kl"] = tensor_ops.masked_mean(token_kl, mask)
    num_tokens = p.get("num_items_in_batch") or int(mask.sum())
    counts = BatchCounts(num_tokens, len(mask), p.get("max_completion_length") or 1)
    total = AGGREGATIONS[mode](loss, mask, counts)
    return {"loss": total, **outputs, **grads(total, x, "log_probs")}


def value(p: Case, x: Inputs, clip: str) -> Case:
    x.track("values")
    loss, metrics = value_loss(x.values, x.old_values, x.returns, x.action_mask, value_clip=p[clip])
    total = aggregate(p, loss, x.action_mask, aggregation(p))
    clipped = tensor_ops.masked_mean(metrics["critic/clip_frac"], x.action_mask)
    return {"loss": total, "clip_fraction": clipped, **grads(total, x, "values")}


def aggregate_only(p: Case, x: Inputs) -> Case:
    return {"loss": aggregate(p, x.loss_per_token, x.loss_mask, aggregation(p))}


LOSSES: dict[str, Callable[[Case, Case], Case]] = {
    "aggregate_loss": op(aggregate_only),
    "aggregate_loss_verl": op(aggregate_only),
    "policy_loss_ppo": op(openrlhf_policy),
    "policy_loss_clip_higher": op(openrlhf_policy),
    "policy_loss_dual_clip": op(openrlhf_policy),
    "policy_loss_global_normalizers": op(openrlhf_policy),
    "policy_loss_gspo": op(openrlhf_policy, name="gspo", mode="seq-mean-token-mean"),
    "policy_loss_gspo_rollout_ratio": op(gspo_from_engine),
    "policy_loss_tis": op(openrlhf_policy, correction="tis"),
    "policy_loss_icepop": op(openrlhf_policy, correction="icepop"),
    "policy_loss_seq_mask_tis": op(openrlhf_policy, correction="seq-mask-tis"),
    "policy_loss_ppo_verl": op(lambda p, x: verl_policy(p, x, "ppo", dual_clip=p["clip_ratio_c"])),
    "policy_loss_ppo_rollout_is_verl": op(lambda p, x: verl_policy(p, x, "ppo", dual_clip=p["clip_ratio_c"])),
    "policy_loss_gspo_verl": op(verl_policy, name="gspo_token"),
    "policy_loss_cispo_verl": op(verl_policy, name="cispo"),
    "policy_loss_gpg_verl": op(verl_policy, name="gpg"),
    "policy_loss_gmpo_verl": op(gmpo),
    "policy_loss_sapo_verl": op(
        lambda p, x: verl_policy(p, x, "sapo", sapo_tau_pos=p["tau_pos"], sapo_tau_neg=p["tau_neg"])
    ),
    "policy_loss_grpo_trl": op(trl_policy, mode="seq-mean-token-mean"),
    "policy_loss_bnpo_trl": op(trl_policy, mode="token-mean"),
    "policy_loss_dapo_trl": op(trl_policy, mode="token-mean"),
    "policy_loss_dr_grpo_trl": op(trl_policy, mode="seq-mean-token-sum-norm"),
    "policy_loss_cispo_trl": op(trl_policy, mode="token-mean", name="cispo"),
    "policy_loss_gspo_trl": op(trl_policy, mode="seq-mean-token-mean", name="gspo"),
    "value_loss_clipped": op(value, clip="clip_eps"),
    "value_loss_unclipped": op(value, clip="clip_eps"),
    "value_loss_clipped_verl": op(value, clip="cliprange_value"),
}

# --- KL, rewards, tokens ---------------------------------------------------------------------------------------------


def token_kl(p: Case, x: Inputs, clamp: float | None = 10.0) -> Case:
    return {"kl": kl.KL_ESTIMATORS[p["kl_estimator"]](x.log_probs, x.ref_log_probs, clamp=clamp)}


def controller(p: Case, x: Inputs) -> Case:
    control, values = kl.AdaptiveKLController(p["init_kl_coef"], p["target"], p["horizon"]), []
    for current, n_steps in zip(x.current_kl.tolist(), x.n_steps.tolist(), strict=True):
        control.update(current, n_steps)
        values.append(control.value)
    return {"kl_coef": values}


def token_rewards(p: Case, x: Inputs) -> Case:
    estimate = token_kl(p, x)["kl"]
    settings = {"kl_coef": p["kl_coef"], "reward_clip_range": p["reward_clip_range"]}
    return {"kl": estimate, "token_rewards": tensor_ops.token_rewards(x.rewards, estimate, x.action_mask, **settings)}


def token_rewards_verl(p: Case, x: Inputs) -> Case:
    """The scores are placed already; every column counts."""
    estimate = kl.k1(x.old_log_probs, x.ref_log_probs, clamp=None)
    mask = torch.ones_like(estimate, dtype=torch.bool)
    penalty = tensor_ops.token_rewards(torch.zeros_like(mask[:, 0] * 1.0), estimate, mask, kl_coef=p["kl_coef"])
    return {"token_rewards": x.token_level_scores + penalty}


def overlong(p: Case, x: Inputs, saturate: bool = True) -> Case:
    penalty = shaping.overlong_penalty(
        x.response_length,
        generate_max_len=p.get("max_new_tokens") or p["max_completion_len"],
        overlong_buffer_len=p.get("overlong_buffer_len") or p["soft_punish_cache"],
        overlong_penalty_factor=p.get("overlong_penalty_factor", 1.0),
        saturate=saturate,
    )
    outputs = {"penalty": penalty, "num_penalized": int((penalty < 0).sum()), "terminal_index": x.response_length - 1}
    return outputs if x.rewards is None else {**outputs, "rewards": x.rewards + penalty}


def stop_properly(p: Case, x: Inputs) -> Case:
    coef = p["stop_properly_penalty_coef"]
    rewards = shaping.stop_properly_penalty(x.rewards, x.truncated, stop_properly_penalty_coef=coef)
    return {"rewards": rewards, "num_truncated": int(x.truncated.sum())}


def entropy(p: Case, x: Inputs) -> Case:
    x.track("logits")
    values = tensor_ops.entropy_from_logits(x.logits)
    return {"entropy": values, "grad_logits_of_sum": grads(values.sum(), x, "logits")["grad_logits"]}


def token_log_probs(p: Case, x: Inputs) -> Case:
    temperature = p.get("temperature", 1.0)
    return {"log_probs": tensor_ops.log_probs_from_logits(x.logits, x.labels, temperature=temperature)}


def mean(p: Case, x: Inputs) -> Case:
    per_row = tensor_ops.masked_mean(x.values, x.mask, dim=1)
    return {"mean": tensor_ops.masked_mean(x.values, x.mask), "mean_per_sequence": per_row}


REWARDS_AND_TOKENS: dict[str, Callable[[Case, Case], Case]] = {
    "adaptive_kl_controller": op(controller),
    "approx_kl_k1": op(token_kl),
    "approx_kl_k2": op(token_kl),
    "approx_kl_k3": op(token_kl),
    "approx_kl_k1_verl": op(token_kl, clamp=None),
    "approx_kl_k2_verl": op(token_kl, clamp=None),
    "approx_kl_k3_verl": op(token_kl),
    "approx_kl_abs_verl": op(token_kl, clamp=None),
    "token_rewards": op(token_rewards),
    "token_rewards_verl": op(token_rewards_verl),
    "overlong_penalty": op(overlong),
    "overlong_penalty_trl": op(overlong),
    "overlong_penalty_verl": op(overlong, saturate=False),
    "stop_properly_penalty": op(stop_properly),
    "entropy_from_logits": op(entropy),
    "entropy_from_logits_trl": op(entropy),
    "entropy_from_logits_verl": op(entropy),
    "log_probs_from_logits": op(token_log_probs),
    "log_probs_from_logits_trl": op(token_log_probs),
    "masked_mean": op(mean),
}

# --- engine against trainer ------------------------------------------------------------------------------------------


def trl_weights(p: Case, x: Inputs, name: str, per_row: bool = False) -> Case:
    low, high = p["clip_min"], p["clip_max"]
    bounds = (0.0 if low is None else low, float("inf") if high is None else high)
    args = (x.old_log_probs, x.rollout_log_probs, x.action_mask)
    weights = corrections.CORRECTIONS[name](*args, rollout_correction_range=bounds)
    return {"is_weights": weights.amax(1, keepdim=True) if per_row else weights}


def verl_weights(p: Case, x: Inputs, name: str) -> Case:
    """verl's truncated weights; its effective sample size takes weights clipped at both ends."""
    mask, cap = x.action_mask, p["rollout_is_threshold"]

    def weigh(*bounds: float) -> Tensor:
        args = (x.old_log_probs, x.rollout_log_probs, mask)
        return corrections.CORRECTIONS[name](*args, rollout_correction_range=bounds)

    weights, bounded = weigh(0.0, cap), weigh(1 / cap, cap)
    if p["rollout_is_batch_normalize"]:
        # Sequence weights are averaged over rows: over their first tokens.
        counted = mask & (mask.cumsum(1) == 1) if name == "seq-tis" else mask
        weights = corrections.normalize_weights(weights, adv.masked_stats(weights, counted))
    moments = [float(tensor_ops.masked_mean(power, mask)) for power in (bounded, bounded.square())]
    return {
        "is_weights": weights,
        "effective_sample_size": corrections.effective_sample_size(*moments),
        "mean_weight_before_truncation": tensor_ops.masked_mean(weigh(*UNBOUNDED), mask),
    }


def rejection(p: Case, x: Inputs) -> Case:
    statistic, ends = p["rollout_rs"], [float(end) for end in str(p["rollout_rs_threshold"]).split("_")]
    open_end = 1 / ends[0] if statistic.endswith("k1") else -float("inf")
    bounds = (ends[0], ends[1]) if len(ends) == 2 else (open_end, ends[0])
    mask = x.action_mask
    kept = corrections.rejection_mask(x.old_log_probs, x.rollout_log_probs, mask, statistic=statistic, bounds=bounds)
    dropped = mask & ~kept
    return {
        "kept_mask": kept.int(),
        "masked_fraction": dropped.sum() / mask.sum(),
        "sequence_masked_fraction": dropped.any(1).double().mean(),
    }


def off_policy(p: Case, x: Inputs) -> Case:
    args = (x.old_log_probs, x.rollout_log_probs, x.action_mask)
    tokens = corrections.mismatch_metrics(*args, weights=x.action_mask.double())
    token = {name: tensor_ops.masked_mean(piece, x.action_mask) for name, piece in tokens.items()}
    row = {name: piece.mean() for name, piece in corrections.sequence_mismatch(*args).items()}
    return {
        "kl": token["mismatch/kl"],
        "k3_kl": token["mismatch/kl_k3"],
        "chi2_token": token["mismatch/chi2"],
        "chi2_seq": row["mismatch/chi2_seq"],
        "training_ppl": row["mismatch/trainer_ppl"],
        "rollout_ppl": row["mismatch/engine_ppl"],
        "log_ppl_diff": row["mismatch/log_ppl_diff"],
        "ppl_ratio": row["mismatch/ppl_ratio"],
    }


MISMATCH: dict[str, Callable[[Case, Case], Case]] = {
    "rollout_is_token_truncate_trl": op(trl_weights, name="tis"),
    "rollout_is_token_mask_trl": op(trl_weights, name="icepop"),
    "rollout_is_sequence_truncate_trl": op(trl_weights, name="seq-tis", per_row=True),
    "rollout_is_sequence_mask_trl": op(trl_weights, name="seq-mask", per_row=True),
    "rollout_is_token_verl": op(verl_weights, name="tis"),
    "rollout_is_sequence_verl": op(verl_weights, name="seq-tis"),
    "rollout_rejection_verl": op(rejection),
    "offpolicy_metrics_verl": op(off_policy),
}

# --- supervised and preference ---------------------------------------------------------------------------------------


def dpo(p: Case, x: Inputs, name: str, smooths: bool = False) -> Case:
    x.track("policy_chosen_logps", "policy_rejected_logps")
    pairs = [x.policy_chosen_logps, x.policy_rejected_logps, x.reference_chosen_logps, x.reference_rejected_logps]
    if x.chosen_length is not None:  # TRL's IPO: means over the response's tokens
        lengths = [x.chosen_length, x.rejected_length] * 2
        pairs = [pair / length for pair, length in zip(pairs, lengths, strict=True)]
    smoothing = {"label_smoothing": p["label_smoothing"]} if smooths else {}
    total = preference.DPO_LOSSES[name](*pairs, beta=p["beta"], **smoothing).mean()
    return {
        "loss": total,
        "chosen_rewards": preference.implicit_rewards(pairs[0], pairs[2], beta=p["beta"]),
        "rejected_rewards": preference.implicit_rewards(pairs[1], pairs[3], beta=p["beta"]),
        **grads(total, x, "policy_chosen_logps", "policy_rejected_logps"),
    }


def reward_model(p: Case, x: Inputs, name: str) -> Case:
    x.track("chosen_reward", "reject_reward")
    margin = None if name == "logexp" else x.margin  # the peer's logexp ignores a margin
    options = {} if name == "logexp" else {"center_rewards_coefficient": p.get("center_rewards_coefficient") or 0.0}
    total = preference.RM_LOSSES[name](x.chosen_reward, x.reject_reward, margin, **options).mean()
    return {"loss": total, **grads(total, x, "chosen_reward", "reject_reward")}


def sft(p: Case, x: Inputs) -> Case:
    return {"loss": aggregate(p, preference.sft(x.log_probs, x.loss_mask), x.loss_mask, aggregation(p))}


def lm_cross_entropy(p: Case, x: Inputs) -> Case:
    labels = x.labels[:, 1:]
    mask = labels != p["ignore_index"]
    log_probs = tensor_ops.log_probs_from_logits(x.logits[:, :-1], labels.clamp(min=0))
    return {"loss": AGGREGATIONS["token-mean"](preference.sft(log_probs, mask), mask, BatchCounts.of(mask))}


def sequence_log_probs(p: Case, x: Inputs) -> Case:
    columns = torch.arange(x.attention_mask.shape[1])
    mask = (x.attention_mask & (columns >= x.prompt_length[:, None]))[:, 1:]
    sums, means = preference.sequence_log_probs(x.log_probs[:, : mask.shape[1]], mask)
    return {"sum_log_probs": sums, "mean_log_probs": means}


PREFERENCE: dict[str, Callable[[Case, Case], Case]] = {
    "dpo_loss_sigmoid": op(dpo, name="sigmoid", smooths=True),
    "dpo_loss_label_smoothing": op(dpo, name="sigmoid", smooths=True),
    "dpo_loss_ipo": op(dpo, name="ipo"),
    "dpo_loss_sigmoid_trl": op(dpo, name="sigmoid"),
    "dpo_loss_hinge_trl": op(dpo, name="hinge"),
    "dpo_loss_ipo_trl": op(dpo, name="ipo"),
    "dpo_loss_robust_trl": op(dpo, name="robust", smooths=True),
    "rm_loss_logsigmoid": op(reward_model, name="sigmoid"),
    "rm_loss_logsigmoid_trl": op(reward_model, name="sigmoid"),
    "rm_loss_logexp": op(reward_model, name="logexp"),
    "sft_loss": op(sft),
    "lm_cross_entropy": op(lm_cross_entropy),
    "sequence_log_probs": op(sequence_log_probs),
}

ORACLE_MAP: dict[str, Callable[[Case, Case], Case]] = {
    **ADVANTAGES,
    **LOSSES,
    **REWARDS_AND_TOKENS,
    **MISMATCH,
    **PREFERENCE,
}

LEFT_OUT: dict[str, str] = {
    "seqlen_balance": "packing of sequences into micro-batches: data, not an algorithm of this list",
    "seqlen_balance_verl": "packing of sequences into micro-batches: data, not an algorithm of this list",
    "min_micro_batches_first_fit": "packing of sequences into micro-batches: data, not an algorithm of this list",
}
