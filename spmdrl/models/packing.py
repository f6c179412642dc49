"""How the sequences of a micro-batch go through a decoder. Each layout gives the same hidden states.

A layout is fn(decoder, sequences, lengths) -> (B, S, H): the last hidden states of right-padded sequences (B, S) with
`lengths` (B,) tokens each. What it gives at padding is not used.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Layout = Callable[[Any, Tensor, Tensor], Tensor]


def padded(decoder: Any, sequences: Tensor, lengths: Tensor) -> Tensor:
    """As they are. Attention is causal, so a real token never sees padding, and no mask is passed."""
    return decoder(input_ids=sequences, use_cache=False).last_hidden_state


def packed(decoder: Any, sequences: Tensor, lengths: Tensor) -> Tensor:
    """All real tokens in one row, whose positions start again at each sequence. By that transformers' attention
    kernels keep sequences apart: flash-attn by their bounds, sdpa and eager by a mask of (tokens, tokens)."""
    if not len(lengths):  # a micro-batch without samples
        return padded(decoder, sequences, lengths)
    positions = torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
    real = positions < lengths[:, None]
    output = decoder(input_ids=sequences[real][None], position_ids=positions[real][None], use_cache=False)
    hidden = output.last_hidden_state[0]
    return hidden.new_zeros(*sequences.shape, hidden.shape[-1]).index_put((real,), hidden)


def shared(decoder: Any, sequences: Tensor, lengths: Tensor) -> Tensor:
    """Sequences that begin alike in one row, in which those tokens are computed once: first all of one sequence, then
    of each other what it does not share with the first, which sees the shared tokens and itself. So the responses to
    one prompt, and the two sides of a pair, cost their prompt once (Prefix Grouper, https://arxiv.org/abs/2506.05433).
    A micro-batch for which attention over the longer rows would cost more than is saved goes as it is."""
    width = decoder.config.hidden_size
    rows = _rows(lengths.tolist(), _common_with_previous(sequences, lengths), width)
    sizes = lengths.tolist()
    height = -(-max((_row_length(row, sizes) for row in rows), default=0) // 8) * 8  # what masked kernels like
    if not rows or len(rows) * _cost(height, width) >= len(sequences) * _cost(
        sequences.shape[1], width, is_causal=True
    ):
        return padded(decoder, sequences, lengths)
    place = torch.zeros(sequences.shape, dtype=torch.int64)  # of each token in its row
    token = torch.zeros(4, len(rows), height, dtype=torch.int64)  # sequence, position, which of the row's, shared
    token[2] = -1
    row_of = torch.zeros(len(sequences), dtype=torch.int64)
    for number, row in enumerate(rows):
        at = 0
        for member, (index, common) in enumerate(row):
            end, positions = at + sizes[index] - common, torch.arange(sequences.shape[1])
            token[:, number, at:end] = torch.tensor([index, 0, member, common])[:, None]
            token[1, number, at:end] = positions[common : sizes[index]]
            place[index] = torch.where(positions < common, positions, positions - common + at)
            row_of[index], at = number, end
    place, row_of = place.clamp_(max=height - 1).to(sequences.device), row_of.to(sequences.device)
    index, positions, member, common = token.to(sequences.device)
    is_own = member[:, :, None] == member[:, None]
    is_shared = (member[:, None] == 0) & (positions[:, None] < common[:, :, None])
    is_seen = (is_own | is_shared).tril()  # (R, T, T), queries by keys
    dtype = next(decoder.parameters()).dtype
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=sequences.device)
    mask = mask.masked_fill_(~is_seen, torch.finfo(dtype).min)[:, None]
    output = decoder(
        input_ids=sequences[index, positions], position_ids=positions, attention_mask=mask, use_cache=False
    )
    return output.last_hidden_state[row_of[:, None], place]


Row = list[tuple[int, int]]  # of each sequence: its index, and how many of its first tokens are the first sequence's


def _rows(lengths: list[int], common: list[int], width: int) -> list[Row]:
    """Neighbours share a row where that saves more than the longer row's attention costs."""
    rows: list[Row] = []
    length = shared_by_all = 0
    for index, size in enumerate(lengths):
        shared_by_all = min(shared_by_all, common[index])
        longer = length + size - shared_by_all
        apart = _cost(length, width) + _cost(size, width, is_causal=True)
        if rows and shared_by_all and _cost(longer, width) < apart:
            rows[-1].append((index, shared_by_all))
            length = longer
        else:
            rows.append([(index, 0)])
            length = shared_by_all = size
    return rows


def _row_length(row: Row, lengths: list[int]) -> int:
    return sum(lengths[index] - common for index, common in row)


def _common_with_previous(sequences: Tensor, lengths: Tensor) -> list[int]:
    """How many tokens each sequence begins with that the one before it begins with too; 0 for the first."""
    place = torch.arange(sequences.shape[1], device=sequences.device)
    is_real = place < torch.minimum(lengths[1:], lengths[:-1])[:, None]
    is_same = (sequences[1:] == sequences[:-1]) & is_real
    return [0, *is_same.cumprod(1).sum(1).tolist()]


def _cost(length: int, width: int, *, is_causal: bool = False) -> int:
    """Of one row in a layer, in units of 2 width FLOPs: about 12 width**2 weights, and attention, of which a causal
    kernel computes half; with a mask it does all, at half the speed."""
    return length * (12 * width + (1 if is_causal else 4) * length)


def layout_for(model: Any) -> Layout:
    """`shared` for models whose layers all attend to everything before, with a kernel that takes masks."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    takes_masks = model.config._attn_implementation in ("sdpa", "eager")
    return shared if takes_masks and kinds == {"full_attention"} and not has_window else padded


def shares_prompts(model: Any) -> bool:
    """Whether `model`, an Actor or ValueModel or an engine around one, goes faster with responses to one prompt in one
    micro-batch."""
    return getattr(model, "layout", None) is shared


def last_action_lengths(action_mask: Tensor) -> Tensor:
    """(B, A) -> (B,) tokens up to the last one that was sampled; nothing later can change its log-prob."""
    steps = torch.arange(1, action_mask.shape[1] + 1, device=action_mask.device)
    return (steps * action_mask).amax(1).clamp(min=1) + 1
