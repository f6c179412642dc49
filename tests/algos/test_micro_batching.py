"""How samples are split over micro-batches and ranks changes no loss and no gradient."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from spmdrl.algos.advantages import masked_stats, whiten
from spmdrl.algos.corrections import tis
from spmdrl.algos.kl import KL_ESTIMATORS
from spmdrl.algos.losses import AGGREGATIONS, POLICY_LOSSES, BatchCounts, value_loss
from spmdrl.algos.preference import DPO_LOSSES, KD_LOSSES, RM_LOSSES, kto, sft
from tests.ranks import run_ranks

MAX_TOKENS = 9
LENGTHS = (1, 3, 7, 2, 0, 5, 4, 6)  # response tokens of 8 samples, one of them empty
SPLITS = {
    "one by one": [[i] for i in range(8)],
    "uneven": [[0, 1, 2, 3, 4], [5], [6, 7]],
    "shuffled": [[7, 2, 0], [4, 5, 1], [3, 6]],
    "with empty shares": [[], [3, 1, 2, 0], [], [4, 5, 6, 7], []],
    "an empty sample alone": [[4], [0, 1, 2, 3, 5, 6, 7]],
}


class Batch:
    """8 samples of up to 7 tokens; log-probs, values and logits are linear in a parameter of 3."""

    def __init__(self, dtype: torch.dtype = torch.float64):
        generator = torch.Generator().manual_seed(0)
        random = lambda *size: torch.randn(*size, generator=generator, dtype=dtype)  # noqa: E731
        self.mask = torch.arange(7)[None] < torch.tensor(LENGTHS)[:, None]
        self.features, self.vocabulary = random(8, 7, 3), random(3, 5)
        self.old, self.rollout, self.ref, self.advantages, self.returns = random(5, 8, 7).mul(0.5).unbind()
        self.teacher = random(8, 7, 5)
        self.desirable = torch.arange(8) % 3 == 0

    def losses(self, theta: Tensor, rows: list[int], counts: BatchCounts) -> Iterator[tuple[str, Tensor]]:
        """This share's part of every loss, by name."""
        mask, advantages = self.mask[rows], self.advantages[rows]
        log_probs = self.features[rows] @ theta
        per_token = {name: fn(log_probs, self.old[rows], advantages, mask)[0] for name, fn in POLICY_LOSSES.items()}
        per_token["ppo, tis"] = per_token["ppo"] * tis(self.old[rows], self.rollout[rows], mask)
        per_token |= {f"kl {name}": fn(log_probs, self.ref[rows], mask) for name, fn in KL_ESTIMATORS.items()}
        per_token["value"] = value_loss(log_probs, self.old[rows], self.returns[rows], mask, value_clip=0.2)[0]
        per_token["sft"] = sft(log_probs, mask)
        logits = (self.features[rows] * theta) @ self.vocabulary
        for name in ("forward", "reverse"):
            per_token[f"kd {name}"] = KD_LOSSES[name](logits, self.teacher[rows], mask)
        top = self.teacher[rows].topk(2)
        per_token["kd top_k"] = KD_LOSSES["top_k"](logits, top.values, top.indices, mask)
        for name, loss in per_token.items():
            for mode, aggregate in AGGREGATIONS.items():
                yield f"{name}, {mode}", aggregate(loss, mask, counts)
        yield from self.pair_losses(log_probs.sum(1), rows)

    def pair_losses(self, scores: Tensor, rows: list[int]) -> Iterator[tuple[str, Tensor]]:
        """Losses of pairs (policy score, fixed score), each a sum over pairs divided by the 8 of the step."""
        other, ref, ref_other = self.returns[rows].sum(1), self.ref[rows].sum(1), self.old[rows].sum(1)
        for name, fn in DPO_LOSSES.items():
            yield f"dpo {name}", fn(scores, other, ref, ref_other, beta=0.3).sum() / 8
        for name, fn in RM_LOSSES.items():
            yield f"rm {name}", fn(scores, other).sum() / 8
        yield "kto", kto(scores, ref, self.desirable[rows], 0.1, beta=0.3).sum() / 8

    def parts(self, rows: list[int], counts: BatchCounts) -> dict[str, Tensor]:
        """name -> (4,) loss and gradient of this share."""
        theta = torch.tensor([0.3, -0.2, 0.1], dtype=self.features.dtype, requires_grad=True)
        parts = {}
        for name, loss in self.losses(theta, rows, counts):
            parts[name] = torch.cat([loss[None], torch.autograd.grad(loss, theta, retain_graph=True)[0]]).detach()
        return parts


def whole(batch: Batch) -> dict[str, Tensor]:
    return batch.parts(list(range(8)), BatchCounts.of(batch.mask, MAX_TOKENS))


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_the_parts_of_any_split_add_up_to_the_whole(split):
    batch = Batch()
    counts = BatchCounts.of(batch.mask, MAX_TOKENS)
    expected = whole(batch)
    total = {name: torch.zeros(4, dtype=torch.float64) for name in expected}
    for rows in split:
        for name, part in batch.parts(rows, counts).items():
            total[name] += part
    for name, value in expected.items():
        assert value.isfinite().all() and value[1:].abs().sum() > 0, name
        assert_close(total[name], value, rtol=1e-10, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}")


def test_a_denominator_of_the_micro_batch_would_be_seen():
    """The wrong way, the mean of shares divided by their own counts, gives other numbers under every aggregation."""
    batch, expected = Batch(), whole(Batch())
    wrong = [batch.parts(rows, BatchCounts.of(batch.mask[rows], MAX_TOKENS)) for rows in ([0, 1], [2, 3, 4, 5, 6, 7])]
    for mode in AGGREGATIONS:
        mean = (wrong[0][f"ppo, {mode}"] + wrong[1][f"ppo, {mode}"]) / 2
        assert (mean - expected[f"ppo, {mode}"]).abs().max() > 1e-3


def all_reduce(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


def check_rank() -> None:
    """What both ranks compute together is what one computes alone, for shares 6 + 2 and 8 + 0."""
    batch = Batch()
    expected = whole(batch)
    for shares in ([[0, 1, 2, 3, 4, 5], [6, 7]], [[7, 6, 5, 4, 3, 2, 1, 0], []]):
        rows = shares[dist.get_rank()]
        local = BatchCounts.of(batch.mask[rows], MAX_TOKENS)
        num_tokens, num_sequences = all_reduce(torch.tensor([local.num_tokens, local.num_sequences])).tolist()
        parts = batch.parts(rows, BatchCounts(num_tokens, num_sequences, MAX_TOKENS))
        total = all_reduce(torch.stack(list(parts.values())))
        assert_close(total, torch.stack(list(expected.values())), rtol=1e-10, atol=1e-13)

        mask, noisy = batch.mask, torch.where(batch.mask, batch.advantages, torch.nan)
        stats = all_reduce(masked_stats(noisy[rows], mask[rows]))
        together = whiten(noisy, mask, masked_stats(noisy, mask))
        assert_close(whiten(noisy[rows], mask[rows], stats), together[rows], rtol=0, atol=1e-12)
    empty = torch.zeros_like(mask)
    assert whiten(noisy, empty, all_reduce(masked_stats(noisy, empty))).eq(0).all()


@pytest.mark.slow
def test_two_ranks_with_uneven_and_empty_shares_compute_what_one_computes():
    run_ranks(2, check_rank)
