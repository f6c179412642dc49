"""What both engines must do: a fixed list of questions to an engine, and the checks of its answers."""

import itertools
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from spmdrl.distributed import preemption
from spmdrl.distributed.weight_sync import named_tensors
from spmdrl.experience import collate, make_sample
from spmdrl.models.actor import Actor
from spmdrl.rollout.engine import Completion, Request, SamplingOptions
from tests.tiny import make_model, make_tokenizer

HEADER, EOS = 3, 2
GENERATION_CONFIG_EOS = list(range(40, 48))  # ends responses besides the tokenizer's own EOS, which is not among them
ALL_EOS = {EOS, *GENERATION_CONFIG_EOS}
MAX_LEN = 40
# Different lengths; EOS in the middle of one; the first and last would share a prefix cache.
PROMPTS = [[5, 6, 7, 8, 9], [300, 2, 71], [77], list(range(100, 125)), [5, 6, 7, 8]]
SAMPLES = 4
REQUESTS = [Request(ids, 1000 * i + j) for i, ids in enumerate(PROMPTS) for j in range(SAMPLES)]
FREE = SamplingOptions(temperature=1.0, top_p=1.0, top_k=-1, min_new_tokens=1, max_new_tokens=12, stop=())
VARIANTS = {
    "free": FREE,
    "cool": replace(FREE, temperature=0.6),
    "top_k": replace(FREE, top_k=5),
    "top_p": replace(FREE, top_p=0.5),
    "all_filters": replace(FREE, temperature=0.6, top_k=20, top_p=0.8),
    "min_tokens": replace(FREE, min_new_tokens=6),
    "one_token": replace(FREE, max_new_tokens=1),
    "greedy": replace(FREE, temperature=0.0),
    "bounded": replace(FREE, max_len=30),  # room for 5 tokens after the longest prompt
}
NUM_DRAWS = 1200


# Settings of a checkpoint's own that would change what is sampled.
OTHER_SETTINGS: dict[str, Any] = {
    **{"do_sample": True, "temperature": 0.3, "top_k": 2, "top_p": 0.3, "min_p": 0.2, "repetition_penalty": 1.5},
    **{"no_repeat_ngram_size": 1, "suppress_tokens": list(range(100, 200)), "forced_eos_token_id": HEADER},
    **{"min_new_tokens": 8, "max_new_tokens": 3, "num_return_sequences": 2, "return_dict_in_generate": True},
}


def write_model(path: Any, arch: Any = "llama", **options: Any) -> str:
    """A tiny model that often samples EOS and the header token. Its generation config has several EOS ids, and
    OTHER_SETTINGS."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    make_model(path, arch, **options)
    model = AutoModelForCausalLM.from_pretrained(path)
    with torch.no_grad():
        model.get_output_embeddings().weight[[EOS, HEADER]] *= 3
    model.generation_config = GenerationConfig(eos_token_id=GENERATION_CONFIG_EOS, pad_token_id=EOS, **OTHER_SETTINGS)
    model.save_pretrained(path)
    return str(path)


def perturbed(model: Any, scale: float = 0.05) -> dict[str, torch.Tensor]:
    """Other weights for the same names."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: weight.detach() + scale * torch.randn(weight.shape, generator=generator).to(weight.dtype)
        for name, weight in named_tensors(model)
    }


def ask(engine: Any, model: Any) -> dict[str, Any]:
    """Everything the checks look at. The questions after "moved" change the engine's weights."""
    tokenizer = make_tokenizer()
    out: dict[str, Any] = {name: engine.generate(REQUESTS, options) for name, options in VARIANTS.items()}
    out["nothing"] = engine.generate([], FREE)
    out["halves"] = engine.generate(REQUESTS[:7], FREE) + engine.generate(REQUESTS[7:], FREE)
    out["singly"] = [engine.generate([request], FREE)[0] for request in REQUESTS]
    out["backwards"] = engine.generate(REQUESTS[::-1], FREE)[::-1]
    out["reseeded"] = engine.generate([Request(r.prompt_ids, r.seed + 7) for r in REQUESTS], FREE)
    out["draws"] = engine.generate(
        [Request(PROMPTS[0], seed) for seed in range(NUM_DRAWS)], replace(FREE, max_new_tokens=1, top_k=4)
    )
    stops = stop_strings(out["free"], tokenizer)
    out["stop_strings"] = stops
    for name, stop in stops.items():
        out[f"stop_{name}"] = engine.generate(REQUESTS, replace(FREE, stop=(stop,)))
    out["stop_after_min"] = engine.generate(REQUESTS, replace(FREE, stop=("<|im_start|>",), min_new_tokens=6))
    out["without_stop_min"] = engine.generate(REQUESTS, replace(FREE, min_new_tokens=6))
    out["cut"] = cut_short(engine, after=3)
    out["after_cut"] = engine.generate(REQUESTS, FREE)
    out["reset"] = engine.reset_prefix_cache()

    engine.load_weights(iter(perturbed(model).items()))
    engine.reset_prefix_cache()
    out["moved"] = engine.generate(REQUESTS, FREE)
    engine.load_weights((name, p.detach()) for name, p in model.named_parameters())
    engine.reset_prefix_cache()
    out["restored"] = engine.generate(REQUESTS, FREE)
    out["refusals"] = {name: refusal(engine, weights) for name, weights in broken_weights(model).items()}
    return out


def cut_short(engine: Any, *, after: int) -> list[Completion]:
    """What it returns of 20 responses of up to 12 tokens when it is asked to stop after so many tokens."""
    asked, times = preemption.requested, itertools.count()
    preemption.requested = lambda: next(times) >= after
    try:
        return engine.generate(REQUESTS, FREE)
    finally:
        preemption.requested = asked


def stop_strings(free: list[Completion], tokenizer: Any) -> dict[str, str]:
    """Strings that the free responses contain: two tokens' text, a special token, and one begun by the prompt."""
    pair = next(
        text
        for completion in free
        for i in range(1, len(completion.token_ids) - 2)
        if (text := tokenizer.decode(completion.token_ids[i : i + 2])).isascii()
        and text.isprintable()
        and len(text) >= 2
    )
    spanning = next(
        tokenizer.decode([prompt[-1]]) + text
        for r, completion in zip(REQUESTS, free, strict=True)
        if (prompt := r.prompt_ids) != [300, 2, 71]
        and (text := tokenizer.decode(completion.token_ids[:1])).isascii()
        and text.isprintable()
        and completion.token_ids[0] > HEADER
    )
    return {"pair": pair, "special": "<|im_start|>", "spanning": spanning}


def broken_weights(model: Any) -> dict[str, dict[str, torch.Tensor]]:
    """One weight dropped and one renamed; a part of a fused layer, and a layer of its own."""
    whole = {name: p.detach() for name, p in model.named_parameters()}
    names = [name for name in whole if "mlp" in name] + [name for name in whole if "norm" in name or "ln_" in name]
    out = {}
    for label, name in (("fused", names[0]), ("own", names[-1])):
        renamed = next(n for n in whole if "layers.1" in n or ".h.1" in n)
        weights = {f"{n}_new" if n == renamed else n: w for n, w in whole.items() if n != name}
        out[f"{name}|{renamed}"] = weights
        del label
    return out


def refusal(engine: Any, weights: dict[str, torch.Tensor]) -> str:
    try:
        engine.load_weights(iter(weights.items()))
    except RuntimeError as error:
        return str(error)
    return "none"


# ---- what the answers must be ---------------------------------------------------------------------------------------
def logits_of(model: Any, prompt_ids: Any, completion: Completion) -> torch.Tensor:
    """(tokens, V) fp64 logits at the response's tokens."""
    ids = torch.tensor([[*prompt_ids, *completion.token_ids]])
    with torch.no_grad():
        logits = model(input_ids=ids).logits[0, len(prompt_ids) - 1 : -1]
    return logits.double()


def filtered_log_probs(logits: torch.Tensor, options: SamplingOptions) -> torch.Tensor:
    """(tokens, V) log-probs by the definition of each option, one position at a time."""
    rows = []
    for position, row in enumerate(logits.tolist()):
        allowed = {i for i in range(len(row)) if position >= options.min_new_tokens or i not in ALL_EOS}
        if options.min_new_tokens <= 1:
            allowed = set(range(len(row)))
        ranked = sorted(allowed, key=lambda i: -row[i])
        if options.top_k > 0:
            ranked = ranked[: options.top_k]
        log_p = torch.log_softmax(torch.tensor([row[i] for i in ranked]).double() / options.temperature, dim=0)
        if options.top_p < 1:
            before = log_p.exp().cumsum(0) - log_p.exp()
            ranked = [i for i, mass in zip(ranked, before.tolist(), strict=True) if mass < options.top_p]
            log_p = torch.log_softmax(log_p[: len(ranked)], dim=0)
        out = torch.full((len(row),), float("-inf"), dtype=torch.float64)
        out[ranked] = log_p
        rows.append(out)
    return torch.stack(rows)


class EngineContract:
    """Subclasses give fixtures `answers` (of `ask`) and `model`, in fp32, and the tolerance of log-probs."""

    tolerance: ClassVar[float]

    @pytest.mark.parametrize("variant", ["free", "cool", "one_token"])
    def test_log_probs_are_those_that_the_actor_recomputes(self, answers, model, variant):
        actor = Actor(model, temperature=VARIANTS[variant].temperature)
        for request, completion in zip(REQUESTS, answers[variant], strict=True):
            exp = collate([sample_of(request, completion)])
            with torch.no_grad():
                recomputed = actor(exp.sequences, exp.action_mask)[0]
            gap = (recomputed - exp.rollout_log_probs).abs().max()
            assert gap < self.tolerance, f"{float(gap)}"

    @pytest.mark.parametrize("variant", ["top_k", "top_p", "all_filters", "min_tokens"])
    def test_log_probs_are_those_of_the_filtered_distribution(self, answers, model, variant):
        for request, completion in zip(REQUESTS, answers[variant], strict=True):
            expected = filtered_log_probs(logits_of(model, request.prompt_ids, completion), VARIANTS[variant])
            picked = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(
                torch.tensor(completion.log_probs).double(), picked, atol=self.tolerance, rtol=0
            )

    def test_tokens_are_drawn_with_the_probabilities_of_the_distribution(self, answers, model):
        """Four tokens, 1200 draws: each count within 4 standard deviations of a binomial."""
        one = Completion([0], [0.0], "length")
        log_p = filtered_log_probs(logits_of(model, PROMPTS[0], one), replace(FREE, top_k=4))[0]
        counts = torch.bincount(torch.tensor([c.token_ids[0] for c in answers["draws"]]), minlength=len(log_p))
        assert (counts > 0).sum() == 4
        for p, count in zip(log_p.exp().tolist(), counts.tolist(), strict=True):
            assert abs(count - NUM_DRAWS * p) <= 4 * (NUM_DRAWS * p * (1 - p)) ** 0.5

    def test_the_eos_that_ended_a_response_is_its_last_token(self, answers):
        ended = [c for c in answers["free"] if c.finish_reason == "stop"]
        assert ended
        for completion in ended:
            assert completion.token_ids[-1] in ALL_EOS
            assert not set(completion.token_ids[:-1]) & ALL_EOS
            assert len(completion.log_probs) == len(completion.token_ids)

    def test_every_eos_id_of_the_generation_config_and_the_tokenizer_ends_a_response(self, answers):
        last = {c.token_ids[-1] for name in VARIANTS for c in answers[name] if c.finish_reason == "stop"}
        assert EOS in last
        assert last & set(GENERATION_CONFIG_EOS)

    def test_a_response_without_eos_ends_by_length_and_stays_as_sampled(self, answers):
        cut = [c for c in answers["free"] if c.finish_reason == "length"]
        assert cut
        for completion in cut:
            assert len(completion.token_ids) == FREE.max_new_tokens
            assert not set(completion.token_ids) & ALL_EOS
        assert {len(c.token_ids) for c in answers["one_token"]} == {1}

    def test_an_eos_as_the_only_token_is_a_whole_response(self, answers):
        firsts = [c for c in answers["one_token"] if c.token_ids[0] in ALL_EOS]
        assert all(c.finish_reason == "stop" for c in firsts)
        assert firsts, "no request drew EOS first: choose other seeds"

    def test_min_tokens_keep_eos_away(self, answers):
        """6 tokens without any EOS; then it may come."""
        assert any(len(c.token_ids) < 6 for c in answers["free"])
        for completion in answers["min_tokens"]:
            assert not set(completion.token_ids[:6]) & ALL_EOS

    def test_max_len_bounds_prompt_and_response_together(self, answers):
        for request, completion in zip(REQUESTS, answers["bounded"], strict=True):
            assert len(request.prompt_ids) + len(completion.token_ids) <= 30
        cut = [c for r, c in zip(REQUESTS, answers["bounded"], strict=True) if len(r.prompt_ids) == 25]
        assert any(c.finish_reason == "length" and len(c.token_ids) == 5 for c in cut)

    def test_a_stop_string_ends_a_response_and_stays_in_it(self, answers):
        """Ids are the free response's up to and with the token that completed the string."""
        tokenizer = make_tokenizer()
        stop, hits = answers["stop_strings"]["pair"], 0
        for free, stopped in zip(answers["free"], answers["stop_pair"], strict=True):
            n = len(stopped.token_ids)
            assert stopped.token_ids == free.token_ids[:n]
            text = tokenizer.decode(stopped.token_ids)
            assert stop not in tokenizer.decode(stopped.token_ids[:-1])
            if stop in text:
                hits += 1
                assert stopped.finish_reason == "stop"
            else:
                assert stopped == free
        assert hits

    def test_a_special_token_can_be_a_stop_string(self, answers):
        ended = [c for c in answers["stop_special"] if HEADER in c.token_ids]
        assert ended
        for completion in ended:
            assert completion.token_ids.index(HEADER) == len(completion.token_ids) - 1
            assert completion.finish_reason == "stop"

    def test_a_stop_string_that_begins_in_the_prompt_does_not_stop(self, answers):
        assert answers["stop_spanning"] == answers["free"]

    def test_stop_strings_wait_for_min_tokens(self, answers):
        early = late = 0
        for free, stopped in zip(answers["without_stop_min"], answers["stop_after_min"], strict=True):
            at = [i for i, token in enumerate(free.token_ids) if token == HEADER]
            early += any(i < 6 for i in at)
            after = [i + 1 for i in at if i >= 6]
            late += bool(after)
            assert stopped.token_ids == free.token_ids[: after[0] if after else None]
        assert early and late

    def test_greedy_takes_the_most_likely_token(self, answers, model):
        for request, completion in zip(REQUESTS, answers["greedy"], strict=True):
            logits = logits_of(model, request.prompt_ids, completion)
            picked = logits.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
            assert (logits.max(dim=-1).values - picked).max() < 1e-4

    def test_the_samples_of_a_prompt_differ(self, answers):
        for i in range(len(PROMPTS)):
            group = [tuple(c.token_ids) for c in answers["free"][i * SAMPLES : (i + 1) * SAMPLES]]
            assert len(set(group)) == SAMPLES

    @pytest.mark.parametrize("how", ["halves", "singly", "backwards"])
    def test_the_same_seed_draws_the_same_whatever_else_is_in_the_batch(self, answers, how):
        assert [c.token_ids for c in answers[how]] == [c.token_ids for c in answers["free"]]
        for one, other in zip(answers[how], answers["free"], strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=2e-5)

    def test_other_seeds_draw_other_samples(self, answers):
        same = sum(a.token_ids == b.token_ids for a, b in zip(answers["reseeded"], answers["free"], strict=True))
        assert same < len(REQUESTS) / 4

    def test_no_requests_give_no_completions(self, answers):
        assert answers["nothing"] == []

    def test_a_request_to_stop_cuts_it_short_and_leaves_nothing_behind(self, answers):
        assert sum(len(c.token_ids) for c in answers["cut"]) <= 3 * len(REQUESTS)
        assert len(answers["cut"]) < len(REQUESTS)
        assert answers["after_cut"] == answers["free"]

    def test_the_prefix_cache_can_be_reset(self, answers):
        assert answers["reset"] is True

    def test_loaded_weights_are_what_samples(self, answers, model):
        """After a load the log-probs are those of the new weights; the old weights bring the old samples back."""
        assert [c.token_ids for c in answers["moved"]] != [c.token_ids for c in answers["free"]]
        own = {name: p.detach().clone() for name, p in model.named_parameters()}
        model.load_state_dict(perturbed(model), strict=False)
        try:
            for request, completion in zip(REQUESTS, answers["moved"], strict=True):
                expected = filtered_log_probs(logits_of(model, request.prompt_ids, completion), FREE)
                picked = expected.gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                torch.testing.assert_close(
                    torch.tensor(completion.log_probs).double(), picked, atol=self.tolerance, rtol=0
                )
        finally:
            model.load_state_dict(own, strict=False)
        assert [c.token_ids for c in answers["restored"]] == [c.token_ids for c in answers["free"]]

    def test_a_dropped_and_a_renamed_weight_are_both_named(self, answers):
        """Of a fused layer, whose other part is there, and of a layer of its own."""
        assert len(answers["refusals"]) == 2
        for names, message in answers["refusals"].items():
            dropped, renamed = names.split("|")
            assert dropped in message, message
            assert f"unknown: {renamed}_new" in message, message


def sample_of(request: Request, completion: Completion) -> Any:
    return make_sample(
        request.prompt_ids,
        completion.token_ids,
        completion.log_probs,
        finish_reason=completion.finish_reason,
        group_id=0,
        index=0,
        row=0,
    )
