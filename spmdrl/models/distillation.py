"""Distillation's two models: neither's (tokens, V) logits exist whole, and only tokens that are learned have any."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.errors import UserError
from spmdrl.models.actor import (
    BLOCK_LOGITS,
    Actor,
    LogProbHead,
    add_product,
    head_log_softmax,
    logit_slices,
    logits_divisor,
    wide,
)
from spmdrl.models.packing import Layout, last_action_lengths, padded

Consume = Callable[[slice, Tensor], None]  # some rows, and the teacher's logits of them
OverTeacher = Callable[[Sequence[slice], Consume], Any]  # calls Consume with each of the slices, in order


class _ChunkedDistillation(torch.autograd.Function):
    """Sums over tokens of (1 - c) CE(labels) + c KL(teacher || student), of CE and of KL, a block of rows at a time.

    The gradient of the first, p - (1 - c) onehot - c q with the student's p and the teacher's q, is made in the
    forward: the teacher's logits are there once.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, over_teacher, kd_coef, divisor, needs_grad):
        totals = torch.zeros(2, dtype=torch.float64, device=hidden.device)
        grads = [torch.zeros_like(hidden), None, None] if needs_grad else [None, None, None]
        if needs_grad and ctx.needs_input_grad[1]:
            grads[1] = torch.zeros(weight.shape, dtype=wide(weight.dtype), device=weight.device)
        if needs_grad and bias is not None:
            grads[2] = torch.zeros_like(bias, dtype=wide(bias.dtype))

        def consume(rows: slice, teacher_logits: Tensor) -> None:
            log_p = head_log_softmax(hidden[rows], weight, bias, divisor)
            log_q = _as_wide_as(teacher_logits, log_p.shape[1]).to(log_p.dtype).log_softmax(-1)
            q = log_q.exp()
            totals[0] -= log_p.gather(-1, labels[rows, None]).sum()
            totals[1] += torch.where(q > 0, q * (log_q - log_p), 0.0).sum()
            if needs_grad:
                grad = log_p.exp_().sub_(q.mul_(kd_coef))
                grad.scatter_add_(-1, labels[rows, None], grad.new_full((len(grad), 1), kd_coef - 1))
                if divisor != 1.0:
                    grad /= divisor
                _add_gradients(grads, rows, grad.to(hidden.dtype), hidden, weight)

        over_teacher(logit_slices(len(hidden), weight, BLOCK_LOGITS), consume)
        ctx.save_for_backward(*grads)
        ctx.weight_dtype = weight.dtype
        ce, kl = totals.to(torch.promote_types(hidden.dtype, torch.float32))
        return (1 - kd_coef) * ce + kd_coef * kl, ce, kl

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        scale = grad_outputs[0]
        hidden, weight, bias = ctx.saved_tensors
        weight = None if weight is None else (weight * scale).to(ctx.weight_dtype)
        bias = None if bias is None else (bias * scale).to(ctx.weight_dtype)
        return (hidden * scale).to(hidden.dtype), weight, bias, None, None, None, None, None


def _add_gradients(grads: list[Any], rows: slice, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
    """Add what the gradient (n, V) of some rows' logits means for hidden states, weight and bias."""
    grads[0][rows] = grad @ weight
    if grads[1] is not None:
        add_product(grads[1], grad.t(), hidden[rows])
    if grads[2] is not None:
        grads[2] += grad.sum(0, dtype=grads[2].dtype)


def _as_wide_as(logits: Tensor, size: int) -> Tensor:
    """(n, V') -> (n, size): ids beyond the tokenizer's, by which models of a family differ in size, have no logits."""
    missing = size - logits.shape[1]
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, :size]


class DistillationHead(LogProbHead):
    """A LogProbHead that can also compare itself with a teacher, within the one gathering of its weight."""

    def forward(self, hidden: Tensor, labels: Tensor | None = None, **options: Any) -> Any:
        """With `over_teacher`: the three sums of _ChunkedDistillation, of which the first has a gradient."""
        if "over_teacher" not in options:
            return super().forward(hidden, labels, **options)
        teacher, kd_coef = options["over_teacher"], options["kd_coef"]
        how = teacher, kd_coef, options["divisor"], torch.is_grad_enabled()
        return _ChunkedDistillation.apply(hidden, self.weight, self.bias, labels, *how)


class Student(Actor):
    """An Actor that can also compare itself with a teacher."""

    def __init__(self, model: Any, *, layout: Layout = padded):
        model.set_output_embeddings(DistillationHead(model.get_output_embeddings()))
        super().__init__(model, layout=layout)

    def forward(self, sequences: Tensor, action_mask: Tensor, **options: Any) -> Any:
        """As Actor; with over_teacher and kd_coef the sums over tokens of the loss, of its CE and of its KL."""
        if "over_teacher" not in options:
            return super().forward(sequences, action_mask, **options)
        hidden = self.layout(self.model.get_decoder(), sequences, last_action_lengths(action_mask))
        hidden, labels = hidden[:, :-1][action_mask], sequences[:, 1:][action_mask]
        return self.model.get_output_embeddings()(hidden, labels, divisor=logits_divisor(self.model), **options)


class TeacherHead(nn.Module):
    """An LM head that hands out its logits, over `divisor`, some rows at a time."""

    def __init__(self, head: nn.Module, divisor: float):
        super().__init__()
        self.divisor = divisor
        if not isinstance(head, nn.Linear):
            raise UserError(f"models whose LM head is a {type(head).__name__} and no linear layer are not supported")
        self.weight, self.bias = head.weight, head.bias

    def forward(self, hidden: Tensor, chunks: Sequence[slice] = (), consume: Consume | None = None) -> Tensor | None:
        """Logits as the model's own forward takes them; with `consume` those of each chunk for it, divided."""
        if consume is None:
            return F.linear(hidden, self.weight, self.bias)
        for rows in chunks:
            logits = F.linear(hidden[rows], self.weight, self.bias)
            consume(rows, logits if self.divisor == 1.0 else logits / self.divisor)
        return None


class Teacher(nn.Module):
    """A causal LM to learn from. Called with sequences it reads them; called with what it then returned, it says what
    it thinks of them."""

    def __init__(self, model: Any, *, layout: Layout = padded):
        super().__init__()
        model.set_output_embeddings(TeacherHead(model.get_output_embeddings(), logits_divisor(model)))
        self.model = model
        self.layout = layout

    @torch.no_grad()
    def forward(self, *args: Any) -> Any:
        """(sequences, action_mask) -> hidden states (N, H) before each of the N actions; (hidden states, chunks,
        consume) -> calls `consume` with the logits of each chunk."""
        if len(args) == 3:
            return self.model.get_output_embeddings()(*args)
        sequences, action_mask = args
        hidden = self.layout(self.model.get_decoder(), sequences, last_action_lengths(action_mask))
        return hidden[:, :-1][action_mask]
