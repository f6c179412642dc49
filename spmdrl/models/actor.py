"""The policy: tokens in, log-probs of the sampled tokens out, without ever holding (B, S, V) logits."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.errors import UserError
from spmdrl.models.packing import Layout, last_action_lengths, padded

# Most logits that exist at a time. A host's allocator returns larger blocks to the system and faults them in again;
# a GPU needs large products to be busy.
CHUNK_LOGITS = {"cpu": 2**22, "cuda": 2**27}
# Most gradients of logits that are collected, in the dtype of the weights, for one product with the hidden states:
# each such product passes over a gradient of the size of the LM head.
BLOCK_LOGITS = {"cpu": 2**24, "cuda": 2**27}


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / temperature) at the labels, and its entropy, a chunk of rows at a time in both directions.

    The backward recomputes each chunk's logits: d log p_y / d z = onehot(y) - p and dH / d z = -p (log p + H), so
    nothing of size (N, V) outlives a chunk. Probabilities are fp32 whatever the dtype of h and W.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, temperature, with_entropy):
        # Filled in place: a small tensor kept between two large ones would keep the host's heap from being reused.
        log_probs = torch.zeros(len(hidden), dtype=wide(hidden.dtype), device=hidden.device)
        entropy = torch.zeros_like(log_probs)
        for rows in logit_slices(len(hidden), weight, CHUNK_LOGITS):
            log_p = head_log_softmax(hidden[rows], weight, bias, temperature)
            log_probs[rows] = log_p.gather(-1, labels[rows, None])[:, 0]
            if with_entropy:
                entropy[rows] = _entropy(log_p)
            del log_p
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.temperature, ctx.with_entropy = temperature, with_entropy
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        grad_log_probs, grad_entropy = grad_outputs
        hidden, weight, bias, labels = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None  # of a head that is frozen
        if ctx.needs_input_grad[1]:
            grad_weight = torch.zeros(weight.shape, dtype=wide(weight.dtype), device=weight.device)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=wide(bias.dtype))
        use_entropy = ctx.with_entropy and bool(grad_entropy.any())
        for rows in logit_slices(len(hidden), weight, BLOCK_LOGITS):
            grad = _grad_logits(
                hidden[rows],
                weight,
                bias,
                labels[rows],
                ctx.temperature,
                grad_log_probs[rows],
                grad_entropy[rows] if use_entropy else None,
            )
            grad_hidden[rows] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad.t(), hidden[rows])
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _grad_logits(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    temperature: float,
    grad_log_probs: Tensor,
    grad_entropy: Tensor | None,
) -> Tensor:
    """(N, V) in the dtype of `hidden`: the gradient of the logits before the temperature, made a chunk at a time."""
    out = hidden.new_empty(len(hidden), weight.shape[0])
    for rows in logit_slices(len(hidden), weight, CHUNK_LOGITS):
        grad = head_log_softmax(hidden[rows], weight, bias, temperature)
        log_p = None if grad_entropy is None else grad.clone()
        grad = grad.exp_()
        if grad_entropy is None or log_p is None:
            grad *= -grad_log_probs[rows, None]
        else:
            scale = grad_log_probs[rows, None] + grad_entropy[rows, None] * _entropy(log_p)[:, None]
            grad *= -(scale + grad_entropy[rows, None] * log_p)
        grad.scatter_add_(-1, labels[rows, None], grad_log_probs[rows, None].to(grad.dtype))
        out[rows] = grad.div_(temperature)
    return out


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b, whose dtype may be narrower."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b


def logit_slices(num_rows: int, weight: Tensor, max_logits: dict[str, int]) -> list[slice]:
    """Slices over rows whose logits stay within the device's limit; one empty slice for no rows."""
    size = max(1, max_logits.get(weight.device.type, max_logits["cuda"]) // weight.shape[0])
    return [slice(start, start + size) for start in range(0, max(num_rows, 1), size)]


def logits_divisor(model: Any) -> float:
    """What a model's own forward divides its head's logits by: a constant in Granite."""
    return getattr(model.config, "logits_scaling", None) or 1.0


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def head_log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """(N, H) -> (N, V) in fp32 or more; a logit of -inf gives -1e30, whose probability is 0 without making NaN."""
    logits = F.linear(hidden, weight, bias)
    logits = logits.to(wide(logits.dtype))
    if temperature != 1.0:
        logits /= temperature
    logits -= logits.logsumexp(dim=-1, keepdim=True)
    return logits.clamp_(min=-1e30)


def _entropy(log_p: Tensor) -> Tensor:
    """(N, V) -> (N,) nats."""
    return -torch.linalg.vecdot(log_p.exp(), log_p)


class LogProbHead(nn.Module):
    """The LM head of a causal LM with the same parameters under the same names, and `log_probs` done in chunks.

    A module of its own, and not a function over its weight, because ZeRO-3 gathers a module's parameters around
    its forward and backward: here once for all chunks.
    """

    def __init__(self, head: nn.Module):
        super().__init__()
        if not isinstance(head, nn.Linear):
            raise UserError(f"models whose LM head is a {type(head).__name__} and no linear layer are not supported")
        self.weight, self.bias = head.weight, head.bias
        self.in_features, self.out_features = head.in_features, head.out_features

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, *, temperature: float = 1.0, with_entropy: bool = False
    ) -> Any:
        """Logits (..., V); with labels (N,) and hidden (N, H): their log-probs and entropies, each (N,)."""
        if labels is None:
            return F.linear(hidden, self.weight, self.bias)
        return _ChunkedLogProbs.apply(hidden, self.weight, self.bias, labels, temperature, with_entropy)


class Actor(nn.Module):
    """A Hugging Face causal LM as a policy.

    Sequences are right-padded and attention is causal, so a real token never sees padding: no attention mask is
    passed, which keeps the fast attention kernels and makes the pad token's id irrelevant. `layout`: how sequences
    go through the decoder.
    """

    def __init__(self, model: Any, *, temperature: float = 1.0, layout: Layout = padded):
        super().__init__()
        if not isinstance(model.get_output_embeddings(), LogProbHead):
            model.set_output_embeddings(LogProbHead(model.get_output_embeddings()))
        self.model = model
        self.temperature = temperature
        self.layout = layout

    def forward(
        self,
        sequences: Tensor,
        action_mask: Tensor,
        *,
        with_entropy: bool = False,
        temperature: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the sampled tokens, both (B, A) fp32 and 0 off the mask.

        sequences: (B, S) int64, right-padded. action_mask: (B, A) bool with A = S - 1, True where
        `sequences[:, 1:]` was sampled. The log-prob is that of the distribution that was sampled from:
        log softmax(logits / temperature). Only action positions reach the LM head.
        """
        hidden = self.layout(self.model.get_decoder(), sequences, last_action_lengths(action_mask))
        labels = sequences[:, 1:][action_mask]
        head = self.model.get_output_embeddings()
        temperature = (temperature or self.temperature) * logits_divisor(self.model)
        picked, entropy = head(hidden[:, :-1][action_mask], labels, temperature=temperature, with_entropy=with_entropy)
        out = picked.new_zeros(action_mask.shape)
        return out.masked_scatter(action_mask, picked), out.masked_scatter(action_mask, entropy)
