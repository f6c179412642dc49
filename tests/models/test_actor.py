"""The policy's log-probs and entropies against plain log-softmax, in value, gradient, dtype and memory."""

import pytest
import torch

from spmdrl.models import actor as actor_module
from spmdrl.models.actor import Actor, LogProbHead, _ChunkedLogProbs
from tests.tiny import make_model


def plain(model, sequences, mask, temperature):
    logits = model(input_ids=sequences).logits[:, :-1].double() / temperature
    log_p = torch.log_softmax(logits, dim=-1)
    picked = log_p.gather(-1, sequences[:, 1:, None])[..., 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.where(mask, picked, 0.0), torch.where(mask, entropy, 0.0)


@pytest.fixture(params=["qwen2", "llama", "gpt2", "tied"])
def model(request, tmp_path):
    from transformers import AutoModelForCausalLM

    tied = request.param == "tied"
    path = make_model(tmp_path / "model", "llama" if tied else request.param, tie=tied or request.param == "gpt2")
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def batch():
    generator = torch.Generator().manual_seed(3)
    sequences = torch.randint(4, 300, (3, 11), generator=generator)
    mask = torch.zeros(3, 10, dtype=torch.bool)
    mask[0, 3:9], mask[1, 5:7] = True, True  # the third row has no action at all
    return sequences, mask


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_plain_log_softmax(model, temperature, monkeypatch):
    """Also with chunks of 3 rows in blocks of 5, which 8 action tokens do not fill evenly."""
    monkeypatch.setitem(actor_module.CHUNK_LOGITS, "cpu", 3 * 320)
    monkeypatch.setitem(actor_module.BLOCK_LOGITS, "cpu", 5 * 320)
    sequences, mask = batch()
    weights = torch.linspace(-1, 1, mask.numel()).view_as(mask)
    expected_log_probs, expected_entropy = plain(model, sequences, mask, temperature)
    (expected_log_probs * weights + 0.3 * expected_entropy).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    actor = Actor(model, temperature=temperature)
    log_probs, entropy = actor(sequences, mask, with_entropy=True)
    (log_probs * weights + 0.3 * entropy).sum().backward()
    torch.testing.assert_close(log_probs.double(), expected_log_probs, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, atol=2e-6, rtol=1e-5)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], atol=2e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_gradients_pass_gradcheck_in_float64():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 4, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(lambda h: _ChunkedLogProbs.apply(h, weight, None, labels, 0.7, True), (hidden,))


def test_bf16_logits_are_raised_to_fp32_before_the_softmax():
    """Equal to fp32 log-softmax of the same bf16 logits to two units in the last place of numbers around 20, and
    never positive (32k tokens)."""
    generator = torch.Generator().manual_seed(0)
    head = torch.nn.Linear(16, 32_000, bias=False).bfloat16()
    hidden = (4 * torch.randn(6, 16, generator=generator)).bfloat16()
    labels = torch.randint(0, 32_000, (6,), generator=generator)
    log_probs, entropy = LogProbHead(head)(hidden, labels, with_entropy=True)
    exact = torch.log_softmax(head(hidden).float(), dim=-1)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs <= 0).all()
    torch.testing.assert_close(log_probs, exact.gather(-1, labels[:, None])[:, 0], atol=4e-6, rtol=0)
    torch.testing.assert_close(entropy, -(exact.exp() * exact).sum(-1), atol=1e-4, rtol=1e-6)


def test_padding_changes_nothing(model):
    """The same row alone and beside a longer one, whatever id the padding has."""
    actor = Actor(model)
    sequences, mask = batch()
    alone, _ = actor(sequences[1:2, :8], mask[1:2, :7])
    for pad in (0, 2, 77):
        padded = sequences.clone()
        padded[1, 8:] = pad
        together, _ = actor(padded, mask)
        torch.testing.assert_close(together[1:2, :7], alone, atol=2e-6, rtol=1e-5)


def test_a_batch_without_actions_still_reaches_every_parameter(model):
    """What keeps ZeRO-3 ranks in step: all parameters take part in forward and backward, with gradient 0."""
    actor = Actor(model)
    log_probs, _ = actor(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.bool))
    log_probs.sum().backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        assert not p.grad.any(), name


def test_only_action_positions_reach_the_head_and_logits_never_exist_whole():
    """Peak memory of 4 x 256 tokens and 50k ids stays below that of their logits (205 MB), in both directions."""
    import resource

    head = torch.nn.Linear(8, 50_000, bias=False)
    wrapped = LogProbHead(head)
    hidden = torch.randn(4 * 256, 8, requires_grad=True)
    labels = torch.randint(0, 50_000, (4 * 256,))
    wrapped(hidden[:2], labels[:2])[0].sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wrapped(hidden, labels, with_entropy=True)[0].sum().backward()
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mb < 1.3 * 4 * 256 * 50_000 * 4 / 2**20, f"{grown_mb:.0f} MiB"
