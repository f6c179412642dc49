"""Real starts under every launcher (U83, U84): whole runs of one step, and meetings where starting is the point."""

import sys

import pytest
import torch

from spmdrl.launch import free_port
from tests.launched import (
    BIN,
    MEET,
    ROOT,
    TRAIN,
    Launched,
    Running,
    assert_trained,
    launch,
    slurm_tasks,
    start,
    start_by_hand,
    tiny_flags,
    torchrun,
    two_nodes,
    why_no_two_nodes,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="tests what is done without a GPU"),
]
DEEPSPEED = [str(BIN / "deepspeed"), "--num_gpus", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("inputs")


def met(run: Launched) -> dict[int, str]:
    """What each rank of the meeting program said: rank → "of 2, local 0, gloo sum 3, at host:port" (U84: gloo)."""
    said = [line.partition("rank ")[2].partition(" ")[::2] for line in run.lines("rank ", ", gloo sum ")]
    return {int(rank): rest for rank, rest in said}


# ---- whole runs -----------------------------------------------------------------------------------------------------
def test_plain_python_is_one_rank(folder, tmp_path):
    flags = tiny_flags(folder, save_path=tmp_path / "out")
    assert_trained(launch([sys.executable, TRAIN, *flags], tmp_path / "log"), tmp_path / "out", ranks=1)


def test_torchrun_trains_under_zero_3_and_compiles_nothing(folder, tmp_path):
    """U84: without a GPU no op is built at start-up. A build takes a minute, and one that dies leaves a lock."""
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    command = torchrun(TRAIN, *tiny_flags(folder, save_path=tmp_path / "out", zero_stage=3))
    run = launch(command, tmp_path / "log", TORCH_EXTENSIONS_DIR=str(extensions))
    assert_trained(run, tmp_path / "out", ranks=2)
    assert list(extensions.iterdir()) == []


def test_the_deepspeed_launcher_starts_two_ranks_and_passes_local_rank(folder, tmp_path):
    run = launch([*DEEPSPEED, TRAIN, *tiny_flags(folder, save_path=tmp_path / "out")], tmp_path / "log")
    assert_trained(run, tmp_path / "out", ranks=2)
    assert run.lines("--local_rank=1")


def test_torchrun_over_two_nodes_by_the_example_script(folder, tmp_path):
    if reason := why_no_two_nodes():
        pytest.skip(reason)
    with two_nodes() as (prefixes, addresses):
        script = str(ROOT / "examples" / "torchrun_two_nodes.sh")
        flags = tiny_flags(folder, save_path=tmp_path / "out", zero_stage=3)
        commands = [[*prefix, "bash", script, str(i), addresses[0], *flags] for i, prefix in enumerate(prefixes)]
        env = {"GLOO_SOCKET_IFNAME": "eth0", "NPROC_PER_NODE": "1"}
        for run in Running(commands, [env, env], tmp_path / "log").wait():
            assert_trained(run, tmp_path / "out", ranks=2)


# ---- meetings -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("launcher", [torchrun(), DEEPSPEED], ids=["torchrun", "deepspeed"])
def test_two_runs_on_one_host_at_the_same_time_meet_on_different_ports(tmp_path, launcher):
    runs = [start([*launcher, MEET], tmp_path / f"log{i}") for i in range(2)]
    ends = [run.wait()[0] for run in runs]
    assert [end.code for end in ends] == [0, 0], ends[0].out + ends[1].out
    said = [met(end) for end in ends]
    for ranks in said:
        assert sorted(ranks) == [0, 1]
        assert ranks[0].replace("local 0", "local 1") == ranks[1]
        assert ranks[1].startswith("of 2, local 1, gloo sum 3, at ")
    assert said[0][0] != said[1][0]


def test_a_port_given_to_the_deepspeed_launcher_is_kept(tmp_path):
    port = free_port()
    run = launch([str(BIN / "deepspeed"), "--master_port", str(port), MEET], tmp_path / "log")
    assert run.code == 0, run.out
    assert met(run) == {0: f"of 1, local 0, gloo sum 1, at 127.0.0.1:{port}"}


def test_two_ranks_with_only_slurms_variables(tmp_path):
    runs = start_by_hand([sys.executable, MEET], slurm_tasks(2, job=free_port()), tmp_path / "log").wait()
    assert [run.code for run in runs] == [0, 0], runs[0].out
    assert met(runs[0])[0].startswith("of 2, local 0, gloo sum 3, at localhost:")
    assert met(runs[0])[1].startswith("of 2, local 1, gloo sum 3, at localhost:")


def test_with_the_variables_of_torchrun_and_of_slurm_torchruns_win(tmp_path):
    """A batch script has a task number of its own; here it would make every process rank 1 of 4."""
    slurm = slurm_tasks(4, job=7)[1]
    port = str(free_port())
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    envs = [{**slurm, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    runs = start_by_hand([sys.executable, MEET], envs, tmp_path / "log").wait()
    assert [run.code for run in runs] == [0, 0], runs[0].out
    assert met(runs[0])[1] == f"of 2, local 1, gloo sum 3, at 127.0.0.1:{port}"


# ---- starts that cannot work ----------------------------------------------------------------------------------------
def test_a_local_rank_that_is_not_the_launchers_is_one_line(tmp_path):
    given = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1234"}
    run = launch([sys.executable, MEET, "--local_rank", "1"], tmp_path / "log", **given)
    assert run.code == 2
    expected = "[rank 0] error: --local_rank 1 contradicts LOCAL_RANK 0 in the environment: "
    assert run.out == f"{expected}leave the flag to the deepspeed launcher\n"


def test_half_of_a_launchers_variables_is_one_line_before_anything_is_loaded(folder, tmp_path):
    run = launch([sys.executable, "-X", "importtime", TRAIN, *tiny_flags(folder)], tmp_path / "log", RANK="1")
    assert run.code == 2
    assert not run.lines("import time:", "| torch")
    line = run.out.splitlines()[-1]
    assert line.startswith("error: RANK is set to 1 in the environment but WORLD_SIZE is not: ")


def test_the_deepspeed_launcher_without_flags_says_what_is_missing(tmp_path):
    run = launch([str(BIN / "deepspeed"), TRAIN], tmp_path / "log")
    assert run.code == 2
    assert len(run.lines("error: --pretrain is missing")) == 1
    assert "Traceback" not in run.out
