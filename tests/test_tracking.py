"""Where numbers go: files, console, W&B and TensorBoard as they really are, and the phase timer."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from spmdrl.config import TrackingConfig
from spmdrl.errors import UserError
from spmdrl.tracking import Tracker, main, read_rows

ROOT = Path(__file__).parents[1]
SECRET = "0123456789abcdef0123456789abcdef01234567"
STEP = {
    "rollout/reward": 0.5,
    "rollout/reward_std": 0.25,
    "policy/kl": 0.0123,
    "rollout/response_length": 20.0,
    "rollout/truncated": 0.25,
    "policy/loss": -0.5,
    "policy/grad_norm": 1.5,
    "policy/lr": 3e-5,
}


def make_tracker(
    folder: Path, resume_step: int | None = None, is_main: bool = True, steps: int = 4, **flags
) -> Tracker:
    return Tracker(
        TrackingConfig(**flags),
        save_path=str(folder),
        run_config={"seed": 7, "use_wandb": True},
        is_main=is_main,
        total_steps=steps,
        resume_step=resume_step,
    )


def metrics_of(folder: Path) -> list[dict]:
    return read_rows(folder / "metrics.jsonl")


# ---- files --------------------------------------------------------------------------------------------------------
def test_one_json_object_a_step_with_step_first(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log({"policy/kl": torch.tensor(0.25)}, 1)
    tracker.log({"policy/kl": 3}, 2)
    tracker.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["policy/kl"] for line in lines] == [0.25, 3.0]
    assert [next(iter(json.loads(line).items())) for line in lines] == [("step", 1), ("step", 2)]


def test_numbers_that_json_cannot_hold_are_null_and_the_file_stays_json(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log({"policy/loss": math.nan, "policy/kl": -math.inf}, 1)
    tracker.log_samples([{"response": "a\u2028b\ud800ü", "label": {"x": math.nan}, "info": torch.tensor([1, 2])}], 1)
    strict = {"parse_constant": lambda constant: pytest.fail(f"{constant} is not JSON")}
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), **strict)
    assert row["policy/loss"] is None
    assert row["policy/kl"] is None
    (sample,) = read_rows(tmp_path / "samples.jsonl")
    assert sample == {"step": 1, "response": "a\u2028b\ud800ü", "label": {"x": None}, "info": [1, 2]}


def test_steps_only_grow(tmp_path):
    tracker = make_tracker(tmp_path)
    tracker.log(STEP, 2)
    with pytest.raises(AssertionError, match="step 2 logged after train step 2"):
        tracker.log(STEP, 2)


@pytest.mark.parametrize("content", ["", "[1]", b"\xff"], ids=["cut short", "foreign", "no text"])
def test_a_run_whose_name_was_damaged_is_resumed_under_another(tmp_path, content):
    make_tracker(tmp_path).close()
    (tmp_path / "tracking.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    make_tracker(tmp_path, resume_step=0).close()
    assert json.loads((tmp_path / "tracking.json").read_text())["run_name"].startswith("ppo_")


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path):
    """Checkpoint at step 2, killed in the middle of writing step 4: resumed rows are 1 2 3 4, each once."""
    tracker = make_tracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log(STEP, step)
        tracker.log_samples([{"response": str(step)}], step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rollout/re')
    resumed = make_tracker(tmp_path, resume_step=2)
    with pytest.raises(AssertionError, match="step 2 logged after train step 2"):
        resumed.log(STEP, 2)
    for step in (3, 4):
        resumed.log(STEP, step)
        resumed.log_samples([{"response": f"again {step}"}], step)
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4]
    assert [row["response"] for row in read_rows(tmp_path / "samples.jsonl")] == ["1", "2", "again 3", "again 4"]


DAMAGE = {
    "nothing": b"",
    "cut short": b'{"step": 2, "rollout/re',
    "zeros": bytes(50),
    "no text": b'{"step": 2, "rollout/reward": "\xff"}',
    "no object": b"[2]",
    "no step": b'{"rollout/reward": 0.5}',
    "a step that is none": b'{"step": "2", "rollout/reward": 0.5}',
    "too deep": b"[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
def test_what_is_whole_of_a_damaged_log_is_kept(tmp_path, capsys, damage, name):
    """The damaged file is set aside as it was, and the rest is that of a run whose log is whole."""
    tracker = make_tracker(tmp_path)
    for step in (1, 2, 3):
        tracker.log(STEP, step)
        tracker.log_samples([{"response": str(step)}], step)
    lines = (tmp_path / name).read_bytes().split(b"\n")
    damaged = b"\n".join([lines[0], damage, damage, *lines[2:]])
    (tmp_path / name).write_bytes(damaged)
    (tmp_path / name).with_stem(f"{Path(name).stem}.1").write_text("an earlier run's\n")
    capsys.readouterr()
    make_tracker(tmp_path, resume_step=3).log(STEP, 4)
    assert [row["step"] for row in read_rows(tmp_path / name)] == ([1, 3, 4] if name == "metrics.jsonl" else [1, 3])
    aside = (tmp_path / name).with_stem(f"{Path(name).stem}.2")
    assert aside.read_bytes() == damaged
    said = [line for line in capsys.readouterr().out.splitlines() if "damaged" in line]
    assert said == [f"{tmp_path / name}: 2 damaged lines left out; the file as it was is {aside}"]


def test_a_disk_that_refuses_a_log_is_one_line(tmp_path, monkeypatch):
    tracker = make_tracker(tmp_path)
    full = Path("/dev/full")
    monkeypatch.setattr("spmdrl.tracking.append", lambda path, rows: full.write_text("x"))
    for log in (lambda: tracker.log(STEP, 1), lambda: tracker.log_samples([{"response": ""}], 1)):
        with pytest.raises(UserError, match=f"--save_path {tmp_path}: cannot write there: No space left on device"):
            log()


def test_a_run_stays_where_it_began_when_a_reward_function_goes_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    tracker = make_tracker(Path("run"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    tracker.log(STEP, 1)
    assert len(metrics_of(tmp_path / "run")) == 1


def test_a_new_run_in_the_same_folder_sets_the_old_files_aside(tmp_path):
    for reward in (0.25, 0.5, 0.75):
        make_tracker(tmp_path).log({"rollout/reward": reward}, 1)
    kept = [read_rows(tmp_path / name)[0]["rollout/reward"] for name in ("metrics.1.jsonl", "metrics.2.jsonl")]
    assert kept == [0.25, 0.5]
    assert [row["rollout/reward"] for row in metrics_of(tmp_path)] == [0.75]


def test_off_rank_0_nothing_is_written_or_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would raise
    monkeypatch.setenv("LOCAL_RANK", "0")  # rank 1 of two nodes with one rank each
    monkeypatch.setenv("RANK", "1")
    tracker = make_tracker(tmp_path / "run", is_main=False, use_wandb="True", use_tensorboard=str(tmp_path / "tb"))
    with tracker.phase("train", 3) as progress:
        progress.update(3)
    assert progress.seconds > 0
    tracker.log(STEP, 1)
    tracker.log_samples([{"a": 1}], 1)
    tracker.close()
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == ""


# ---- time ---------------------------------------------------------------------------------------------------------
def test_phases_add_up_to_the_step_and_a_nested_one_counts_once(tmp_path):
    tracker = make_tracker(tmp_path)
    for _ in range(2):  # a phase entered twice in a step accumulates
        with tracker.phase("generate"):
            time.sleep(0.1)
            with tracker.phase("sync_weights") as sync:
                time.sleep(0.05)
    time.sleep(0.1)  # outside every phase
    tracker.log({}, 1)
    (row,) = metrics_of(tmp_path)
    assert 0.2 <= row["time/generate_s"] < 1
    assert 0.1 <= row["time/sync_weights_s"] < 0.9
    assert 0.1 <= row["time/other_s"] < 0.9
    assert 0.05 <= sync.seconds < 0.5
    parts = row["time/generate_s"] + row["time/sync_weights_s"] + row["time/other_s"]
    assert parts == pytest.approx(row["time/step_s"], abs=1e-6)


def test_the_first_step_begins_with_its_first_phase_and_the_next_where_the_last_ended(tmp_path):
    tracker = make_tracker(tmp_path)
    time.sleep(0.3)  # loading the model is no part of a step
    with tracker.phase("train"):
        pass
    tracker.log({}, 1)
    time.sleep(0.3)  # saving a checkpoint between steps is
    with tracker.phase("train"):
        pass
    tracker.log({}, 2)
    first, second = metrics_of(tmp_path)
    assert first["time/step_s"] < 0.2
    assert second["time/step_s"] >= 0.3


def test_an_exception_passes_and_its_phase_is_closed(tmp_path):
    tracker = make_tracker(tmp_path)
    with pytest.raises(KeyError), tracker.phase("train", 3):
        raise KeyError
    with tracker.phase("generate"):
        pass
    tracker.log({}, 1)
    assert {"time/train_s", "time/generate_s"} <= set(metrics_of(tmp_path)[0])


def test_tokens_per_second_are_those_of_the_phase(tmp_path):
    tracker = make_tracker(tmp_path)
    with tracker.phase("generate"):
        time.sleep(0.1)
    with tracker.phase("train"):
        time.sleep(0.05)
    tracker.log({"rollout/num_tokens": 100.0, "perf/train_tokens_per_s": 7.0}, 1)
    (row,) = metrics_of(tmp_path)
    assert row["perf/generate_tokens_per_s"] == pytest.approx(100 / row["time/generate_s"])
    assert row["perf/tokens_per_s"] == pytest.approx(100 / row["time/step_s"])
    assert row["perf/train_tokens_per_s"] == 7.0  # the trainer's own number stands


# ---- console ------------------------------------------------------------------------------------------------------
def test_one_line_a_step_names_what_shows_whether_it_works(tmp_path, capsys):
    tracker = make_tracker(tmp_path)
    with tracker.phase("generate"):
        time.sleep(0.06)
    tracker.log(STEP | {"rollout/num_tokens": 1000.0}, 3)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(
        "step 3/4 | reward 0.500 ±0.250 | kl 0.0123 | length 20.0 | truncated 25% | loss -0.5000 | grad 1.50"
        " | lr 3.0e-05 | 0.1 s ("
    )
    assert "generate 0.1 s (" in line
    assert line.count("tok/s") == 2


def test_logging_steps_thins_the_console_but_not_the_file(tmp_path, capsys):
    tracker = make_tracker(tmp_path, logging_steps=3, steps=5)
    for step in range(1, 6):
        tracker.log(STEP, step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" |")[0] for line in lines] == ["step 3/5", "step 5/5"]  # and the last
    assert [row["step"] for row in metrics_of(tmp_path)] == [1, 2, 3, 4, 5]


def test_bars_do_not_fill_a_log_file(tmp_path):
    """stderr is a file here: short phases leave nothing in it, and step lines stay whole."""
    script = (
        "from spmdrl.tracking import Tracker\nfrom spmdrl.config import TrackingConfig\n"
        f"t = Tracker(TrackingConfig(), save_path={str(tmp_path)!r}, run_config={{}}, is_main=True, total_steps=2)\n"
        "with t.phase('train', 100) as p:\n    [p.update() for _ in range(100)]\n"
        "t.log({'rollout/reward': 1.0}, 1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stderr == ""
    assert done.stdout.startswith("step 1/2 | reward 1.000")


# ---- curves -------------------------------------------------------------------------------------------------------
def test_close_draws_the_curves_and_the_command_compares_runs(tmp_path, capsys):
    for name, gain in (("a", 0.0625), ("b", 0.0)):
        tracker = make_tracker(tmp_path / name, steps=10)
        for step in range(1, 11):
            tracker.log({"rollout/reward": gain * step, "policy/kl": math.nan, "rollout/response_length": 3.0}, step)
        tracker.close()
        assert (tmp_path / name / "metrics.png").read_bytes().startswith(b"\x89PNG")
    capsys.readouterr()
    main([str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(tmp_path / "both.png")])
    out = capsys.readouterr().out
    # steps 1 to 5 of a: mean 3 * 0.0625 = 0.1875; steps 6 to 10: 8 * 0.0625 = 0.5
    assert "10 steps in 0.0 min, reward 0.188 → 0.500 (+0.312)" in out
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_run_ends_well_and_says_so_once(tmp_path, monkeypatch, capsys):
    find_spec = __import__("importlib.util").util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    tracker = make_tracker(tmp_path)
    tracker.log(STEP, 1)
    tracker.close()
    assert capsys.readouterr().out.count("pip install matplotlib") == 1
    assert not (tmp_path / "metrics.png").exists()


def test_comparing_runs_goes_on_without_damaged_lines(tmp_path, capsys):
    """Text in the place of a number, as somebody may have put there, is not drawn either."""
    lines = ['{"step": 1, "rollout/reward": 0.25}', "{", '{"step": 2, "rollout/reward": "high", "policy/kl": "low"}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "rollout/reward": 0.75}', ""]))
    main([str(tmp_path)])
    said = capsys.readouterr().out.splitlines()
    assert said[0] == f"{tmp_path / 'metrics.jsonl'}: 1 damaged line left out"
    assert "2 steps" in said[1]
    assert "reward 0.500" in said[1]
    assert (tmp_path / "metrics.png").stat().st_size > 0


def test_comparing_a_folder_without_metrics_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match=r"has no metrics.jsonl"):
        main([str(tmp_path)])


# ---- TensorBoard --------------------------------------------------------------------------------------------------
def test_tensorboard_events_read_back(tmp_path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = make_tracker(tmp_path / "run", use_tensorboard=str(tmp_path / "tb"), wandb_run_name="mine")
    for step in (1, 2):
        tracker.log({"rollout/reward": 0.25 * step}, step)
    tracker.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tb" / "mine")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("rollout/reward")] == [(1, 0.25), (2, 0.5)]


@pytest.mark.parametrize(
    ("flags", "missing", "complaint"),
    [
        ({"use_wandb": "True"}, "wandb", "--use_wandb: wandb is not installed: pip install wandb"),
        ({"use_tensorboard": "tb"}, "torch.utils.tensorboard", "--use_tensorboard: .* pip install tensorboard"),
    ],
)
def test_a_sink_that_is_not_installed_is_one_line(tmp_path, monkeypatch, flags, missing, complaint):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UserError, match=complaint):
        make_tracker(tmp_path, **flags)


# ---- W&B ----------------------------------------------------------------------------------------------------------
OFFLINE_RUN = """
import sys
from pathlib import Path
from spmdrl.config import TrackingConfig
from spmdrl.tracking import Tracker

folder, value, resume = sys.argv[1], sys.argv[3], int(sys.argv[4]) or None
tracker = Tracker(
    TrackingConfig(use_wandb=value, wandb_project="p", wandb_group="g"),
    save_path=folder, run_config={"seed": 7, "use_wandb": True}, is_main=True, total_steps=4, resume_step=resume,
)
assert sys.argv[3] == value
first = (resume or 0) + 1
for step in (first, first + 1):
    tracker.log({"rollout/reward": 0.25 * step}, step)
    tracker.log({"eval/reward": 0.5}, step)
tracker.close()
"""


def run_offline(folder: Path, value: str, resume: int = 0, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", OFFLINE_RUN, str(folder), "--use_wandb", value, str(resume)]
    keep = {name: text for name, text in os.environ.items() if not name.startswith("WANDB")}
    keep |= {"HOME": str(folder.parent), "WANDB_CONSOLE": "off", "WANDB_X_DISABLE_META": "false", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=keep, cwd=ROOT, timeout=120)


def offline_records(folder: Path) -> list:
    """The one run under `folder` from W&B's log: blocks of 32 KiB, each record with a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    data, at, records, pending = path.read_bytes(), 7, [], b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        pending += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(wandb_internal_pb2.Record.FromString(pending))
            pending = b""
    return records


@pytest.fixture(scope="module")
def offline_run(tmp_path_factory):
    """A run with an API key on its command line, offline by the environment, and the one that resumes it."""
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("home") / "run"
    done = run_offline(folder, SECRET, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    return folder, done


def test_wandb_offline_run_holds_config_and_steps_on_their_own_axes(offline_run):
    folder, _ = offline_run
    records = offline_records(folder)
    (run,) = [r.run for r in records if r.HasField("run")]
    assert (run.project, run.run_group) == ("p", "g")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["seed"], config["use_wandb"]) == (7, True)
    axes = {m.metric.glob_name or m.metric.name: m.metric.step_metric for m in records if m.HasField("metric")}
    assert axes["*"] == "step"
    assert axes["eval/*"] == "eval/step"
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.HasField("history")
    ]
    assert [(h["step"], h["rollout/reward"]) for h in history if "rollout/reward" in h] == [(1, 0.25), (2, 0.5)]
    assert [(h["eval/step"], h["eval/reward"]) for h in history if "eval/reward" in h] == [(1, 0.5), (2, 0.5)]


def test_wandb_key_is_neither_printed_nor_saved(offline_run):
    folder, done = offline_run
    assert SECRET not in done.stdout + done.stderr
    found = [path for path in folder.parent.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]
    assert found == []
    assert not (folder.parent / ".netrc").exists()


@pytest.mark.slow
def test_wandb_offline_by_flag_needs_no_key_and_a_resumed_run_keeps_its_id(tmp_path):
    pytest.importorskip("wandb")
    folder = tmp_path / "run"
    assert run_offline(folder, "offline").returncode == 0
    state = json.loads((folder / "tracking.json").read_text())
    (old,) = folder.glob("wandb/offline-run-*")
    old.rename(tmp_path / "old")
    done = run_offline(folder, "offline", resume=2)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "tracking.json").read_text()) == state
    assert [row["step"] for row in metrics_of(folder) if "rollout/reward" in row] == [1, 2, 3, 4]
    (run,) = [r.run for r in offline_records(folder) if r.HasField("run")]
    assert run.run_id == state["wandb_id"]


@pytest.mark.slow
def test_wandb_without_a_key_online_is_one_line(tmp_path):
    pytest.importorskip("wandb")
    done = run_offline(tmp_path / "run", "True", WANDB_MODE="online")
    assert done.returncode != 0
    assert "UserError: --use_wandb: " in done.stderr.splitlines()[-1]
    assert "offline needs neither key nor network" in done.stderr.splitlines()[-1]
