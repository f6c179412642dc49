"""Layouts of a micro-batch: padded, packed into one row, and sequences that share their beginning."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.experience import collate, make_sample
from spmdrl.models.actor import Actor
from spmdrl.models.packing import last_action_lengths, layout_for, packed, padded, shared
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
    for layout in (padded, packed, shared):
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

    def __init__(self, width=64):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.config = SimpleNamespace(hidden_size=width)
        self.shapes = []

    def forward(self, input_ids, **options):
        self.shapes.append(tuple(input_ids.shape))
        return type("Output", (), {"last_hidden_state": input_ids[..., None].float()})()


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        (padded, (8, 7)),
        # 5 + 4 + 6 + 5 + 2 + 5 + 4 + 7 tokens
        (packed, (1, 38)),
        # 5 + 1 + 3 + 2 + 0, 5, and 4 + 3 tokens, padded to the next multiple of 8
        (shared, (3, 16)),
    ],
)
def test_what_the_decoder_computes_and_where_its_output_goes(layout, shape):
    decoder, exp = Counting(), batch()
    hidden = layout(decoder, exp.sequences, exp.lengths)
    assert decoder.shapes == [shape]
    real = torch.arange(exp.sequences.shape[1]) < exp.lengths[:, None]
    assert torch.equal(hidden[..., 0][real], exp.sequences[real].float())


@pytest.mark.parametrize("layout", [padded, packed, shared])
def test_a_micro_batch_without_samples_goes_through(layout):
    exp = collate([])
    assert layout(Counting(), exp.sequences, exp.lengths).shape == (1, 2, 1)
    assert last_action_lengths(exp.action_mask).tolist() == [2]


def responses(*prompts_and_lengths):
    """Sequences of random ids: for each (prompt length, response lengths) that many responses to one prompt."""
    sequences = []
    for prompt, lengths in prompts_and_lengths:
        start = torch.randint(3, 60, (prompt,))
        sequences += [torch.cat([start, torch.randint(3, 60, (length,))]) for length in lengths]
    lengths = torch.tensor([len(ids) for ids in sequences])
    return torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True), lengths


@pytest.mark.parametrize(
    ("groups", "shape"),
    [
        ([(40, [6, 5, 6, 6])], (1, 64)),  # 40 + 23
        ([(40, [6, 5, 6, 6]), (33, [2, 2, 2])], (2, 64)),
        ([(20, [60, 60])], (2, 80)),  # attention over 140 tokens costs more than 20 tokens save
        ([(1, [40, 40, 40])], (3, 41)),
        ([(9, [3])], (1, 12)),
    ],
)
def test_a_prompt_is_computed_once_where_that_saves_work(groups, shape):
    torch.manual_seed(0)
    decoder, (sequences, lengths) = Counting(), responses(*groups)
    hidden = shared(decoder, sequences, lengths)
    assert decoder.shapes == [shape]
    real = torch.arange(sequences.shape[1]) < lengths[:, None]
    assert torch.equal(hidden[..., 0][real], sequences[real].float())


@pytest.mark.parametrize("seed", range(20))
def test_shared_prompts_change_no_log_prob(tmp_path, model_of_width_64, seed):
    random = torch.Generator().manual_seed(seed)
    draw = lambda low, high: int(torch.randint(low, high, (), generator=random))  # noqa: E731
    torch.manual_seed(seed)
    groups = [(draw(1, 24), [draw(1, 9) for _ in range(draw(1, 6))]) for _ in range(draw(1, 4))]
    sequences, lengths = responses(*groups)
    action_mask = torch.arange(1, sequences.shape[1]) < lengths[:, None]
    with torch.no_grad():
        expected, _ = Actor(model_of_width_64, layout=padded)(sequences, action_mask)
        log_probs, _ = Actor(model_of_width_64, layout=shared)(sequences, action_mask)
    torch.testing.assert_close(log_probs, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def model_of_width_64(tmp_path_factory):
    return AutoModelForCausalLM.from_pretrained(make_model(tmp_path_factory.mktemp("shared") / "model", "llama"))


def test_nothing_is_shared_where_layers_have_windows(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(make_model(tmp_path / "model", "qwen2"))
    assert layout_for(model) is shared
    model.config.layer_types = ["full_attention", "sliding_attention"]
    assert layout_for(model) is padded
    model.config.layer_types = None
    model.config.sliding_window, model.config.use_sliding_window = 8, True
    assert layout_for(model) is padded
