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


def paired(decoder: Any, sequences: Tensor, lengths: Tensor) -> Tensor:
    """Sequences 2n and 2n + 1 in one row, where the tokens that both begin with are computed once: first all of the
    one, then what the other does not share, which sees the shared tokens and itself."""
    if len(sequences) % 2:  # a micro-batch without samples
        return padded(decoder, sequences, lengths)
    (a, b), (len_a, len_b) = (sequences[0::2], sequences[1::2]), (lengths[0::2, None], lengths[1::2, None])
    place = torch.arange(sequences.shape[1], device=sequences.device)
    shared = ((a == b) & (place < torch.minimum(len_a, len_b))).cumprod(1).sum(1, keepdim=True)
    at = torch.arange(int((len_a + len_b - shared).max()), device=sequences.device)
    in_a = at < len_a  # (N, T)
    positions = torch.where(in_a, at, at - len_a + shared).clamp(max=sequences.shape[1] - 1)
    ids = torch.where(in_a, a.gather(1, positions), b.gather(1, positions))
    is_seen = (at[:, None] >= at) & ((at < shared)[:, None] | (in_a[:, :, None] == in_a[:, None]))  # (N, T, T)
    dtype = next(decoder.parameters()).dtype
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=sequences.device)
    mask = mask.masked_fill_(~is_seen, torch.finfo(dtype).min)[:, None]
    output = decoder(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False)
    hidden = output.last_hidden_state
    place_of_b = torch.where(place < shared, place, place - shared + len_a).clamp(max=len(at) - 1)
    places = torch.stack([place.clamp(max=len(at) - 1).expand_as(place_of_b), place_of_b], 1).flatten(0, 1)
    rows = torch.arange(len(sequences), device=sequences.device)[:, None] // 2
    return hidden[rows, places]


def layout_for_pairs(model: Any) -> Layout:
    """`paired` for models whose layers all attend to everything before, with a kernel that takes masks."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    takes_masks = model.config._attn_implementation in ("sdpa", "eager")
    return paired if takes_masks and kinds == {"full_attention"} and not has_window else padded


def last_action_lengths(action_mask: Tensor) -> Tensor:
    """(B, A) -> (B,) tokens up to the last one that was sampled; nothing later can change its log-prob."""
    steps = torch.arange(1, action_mask.shape[1] + 1, device=action_mask.device)
    return (steps * action_mask).amax(1).clamp(min=1) + 1
