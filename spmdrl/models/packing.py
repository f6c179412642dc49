"""A micro-batch without its padding: all sequences one after the other in a single row."""

from typing import Any

import torch
from torch import Tensor


def hidden_states(decoder: Any, sequences: Tensor, lengths: Tensor | None = None) -> Tensor:
    """(B, S, H) last hidden states of right-padded sequences (B, S).

    With `lengths` (B,) the decoder gets one row of real tokens whose positions start again at each sequence, by which
    transformers' attention kernels keep sequences apart: flash-attn by their bounds, sdpa and eager by a mask of
    (tokens, tokens). Padding positions are then 0.
    """
    if lengths is None:
        return decoder(input_ids=sequences, use_cache=False).last_hidden_state
    positions = torch.arange(sequences.shape[1], device=sequences.device).expand_as(sequences)
    real = positions < lengths[:, None]
    packed = decoder(input_ids=sequences[real][None], position_ids=positions[real][None], use_cache=False)
    hidden = packed.last_hidden_state[0]
    return hidden.new_zeros(*sequences.shape, hidden.shape[-1]).index_put((real,), hidden)


def last_action_lengths(action_mask: Tensor) -> Tensor:
    """(B, A) -> (B,) tokens up to the last one that was sampled; nothing later can change its log-prob."""
    steps = torch.arange(1, action_mask.shape[1] + 1, device=action_mask.device)
    return (steps * action_mask).amax(1).clamp(min=1) + 1
