"""Layouts of a micro-batch: padded, packed into one row, and pairs that share their beginning."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.experience import collate, make_sample
from spmdrl.models.actor import Actor
from spmdrl.models.packing import last_action_lengths, layout_for_pairs, packed, padded, paired
from tests.tiny import make_model

# Prompt and response of both sides of four pairs: a common prompt, a common beginning of the responses too, nothing in
# common, and one side that is the beginning of the other.
PAIRS = [
    ([5, 6, 7], [8, 9], [5, 6, 7], [10]),
    ([5, 6], [7, 8, 9, 10], [5, 6], [7, 8, 11]),
    ([5], [6], [7, 8, 9], [10, 11]),
    ([5, 6], [7, 8], [5, 6], [7, 8, 9, 10, 11]),
]


def batch():
    sides = [side for a, b, c, d in PAIRS for side in ((a, b), (c, d))]
    return collate(
        [
            make_sample(prompt, response, [0.0] * len(response), finish_reason="stop", group_id=0, index=0, row=0)
            for prompt, response in sides
        ]
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "gpt2"])
def test_every_layout_gives_the_same_log_probs_and_gradients(tmp_path, arch, attention):
    path = make_model(tmp_path / "model", arch, tie=arch == "gpt2")
    exp, results = batch(), []
    for layout in (padded, packed, paired):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
        log_probs, _ = Actor(model, layout=layout)(exp.sequences, exp.action_mask)
        (log_probs * torch.arange(1, 9)[:, None]).sum().backward()
        results.append((log_probs, {name: p.grad for name, p in model.named_parameters()}))
    (expected, gradients), *others = results
    for log_probs, grads in others:
        torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)
        for name in gradients:
            torch.testing.assert_close(grads[name], gradients[name], atol=2e-4, rtol=1e-4)


class Counting(torch.nn.Module):
    """A decoder that notes how many tokens it is given; its hidden states are the ids."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids, **options):
        self.shape = tuple(input_ids.shape)
        return type("Output", (), {"last_hidden_state": input_ids[..., None].float()})()


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (padded, (8, 7)),
        # 5 + 4 + 6 + 5 + 2 + 5 + 4 + 7 tokens
        (packed, (1, 38)),
        # 5 + 4 - 3, 6 + 5 - 4, 2 + 5 and 4 + 7 - 4 tokens, padded to the longest
        (paired, (4, 7)),
    ],
)
def test_what_the_decoder_computes_and_where_its_output_goes(layout, shape):
    decoder, exp = Counting(), batch()
    hidden = layout(decoder, exp.sequences, exp.lengths)
    assert decoder.shape == shape
    real = torch.arange(exp.sequences.shape[1]) < exp.lengths[:, None]
    assert torch.equal(hidden[..., 0][real], exp.sequences[real].float())


@pytest.mark.parametrize("layout", [padded, packed, paired])
def test_a_micro_batch_without_samples_goes_through(layout):
    exp = collate([])
    assert layout(Counting(), exp.sequences, exp.lengths).shape == (1, 2, 1)
    assert last_action_lengths(exp.action_mask).tolist() == [2]


def test_pairs_share_nothing_where_layers_have_windows(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", "qwen2"))
    assert layout_for_pairs(model) is paired
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert layout_for_pairs(model) is padded
    model.config.layer_types = None
    model.config.sliding_window, model.config.use_sliding_window = 8, True
    assert layout_for_pairs(model) is padded
