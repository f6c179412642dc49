"""Responses in the order of the data; a run that is stopped anywhere goes on and ends with the same file."""

import json
import signal
from pathlib import Path

import pytest

from spmdrl.config.generate import OutputConfig
from spmdrl.config.parse import read_config
from spmdrl.config.supervised import DPOConfig, SFTConfig
from spmdrl.data.supervised import PairRows, TextRows, build_set, load_train_rows, make_shape
from spmdrl.errors import UserError
from spmdrl.trainer import generation
from spmdrl.trainer.generation import Response, every_response, preference_pair, rejection_sampling
from tests.launched import ROOT, launch, slurm_tasks, start_ranks, torchrun
from tests.ranks import run_ranks
from tests.rewards.reward_models import make_reward_model
from tests.tiny import make_tokenizer, write_jsonl
from tests.trainer.generations import FLAGS, NUM_PROMPTS, generate, words, write_inputs
from tests.trainer.runs import FakeEngine, canned, completion, read_jsonl

GENERATE = str(ROOT / "cli" / "generate.py")
EOS = 2


@pytest.fixture
def inputs(tmp_path):
    return write_inputs(tmp_path / "inputs")


@pytest.fixture
def engine(monkeypatch):
    """engine(responses...) takes the place of the one of --engine: these token ids in turn, over and over."""

    def engine(*responses, fails_at=None):
        answer = canned(*(completion(ids, reason) for ids, reason in responses))
        fake = FakeEngine(answer)
        if fails_at is not None:
            fake.answer = lambda number, request, options: (
                answer(number, request, options) if number < fails_at else 1 / 0
            )
        monkeypatch.setattr(generation, "build_engine", lambda *args, **kwargs: fake)
        return fake

    return engine


def text_ids(text):
    return make_tokenizer()(text)["input_ids"]


# ---- what is kept ---------------------------------------------------------------------------------------------------
def responses(*rewards):
    return [Response(f"text {i}", "stop", reward) for i, reward in enumerate(rewards)]


def columns(rows):
    return [row for row, _ in rows]


def test_every_response_is_a_row_with_its_reward_where_there_is_one():
    rows = every_response([Response("a", "stop"), Response("b", "length", 0.5)], OutputConfig(output_key="out"))
    assert columns(rows) == [
        {"out": "a", "out_finish_reason": "stop"},
        {"out": "b", "reward": 0.5, "out_finish_reason": "length"},
    ]


def test_rejection_sampling_keeps_the_first_of_the_best():
    output = OutputConfig(post_processor="rs")
    best = {"output": "text 1", "reward": 2.0, "output_finish_reason": "stop"}
    assert columns(rejection_sampling(responses(1.0, 2.0, 2.0, -3.0), output)) == [best]


@pytest.mark.parametrize(("threshold", "kept"), [(1.9, 1), (2.0, 1), (2.1, 0)])
def test_a_best_response_below_the_threshold_is_left_out(threshold, kept):
    output = OutputConfig(post_processor="rs", reward_threshold=threshold)
    assert len(rejection_sampling(responses(1.0, 2.0), output)) == kept


def test_a_pair_is_the_best_against_the_worst():
    output = OutputConfig(post_processor="iter_dpo", chosen_key="good", reward_key="score")
    assert columns(preference_pair(responses(0.0, -1.0, 3.0, -1.0), output)) == [
        {"good": "text 2", "rejected": "text 1", "good_score": 3.0, "rejected_score": -1.0}
    ]


def test_there_is_no_pair_where_nothing_is_better():
    output = OutputConfig(post_processor="iter_dpo")
    assert preference_pair(responses(0.5, 0.5, 0.5), output) == []
    assert preference_pair([Response("same", "stop", 0.5), Response("same", "stop", 0.50001)], output) == []


# ---- what is written ------------------------------------------------------------------------------------------------
def test_rows_follow_the_data_with_all_their_columns(tmp_path, inputs, engine, capsys):
    """The second of three responses is cut; the EOS that ended the others is no part of their text."""
    engine(([*text_ids("yes"), EOS], "stop"), (text_ids("no"), "length"), ([EOS], "stop"))
    rows = generate(tmp_path / "deep" / "out.jsonl", **inputs)
    assert [list(row) for row in rows] == [
        ["id", "question", "answer", "z", "output", "reward", "output_finish_reason"]
    ] * (3 * NUM_PROMPTS)
    assert [row["id"] for row in rows] == [i for i in range(NUM_PROMPTS) for _ in range(3)]
    assert [(row["output"], row["output_finish_reason"]) for row in rows[:3]] == [
        ("yes", "stop"),
        ("no", "length"),
        ("", "stop"),
    ]
    assert rows[5]["answer"] == {"value": 1}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["out.jsonl"]
    said = capsys.readouterr().out
    assert f"21 rows for 7 prompts in {tmp_path}/deep/out.jsonl; 7 of 21 responses cut at --max_new_tokens" in said


def test_without_a_reward_there_is_none(tmp_path, inputs, engine):
    engine(([5, EOS], "stop"))
    rows = generate(tmp_path / "out.jsonl", **inputs | {"reward_func": None, "n_samples_per_prompt": 1})
    assert len(rows) == NUM_PROMPTS
    assert "reward" not in rows[0]


def test_prompts_that_are_left_out_are_counted(tmp_path, inputs, engine, capsys):
    """Rewards of one length are equal; the third prompt is empty, and one is longer than 8 tokens."""
    engine(([5, EOS], "stop"))
    rows = [{"question": q, "answer": 0} for q in ("a", "b", " ", "c" * 9)]
    flags = inputs | {"dataset": write_jsonl(tmp_path / "p.jsonl", rows), "prompt_max_len": 8}
    assert generate(tmp_path / "out.jsonl", **flags, post_processor="iter_dpo") == []
    said = capsys.readouterr().out
    assert "2 prompts from" in said
    assert "(1 too long > 8 tokens, 1 empty dropped)" in said
    assert "0 rows for 2 prompts" in said
    assert "; 2 prompts left out, with equally good responses;" in said


def test_text_that_utf8_lacks_and_dates_are_kept(tmp_path, inputs, engine):
    engine(([5, EOS], "stop"))
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": "\\ud83d", "ö": "ü"}\n')
    rows = generate(tmp_path / "out.jsonl", **inputs | {"dataset": path, "n_samples_per_prompt": 1})
    assert rows[0]["answer"] == "\ud83d"
    assert '"ö": "ü"' in (tmp_path / "out.jsonl").read_text()


def test_a_column_that_would_be_lost_is_named(tmp_path, inputs, engine):
    rows = [{"question": "a", "answer": 0}, {"question": "b", "answer": 0, "output": "mine"}]
    flags = inputs | {"dataset": write_jsonl(tmp_path / "p.jsonl", rows)}
    with pytest.raises(UserError, match=r"p.jsonl line 2 has a column 'output' already.*--output_key"):
        generate(tmp_path / "out.jsonl", **flags)
    engine(([5, EOS], "stop"))
    assert len(generate(tmp_path / "out.jsonl", **flags, output_key="response")) == 6


def test_what_json_cannot_hold_is_named(tmp_path, inputs, engine):
    from datasets import Dataset

    engine(([5, EOS], "stop"))
    Dataset.from_list([{"question": "a", "answer": b"\x00"}]).to_parquet(str(tmp_path / "p.parquet"))
    with pytest.raises(UserError, match=r"p.parquet row 1: a column holds bytes, which JSON lines have no form for"):
        generate(tmp_path / "out.jsonl", **inputs | {"dataset": tmp_path / "p.parquet"})


# ---- going on -------------------------------------------------------------------------------------------------------
MANY = [([5 + i, 6 + i, EOS], "stop") for i in range(3 * NUM_PROMPTS)]


@pytest.fixture
def stopped(tmp_path, inputs, engine):
    """The output path of a run that failed in its third round of four, and what it was to write."""
    engine(*MANY)
    generate(tmp_path / "whole.jsonl", **inputs)
    engine(*MANY, fails_at=14)
    with pytest.raises(ZeroDivisionError):
        generate(tmp_path / "out.jsonl", **inputs)
    assert not (tmp_path / "out.jsonl").exists()
    return tmp_path / "out.jsonl", (tmp_path / "whole.jsonl").read_bytes()


def go_on(path, inputs, engine, **flags):
    """Generates what is left; how many responses that were."""
    fake = engine(*MANY[12:], *MANY[:12])
    generate(path, **inputs | flags)
    return len(fake.requests)


def test_finished_rounds_are_not_generated_again(stopped, inputs, engine):
    """Two rounds of two prompts with three responses are done, 12 of 21."""
    path, whole = stopped
    assert go_on(path, inputs, engine) == 21 - 12
    assert path.read_bytes() == whole
    assert not Path(f"{path}.partial").exists()


def test_a_round_that_is_written_in_part_is_done_again(stopped, inputs, engine):
    path, whole = stopped
    partial = Path(f"{path}.partial")
    lines = partial.read_bytes().splitlines(keepends=True)
    assert len(lines) == 1 + 2
    partial.write_bytes(b"".join(lines) + lines[-1][:-20])
    assert go_on(path, inputs, engine) == 9
    assert path.read_bytes() == whole


def test_a_run_that_ended_before_it_cleaned_up_is_finished_again(stopped, inputs, engine, tmp_path):
    path, whole = stopped
    partial = Path(f"{path}.partial")
    engine(*MANY[12:], fails_at=9)
    keep = generation.OutputFile.finish
    try:
        generation.OutputFile.finish = lambda self: 1 / 0
        with pytest.raises(ZeroDivisionError):
            generate(path, **inputs)
    finally:
        generation.OutputFile.finish = keep
    path.write_bytes(whole)
    engine(fails_at=0)
    generate(path, **inputs)
    assert path.read_bytes() == whole
    assert not partial.exists()


def test_a_file_that_came_in_between_is_not_overwritten(stopped, inputs, engine):
    path, _ = stopped
    path.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        go_on(path, inputs, engine)
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"seed": 5}, r"--seed 1234 -> 5: start with the same flags"),
        ({"n_samples_per_prompt": 2}, r"--n_samples_per_prompt 3 -> 2"),
        ({"rollout_batch_size": 3}, r"--rollout_batch_size 2 -> 3"),
        ({"post_processor": "rs"}, r"--post_processor None -> rs"),
    ],
)
def test_other_flags_are_refused(stopped, inputs, engine, flags, message):
    path, whole = stopped
    with pytest.raises(UserError, match=message):
        go_on(path, inputs, engine, **flags)
    assert go_on(path, inputs, engine) == 9
    assert path.read_bytes() == whole


def test_other_data_model_or_reward_is_refused(stopped, inputs, engine):
    path, _ = stopped
    for name, file in (("dataset", inputs["dataset"]), ("reward_func", inputs["reward_func"].rpartition(":")[0])):
        before = Path(file).read_text()
        Path(file).write_text(before.replace("6", "60") if name == "dataset" else before + "\n")
        with pytest.raises(UserError, match=f"--{name} has other contents"):
            go_on(path, inputs, engine)
        Path(file).write_text(before)
    other = write_inputs(Path(inputs["pretrain"]).parent.parent / "other", seed=1)
    with pytest.raises(UserError, match="--pretrain has other contents"):
        go_on(path, inputs, engine, pretrain=other["pretrain"])


def test_what_only_moves_work_may_change(stopped, inputs, engine, capsys):
    path, whole = stopped
    assert go_on(path, inputs, engine, micro_rollout_batch_size=1) == 9
    assert path.read_bytes() == whole
    assert "resuming with --micro_rollout_batch_size 2 -> 1" in capsys.readouterr().out


def test_two_runs_do_not_write_one_file(tmp_path, inputs, engine):
    engine(([5, EOS], "stop"))
    description = {"program": "x", "flags": {}, "contents": {}}
    first = generation.OutputFile(tmp_path / "out.jsonl", description, num_prompts=1)
    with pytest.raises(UserError, match="another run is writing it"):
        generate(tmp_path / "out.jsonl", **inputs)
    assert first.num_rounds == 0


def test_a_partial_file_of_something_else_is_not_touched(tmp_path, inputs):
    (tmp_path / "out.jsonl.partial").write_text("notes\n")
    with pytest.raises(UserError, match=r"out\.jsonl\.partial is none of this program's"):
        generate(tmp_path / "out.jsonl", **inputs)
    assert (tmp_path / "out.jsonl.partial").read_text() == "notes\n"


# ---- trained on -----------------------------------------------------------------------------------------------------
def test_the_files_are_data_of_sft_and_dpo(tmp_path, inputs, engine):
    """Seven prompts; every response of the fake model is text that SFT ends with the EOS that was taken off."""
    tokenizer = make_tokenizer()
    engine(*[([*text_ids(f"answer {i}"), EOS], "stop") for i in range(5)])
    generate(tmp_path / "rs.jsonl", **inputs, post_processor="rs")
    pairs = generate(tmp_path / "pairs.jsonl", **inputs, post_processor="iter_dpo")

    def loaded(cls, rows, group_size, name, *flags):
        template = ["--input_template", "{}"]
        config = read_config(cls, ["--dataset", str(tmp_path / name), *template, *flags]).data
        shape = make_shape(config, tokenizer, [EOS])
        render = rows(config, shape)
        found = load_train_rows(config, seed=0)
        return build_set(found, render, config, tokenizer, group_size=group_size, end_ids=[EOS])

    sft = loaded(SFTConfig, TextRows, 1, "rs.jsonl", "--input_key", "question", "--output_key", "output")
    assert len(sft) == NUM_PROMPTS
    first = read_jsonl(tmp_path / "rs.jsonl")[0]
    assert sft.samples([0])[0].sequence.tolist() == [*text_ids(first["question"] + first["output"]), EOS]
    dpo = loaded(
        DPOConfig, lambda c, s: PairRows(c, s, with_margin=False), 2, "pairs.jsonl", "--prompt_key", "question"
    )
    assert len(dpo) == len(pairs) > 0
    assert all(pair["chosen_reward"] > pair["rejected_reward"] for pair in pairs)


# ---- whole runs -----------------------------------------------------------------------------------------------------
def generate_on_each_rank(output_path, flags):
    return generate(output_path, **flags)


@pytest.mark.slow
def test_the_file_does_not_depend_on_the_number_of_ranks(tmp_path, inputs):
    """Rounds of three prompts leave one rank of two with fewer, in the last round with none; scores are a reward
    model's under ZeRO-3, which differ by rounding from those of one rank."""
    model = make_reward_model(tmp_path / "rm", mean=0.5, std=2.0)
    flags = inputs | {"reward_pretrain": model, "reward_func": None, "rollout_batch_size": 3, "normalize_reward": True}
    alone = generate(tmp_path / "one.jsonl", **flags)
    run_ranks(2, generate_on_each_rank, str(tmp_path / "two.jsonl"), flags | {"zero_stage": 3})
    together = read_jsonl(tmp_path / "two.jsonl")
    assert len(alone) == 21
    assert [row["reward"] for row in together] == pytest.approx([row["reward"] for row in alone], abs=1e-5)
    assert [row | {"reward": 0} for row in together] == [row | {"reward": 0} for row in alone]
    assert len({row["output"] for row in alone}) > 7


@pytest.mark.slow
@pytest.mark.parametrize("by", ["SIGKILL", "SIGTERM"])
def test_a_killed_run_goes_on_with_the_same_command(tmp_path, inputs, by):
    """SIGKILL in the reward function of the third of four rounds ends torchrun; SIGTERM is waited for and answered."""
    flags = words(**inputs, output_path=tmp_path / "out.jsonl", post_processor="iter_dpo")
    generate(tmp_path / "whole.jsonl", **inputs, post_processor="iter_dpo")
    kill = {"KILL_AT": "3", "KILL_BY": str(int(signal.Signals[by]))}
    if by == "SIGKILL":
        killed = launch(torchrun(GENERATE, *flags), tmp_path / "log", **kill)
    else:
        killed = start_ranks([GENERATE, *flags], [kill], tmp_path / "log").wait()[0]
    assert killed.code == {"SIGKILL": 1, "SIGTERM": 75}[by], killed.out
    assert not (tmp_path / "out.jsonl").exists()
    partial = tmp_path / "out.jsonl.partial"
    rounds = partial.read_text().splitlines()[1:]
    assert len(rounds) == 2
    if by == "SIGTERM":
        said = killed.lines("preempted", f"checkpoint saved in {partial}; start the same command again")
        assert len(said) == 1, killed.out
    tasks = slurm_tasks(2) if by == "SIGKILL" else [{}]
    again = start_ranks([GENERATE, *flags], tasks, tmp_path / "log2").wait()[0]
    assert again.code == 0, again.out
    assert again.lines(f"resuming: 2 of 4 rounds are in {partial}"), again.out
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


@pytest.mark.slow
def test_vllm_samples_pairs_on_two_ranks(tmp_path, inputs):
    own = {"engine": "vllm", "enforce_eager": True, "vllm_kv_cache_gb": 1, "enable_prefix_caching": True}
    flags = words(**FLAGS | inputs | own, output_path=tmp_path / "out.jsonl", post_processor="iter_dpo")
    run = start_ranks([GENERATE, *flags], slurm_tasks(2), tmp_path / "log").wait()[0]
    assert run.code == 0, run.out
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    ids = [row["id"] for row in rows]
    assert ids == sorted(ids)
    assert len(rows) > 3
    assert all(row["chosen_reward"] > row["rejected_reward"] for row in rows)
