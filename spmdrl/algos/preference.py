"""Losses of the supervised and preference trainers. B pairs or samples, A next-token steps, V vocabulary entries.

Pair losses are fn(...) -> (B,), one number a pair; token losses are (B, A), zero off the mask. Neither is averaged:
the trainer divides by the counts of the whole optimizer step (`losses.AGGREGATIONS` for tokens), so that
micro-batches and ranks add up.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu, softplus

from spmdrl.algos.tensor_ops import masked_mean, masked_sum, select


def sequence_log_probs(log_probs: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, A) -> sums (B,) and per-token means (B,) of the response's log-probs, rounded once: the padding that a row
    is summed with does not count."""
    exact = log_probs.double()
    return masked_sum(exact, mask, dim=1).to(log_probs.dtype), masked_mean(exact, mask, dim=1).to(log_probs.dtype)


def _margin(chosen: Tensor, rejected: Tensor, ref_chosen: Tensor, ref_rejected: Tensor) -> Tensor:
    """h = (log pi(chosen) - log pi(rejected)) - the same of the reference model. (B,)"""
    return (chosen - rejected) - (ref_chosen - ref_rejected)


def dpo_sigmoid(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """-(1 - e) logsigmoid(beta h) - e logsigmoid(-beta h), of summed log-probs. (B,) x 4 -> (B,)

    DPO, https://arxiv.org/abs/2305.18290; e > 0 is cDPO, for labels that are wrong with probability e,
    https://ericmitchell.ai/cdpo.pdf. Its minimum is a finite margin; see dpo_robust for the unbiased form.
    """
    h = _margin(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs)
    return -(1 - label_smoothing) * logsigmoid(beta * h) - label_smoothing * logsigmoid(-beta * h)


def dpo_ipo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    *,
    beta: float,
) -> Tensor:
    """(h - 1 / (2 beta))^2. (B,) x 4 -> (B,). IPO, https://arxiv.org/abs/2310.12036

    With summed log-probs it is the paper's and OpenRLHF's; hand in per-token means for TRL's.
    """
    h = _margin(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs)
    return (h - 1 / (2 * beta)).square()


def dpo_hinge(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    *,
    beta: float,
) -> Tensor:
    """max(0, 1 - beta h). (B,) x 4 -> (B,). SLiC, https://arxiv.org/abs/2305.10425"""
    return relu(1 - beta * _margin(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs))


def dpo_robust(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor,
    ref_rejected_log_probs: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """(-(1 - e) logsigmoid(beta h) + e logsigmoid(-beta h)) / (1 - 2 e). (B,) x 4 -> (B,)

    Unbiased for labels flipped with probability e < 1/2. Robust DPO, https://arxiv.org/abs/2403.00409
    """
    h = _margin(chosen_log_probs, rejected_log_probs, ref_chosen_log_probs, ref_rejected_log_probs)
    loss = -(1 - label_smoothing) * logsigmoid(beta * h) + label_smoothing * logsigmoid(-beta * h)
    return loss / (1 - 2 * label_smoothing)


def simpo(
    chosen_log_probs: Tensor,
    rejected_log_probs: Tensor,
    ref_chosen_log_probs: Tensor | None = None,
    ref_rejected_log_probs: Tensor | None = None,
    *,
    beta: float,
    simpo_gamma: float = 0.5,
) -> Tensor:
    """-logsigmoid(beta (chosen - rejected) - gamma) of per-token MEAN log-probs, without a reference. (B,) -> (B,)

    SimPO, https://arxiv.org/abs/2405.14734, with beta 2 to 10 and gamma / beta about 0.5.
    """
    return -logsigmoid(beta * (chosen_log_probs - rejected_log_probs) - simpo_gamma)


DPO_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": dpo_sigmoid,
    "ipo": dpo_ipo,
    "hinge": dpo_hinge,
    "robust": dpo_robust,
    "simpo": simpo,
}

# Losses of DPO_LOSSES that take per-token means of log-probs instead of sums, and those that use no reference model.
LENGTH_NORMALIZED = frozenset({"simpo"})
REFERENCE_FREE = frozenset({"simpo"})


def implicit_rewards(log_probs: Tensor, ref_log_probs: Tensor, *, beta: float) -> Tensor:
    """beta (log pi - log pi_ref) of whole responses, detached: DPO's reward, for the logs. (B,) -> (B,)"""
    return beta * (log_probs - ref_log_probs).detach()


def pair_accuracy(chosen: Tensor, rejected: Tensor) -> Tensor:
    """1 where the chosen response has more reward, 0 where it has less, 1/2, as for a guess, where both have the same.
    (B,) x 2 -> (B,)"""
    return (1 + torch.sign(chosen - rejected)) / 2


def kto(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float,
    desirable_loss_weight: float = 1.0,
    undesirable_loss_weight: float = 1.0,
) -> Tensor:
    """w_d (1 - sigmoid(beta (h - z))) where desirable, else w_u (1 - sigmoid(beta (z - h))). (B,) -> (B,)

    h = log_probs - ref_log_probs of whole responses. z = max(0, kl), where `kl` is the mean h over prompts paired
    with others' responses, taken over all ranks; no gradient flows through it. KTO, https://arxiv.org/abs/2402.01306
    """
    h = log_probs - ref_log_probs
    z = torch.as_tensor(kl, dtype=h.dtype, device=h.device).detach().clamp(min=0)
    # 1 - sigmoid(x) = sigmoid(-x)
    gain, loss = torch.sigmoid(-beta * (h - z)), torch.sigmoid(-beta * (z - h))
    return torch.where(desirable, desirable_loss_weight * gain, undesirable_loss_weight * loss)


def rm_sigmoid(
    chosen_rewards: Tensor,
    rejected_rewards: Tensor,
    margin: Tensor | None = None,
    *,
    center_rewards_coefficient: float = 0.0,
) -> Tensor:
    """-logsigmoid(c - r - margin) + coefficient (c + r)^2. (B,) -> (B,)

    Bradley-Terry; the margin is Llama 2's, https://arxiv.org/abs/2307.09288; the last term keeps rewards around 0,
    https://arxiv.org/abs/2312.09244.
    """
    difference = chosen_rewards - rejected_rewards
    difference = difference if margin is None else difference - margin
    return -logsigmoid(difference) + center_rewards_coefficient * (chosen_rewards + rejected_rewards).square()


def rm_logexp(chosen_rewards: Tensor, rejected_rewards: Tensor, margin: Tensor | None = None) -> Tensor:
    """log(1 + exp(r - c + margin)). (B,) -> (B,)

    The same function as rm_sigmoid, kept because it is a flag of OpenRLHF's. There it ignores the margin and
    overflows at r - c > 88; here a margin that is given counts, and no difference overflows.
    """
    difference = rejected_rewards - chosen_rewards
    return softplus(difference if margin is None else difference + margin)


RM_LOSSES: dict[str, Callable[..., Tensor]] = {
    "sigmoid": rm_sigmoid,
    "logexp": rm_logexp,
}


def sft(log_probs: Tensor, mask: Tensor) -> Tensor:
    """-log_probs on the mask, also the language-model loss of PTX. (B, A) -> (B, A)"""
    return -select(log_probs, mask)


def kd_forward(logits: Tensor, teacher_logits: Tensor, mask: Tensor, *, kd_temperature: float = 1.0) -> Tensor:
    """KL(teacher || student) = sum_v p_T (log p_T - log p_S): covers the teacher's modes. (B, A, V) -> (B, A)

    https://arxiv.org/abs/1503.02531. OpenRLHF's is the cross-entropy -sum_v p_T log p_S, of the same gradient.
    """
    student, teacher = _log_softmax_pair(logits, teacher_logits, mask, kd_temperature)
    return select((teacher.exp() * (teacher - student)).sum(-1), mask)


def kd_reverse(logits: Tensor, teacher_logits: Tensor, mask: Tensor, *, kd_temperature: float = 1.0) -> Tensor:
    """KL(student || teacher): seeks one of the teacher's modes. (B, A, V) -> (B, A). https://arxiv.org/abs/2306.08543"""
    student, teacher = _log_softmax_pair(logits, teacher_logits, mask, kd_temperature)
    return select((student.exp() * (student - teacher)).sum(-1), mask)


def kd_top_k(
    logits: Tensor, teacher_log_probs: Tensor, teacher_ids: Tensor, mask: Tensor, *, kd_temperature: float = 1.0
) -> Tensor:
    """Forward KL on the K tokens that the teacher reports, both renormalised over them. (B, A, V), (B, A, K) -> (B, A)

    For a teacher that is only known by its top log-probs. With K = V it is kd_forward.
    """
    return kd_forward(logits.gather(-1, teacher_ids), teacher_log_probs, mask, kd_temperature=kd_temperature)


KD_LOSSES: dict[str, Callable[..., Tensor]] = {
    "forward": kd_forward,
    "reverse": kd_reverse,
    "top_k": kd_top_k,
}


def _log_softmax_pair(
    logits: Tensor, teacher_logits: Tensor, mask: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log softmax of both over V in float32 or more, 0 logits off the mask; the teacher's is detached."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    on_mask = mask[..., None]
    student = torch.where(on_mask, logits, 0.0).to(dtype) / temperature
    teacher = torch.where(on_mask, teacher_logits.detach(), 0.0).to(dtype) / temperature
    return student.log_softmax(-1), teacher.log_softmax(-1)
