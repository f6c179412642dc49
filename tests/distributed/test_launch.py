"""Which rank a process is under each launcher (U83), without starting any."""

import os
import subprocess
import sys

import pytest

from spmdrl.errors import UserError
from spmdrl.launch import first_host, is_slurm_task, launch_environment

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "41234",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "CROSS_RANK": "0",
    "CROSS_SIZE": "1",
    "LOCAL_SIZE": "2",
}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "16",  # of the job; the step has 8
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_JOB_ID": "700",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "gpu[01-04]",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
GIVEN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_without_a_launcher_it_is_one_rank_on_a_port_of_its_own():
    first, second = launch_environment({}), launch_environment({})
    assert {**first, "MASTER_PORT": ""} == dict(zip(GIVEN, ("0", "1", "0", "127.0.0.1", ""), strict=True))
    assert first["MASTER_PORT"] != second["MASTER_PORT"]


@pytest.mark.parametrize("environ", [TORCHRUN, {**DEEPSPEED, "MASTER_PORT": "29501"}])
def test_what_a_launcher_gave_is_kept(environ):
    assert launch_environment(environ) == {name: environ[name] for name in GIVEN}


def test_the_flag_that_the_deepspeed_launcher_passes_is_accepted():
    assert launch_environment(DEEPSPEED, local_rank_flag=1)["LOCAL_RANK"] == "1"
    alone = launch_environment({}, local_rank_flag=0)
    assert (alone["RANK"], alone["LOCAL_RANK"]) == ("0", "0")


@pytest.mark.parametrize("flag", [0, -2, 7])
def test_a_local_rank_that_contradicts_the_launchers_is_refused(flag):
    with pytest.raises(UserError, match=f"--local_rank {flag} contradicts LOCAL_RANK 1 in the environment"):
        launch_environment(TORCHRUN, local_rank_flag=flag)


def test_only_slurms_variables_are_enough():
    # port: 10000 + (700 * 31 + 2) % 20000 = 10000 + 21702 - 20000
    expected = dict(zip(GIVEN, ("5", "8", "1", "gpu03", "11702"), strict=True))
    assert launch_environment(SRUN) == expected


def test_a_few_of_slurms_variables_are_enough_on_one_host():
    env = launch_environment({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"})
    assert env == dict(zip(GIVEN, ("1", "2", "1", "127.0.0.1", "10000"), strict=True))


def test_jobs_and_steps_of_slurm_meet_on_different_ports():
    ids = [{"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)} for job in range(700, 720) for step in range(4)]
    ports = {launch_environment(SRUN | each)["MASTER_PORT"] for each in ids}
    assert len(ports) == len(ids)
    assert all(10000 <= int(port) < 30000 for port in ports)  # the kernel hands out 32768 and up


def test_an_address_and_port_that_a_batch_script_exports_are_kept():
    env = launch_environment({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "12345"})
    assert (env["RANK"], env["MASTER_ADDR"], env["MASTER_PORT"]) == ("5", "10.0.0.1", "12345")


def test_torchrun_inside_a_slurm_job_wins():
    assert launch_environment({**SRUN, **TORCHRUN}) == {name: TORCHRUN[name] for name in GIVEN}


def test_a_batch_script_that_exports_rank_and_world_size_leaves_the_local_rank_to_slurm():
    exported = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "gpu03", "MASTER_PORT": "12345"}
    assert launch_environment({**SRUN, **exported})["LOCAL_RANK"] == "1"
    assert launch_environment(exported)["LOCAL_RANK"] == "5"


@pytest.mark.parametrize(("visible", "local_rank"), [("3", "0"), ("0,1,2,3", "1"), ("", "1")])
def test_a_slurm_task_with_a_gpu_of_its_own_uses_that(visible, local_rank):
    sees = {**SRUN, "CUDA_VISIBLE_DEVICES": visible}
    assert launch_environment(sees)["LOCAL_RANK"] == local_rank
    for exported in ({"RANK": "5", "WORLD_SIZE": "8"}, {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}):
        assert launch_environment({**sees, **exported, "MASTER_PORT": "12345"})["LOCAL_RANK"] == local_rank


def test_the_ranks_of_a_torchrun_in_a_slurm_task_keep_their_local_ranks():
    """The task of a node sees its GPUs, and is number 0 there."""
    ranks = {**SRUN, **TORCHRUN, "SLURM_LOCALID": "0", "CUDA_VISIBLE_DEVICES": "0"}
    assert launch_environment(ranks)["LOCAL_RANK"] == TORCHRUN["LOCAL_RANK"]


def test_python_in_a_batch_script_is_one_rank():
    """A batch script has the number of its first task and of all tasks, but nothing was started by srun."""
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "ENVIRONMENT": "BATCH"}
    assert not is_slurm_task(batch)
    assert launch_environment(batch)["WORLD_SIZE"] == "1"
    assert launch_environment({**batch, "SLURM_STEP_ID": "0"})["WORLD_SIZE"] == "2"


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu7", "gpu7"),
        ("gpu7,gpu8", "gpu7"),
        ("gpu[03-05,9],login", "gpu03"),
        ("gpu[9,11]", "gpu9"),
        ("rack[1-2]node[03,4]-ib,x", "rack1node03-ib"),
        ("10.0.0.4", "10.0.0.4"),
    ],
)
def test_the_first_host_of_a_slurm_node_list(nodes, host):
    assert first_host(nodes) == host


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK is set to 1 in the environment but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set to 2 in the environment but RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but MASTER_PORT is not set"),
        ({**TORCHRUN, "RANK": "4"}, "RANK 4, LOCAL_RANK 1 and WORLD_SIZE 4 do not fit together"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, "do not fit together"),
        ({**TORCHRUN, "WORLD_SIZE": "four"}, "WORLD_SIZE is 'four' in the environment, not a number"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "MASTER_PORT is 99999, not a port"),
        ({**TORCHRUN, "MASTER_PORT": "http"}, "MASTER_PORT is 'http' in the environment, not a number"),
        (
            {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"},
            "SLURM_PROCID is set .* but SLURM_LOCALID is not",
        ),
        ({"SLURM_PROCID": "1", "SLURM_LOCALID": "1"}, "but SLURM_NTASKS is not"),
        ({**SRUN, "SLURM_JOB_ID": "x"}, "SLURM_JOB_ID is 'x'"),
    ],
)
def test_variables_that_contradict_one_another_are_named(environ, message):
    with pytest.raises(UserError, match=message):
        launch_environment(environ)


def test_two_runs_of_deepspeed_on_a_host_do_not_meet_on_its_default_port(tmp_path):
    """All ranks of one launcher agree, also behind a wrapper script; another launcher's have another port."""
    rank, wrapper, launcher = tmp_path / "rank.py", tmp_path / "wrapper.sh", tmp_path / "launcher.py"
    rank.write_text(f"from spmdrl.launch import launch_environment as e\nprint(e({DEEPSPEED})['MASTER_PORT'])")
    wrapper.write_text(f"{sys.executable} {rank}\ntrue\n")
    launcher.write_text(
        f"import subprocess\nsubprocess.run(['{sys.executable}', '{rank}'])\nsubprocess.run(['bash', '{wrapper}'])"
    )
    ports = []
    for _ in range(2):
        command = [sys.executable, str(launcher), "deepspeed.launcher.launch"]
        plain, wrapped = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        assert plain == wrapped
        ports.append(plain)
    assert len({*ports, "29500"}) == 3


def test_deepspeeds_default_port_is_kept_where_its_launcher_is_not_found_or_ranks_are_elsewhere():
    assert launch_environment(DEEPSPEED)["MASTER_PORT"] == "29500"  # this test runs under no launcher
    two_nodes = {**DEEPSPEED, "WORLD_SIZE": "4", "CROSS_SIZE": "2"}
    assert launch_environment(two_nodes)["MASTER_PORT"] == "29500"


def test_reading_the_variables_needs_no_torch():
    code = "import sys; import spmdrl.launch; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert done.stdout.strip() == "False"
