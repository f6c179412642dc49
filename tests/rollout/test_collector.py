"""From prompts to requests and from completions to samples."""

from spmdrl.data.prompts import Prompt
from spmdrl.rollout.collector import Collector
from spmdrl.rollout.engine import Completion, SamplingOptions, sampling_seed

OPTIONS = SamplingOptions(
    temperature=0.7, top_p=0.9, top_k=40, min_new_tokens=3, max_new_tokens=20, stop=("x",), max_len=50
)


class EchoEngine:
    """Answers with the last prompt token and the number of the request."""

    def __init__(self):
        self.calls = []

    def generate(self, requests, options):
        self.calls.append((list(requests), options))
        return [Completion([r.prompt_ids[-1], 100 + i], [-0.1, -0.2], "stop") for i, r in enumerate(requests)]


def prompts():
    return [Prompt(row, f"p{row}", [10 + row, 20 + row], None, {}) for row in (7, 3)]


def collector(engine, **changes):
    return Collector(engine, OPTIONS, **{"n_samples_per_prompt": 3, "seed": 5, **changes})


def test_each_prompt_is_asked_n_times_in_one_call_and_gets_its_own_answers():
    engine = EchoEngine()
    samples = collector(engine).collect(prompts(), [4, 9], step=2)
    ((requests, options),) = engine.calls
    assert options == OPTIONS
    assert [r.prompt_ids for r in requests] == [[17, 27]] * 3 + [[13, 23]] * 3
    assert [s.sequence.tolist() for s in samples] == [
        *([17, 27, 27, 100], [17, 27, 27, 101], [17, 27, 27, 102]),
        *([13, 23, 23, 103], [13, 23, 23, 104], [13, 23, 23, 105]),
    ]
    assert [(s.group_id, s.index, s.row) for s in samples] == [
        *((4, 0, 7), (4, 1, 7), (4, 2, 7)),
        *((9, 0, 3), (9, 1, 3), (9, 2, 3)),
    ]


def seeds(**where):
    engine = EchoEngine()
    collector(engine, seed=where.get("seed", 5)).collect(prompts(), where.get("groups", [4, 9]), where.get("step", 2))
    return [r.seed for r in engine.calls[0][0]]


def test_seeds_differ_between_samples_prompts_steps_and_runs():
    all_seeds = [*seeds(), *seeds(step=3), *seeds(seed=6), *seeds(groups=[5, 10])]
    assert len(set(all_seeds)) == len(all_seeds) == 24
    assert seeds() == seeds()


def test_a_rank_with_half_of_the_prompts_asks_with_the_same_seeds():
    engine = EchoEngine()
    collector(engine).collect(prompts()[1:], [9], step=2)
    assert [r.seed for r in engine.calls[0][0]] == seeds()[3:]


def test_seeds_fit_every_engine():
    """Not negative and below 2**63, what torch and vLLM take."""
    assert all(0 <= sampling_seed(2**31, step, 10**6, 0) < 2**63 for step in range(200))


def test_no_prompts_still_make_a_call():
    """Ranks of a tensor-parallel group generate together, whether they have prompts or not."""
    engine = EchoEngine()
    assert collector(engine).collect([], [], step=1) == []
    assert len(engine.calls) == 1


def test_the_greedy_baseline_is_one_response_at_temperature_0():
    engine = EchoEngine()
    samples = collector(engine).collect_greedy(prompts(), [4, 9])
    requests, options = engine.calls[0]
    assert len(requests) == len(samples) == 2
    assert options.temperature == 0
    assert [s.group_id for s in samples] == [4, 9]


def test_a_probe_samples_from_the_whole_distribution_and_is_the_same_every_time():
    engine = EchoEngine()
    ask = collector(engine)
    ask.collect_probe(prompts())
    ask.collect_probe(prompts())
    (first, options), (second, _) = engine.calls
    assert (options.top_p, options.top_k, options.stop, options.min_new_tokens) == (1.0, -1, (), 1)
    assert (options.temperature, options.max_new_tokens) == (0.7, 8)
    assert first == second
