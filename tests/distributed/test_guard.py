"""Invariant 8: one rank fails, however it fails, and all ranks stop within seconds, the reason said once."""

import os
import signal
import sys
import threading
import time

import pytest

from spmdrl.launch import free_port
from tests.guarded import run_guarded, until

LIMIT_S = 15.0  # from the failure to the end of the last rank


# ---- programs: what each rank runs ----------------------------------------------------------------------------------
def warm_up():
    """A collective, so that all ranks are up when the failure comes."""
    from spmdrl.distributed import comm

    comm.barrier()


class Program:
    """`failing` fails as `fail` says in phase `reward`; the others train, in a collective or computing."""

    def __init__(self, folder, fail, others="collective"):
        self.folder, self.fail, self.others = folder, fail, others

    def __call__(self, rank, failing):
        from spmdrl.distributed import comm, guard

        warm_up()
        if failing in (rank, "all"):
            guard.set_phase("reward")
            (self.folder / "failed_at").write_text(str(time.time()))
            self.fail()
        guard.set_phase("train")
        if self.others == "collective":
            comm.barrier()
        else:
            deadline = time.monotonic() + 50
            while time.monotonic() < deadline:
                sum(range(1000))


def raise_value_error():
    raise ValueError("the label\nis 'seven'")


def raise_runtime_error():
    raise RuntimeError("the engine could not reset its prefix cache")


def raise_user_error():
    from spmdrl.errors import UserError

    raise UserError("row 7 of data.jsonl has no key 'label'")


def raise_error_of_user_code():
    from spmdrl.rewards.function import RewardError

    try:
        {}["seven"]
    except KeyError as error:
        raise RewardError("reward function reward_func raised KeyError: 'seven' on row 7, sample 0") from error


def exit_quietly():
    sys.exit(0)


def exit_at_once():
    os._exit(0)


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt_itself():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)


def die_with_a_child_alive():
    if os.fork() == 0:
        time.sleep(20)
        os._exit(0)
    kill_itself()


def finish(rank, failing):
    """All is well; ranks come to the end at different times."""
    warm_up()
    time.sleep(0.3 * rank)


# ---- whole processes ------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_ranks_that_finish_exit_with_0_and_say_nothing(tmp_path):
    ended = run_guarded(tmp_path, finish)
    assert ended.codes == [0, 0, 0]
    assert ended.errors == ["", "", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("failing", "others"), [(0, "collective"), (1, "computing")])
def test_an_error_on_one_rank_ends_all_with_one_traceback(tmp_path, failing, others):
    ended = run_guarded(tmp_path, Program(tmp_path, raise_value_error, others), failing=failing)
    assert ended.codes == [1, 1, 1]
    assert ended.seconds < LIMIT_S
    summary = "failed in reward: ValueError: the label is 'seven'"
    assert "in raise_value_error\n" in ended.errors[failing]
    assert ended.errors[failing].endswith(f"\n[rank {failing}] {summary}\n")
    assert "".join(ended.errors).count("Traceback") == 1
    for rank, error in enumerate(ended.errors):
        assert rank == failing or error == f"[rank {rank}] stopped in train: rank {failing} {summary}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "fail", "others"),
    [
        (0, kill_itself, "computing"),
        (0, exit_at_once, "collective"),
        (1, kill_itself, "collective"),
        (1, exit_at_once, "computing"),
        (1, die_with_a_child_alive, "computing"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_rank_that_ends_without_a_word_ends_all(tmp_path, failing, fail, others):
    ended = run_guarded(tmp_path, Program(tmp_path, fail, others), failing=failing)
    assert ended.codes[failing] == (0 if fail is exit_at_once else -9)
    assert sorted(ended.codes) == sorted([ended.codes[failing], 1, 1])
    assert ended.seconds < LIMIT_S
    for rank, error in enumerate(ended.errors):
        said = (
            f"[rank {rank}] stopped in train: rank {failing} ended without a word in reward: killed, or out of memory?"
        )
        assert error == ("" if rank == failing else said + "\n")


@pytest.mark.slow
def test_sys_exit_with_0_is_no_success_of_the_others(tmp_path):
    ended = run_guarded(tmp_path, Program(tmp_path, exit_quietly))
    assert ended.codes == [1, 1, 1]
    assert ended.errors[1] == "[rank 1] failed in reward: sys.exit(0) before the end of the run\n"


@pytest.mark.slow
@pytest.mark.parametrize("failing", [1, "all"])
def test_an_error_of_the_user_is_one_line_of_each_rank_and_exits_with_2(tmp_path, failing):
    ended = run_guarded(tmp_path, Program(tmp_path, raise_user_error), failing=failing)
    assert ended.codes == [2, 2, 2]
    problem = "row 7 of data.jsonl has no key 'label'"
    for rank, error in enumerate(ended.errors):
        own = f"[rank {rank}] error: {problem}\n"
        assert error == (own if failing in (rank, "all") else f"[rank {rank}] stopped in train: {told(problem)}\n")


def told(problem):
    return f"rank 1 failed in reward: {problem}"


@pytest.mark.slow
@pytest.mark.parametrize(("fail", "code"), [(raise_error_of_user_code, 2), (raise_runtime_error, 1)], ids=[2, 1])
def test_the_same_error_on_all_ranks_has_its_traceback_once(tmp_path, fail, code):
    ended = run_guarded(tmp_path, Program(tmp_path, fail), failing="all")
    assert ended.codes == [code] * 3
    assert ended.seconds < LIMIT_S
    assert "".join(ended.errors).count("Traceback") == 1
    for error in ended.errors:
        assert error.splitlines()[-1].count("raised KeyError: 'seven' on row 7" if code == 2 else "prefix cache") == 1


@pytest.mark.slow
def test_an_interrupted_rank_ends_all(tmp_path):
    ended = run_guarded(tmp_path, Program(tmp_path, interrupt_itself))
    assert ended.codes == [130, 130, 130]
    assert ended.errors[1] == "[rank 1] stopped by SIGINT in reward\n"
    assert ended.errors[0] == "[rank 0] stopped in train: rank 1 stopped by SIGINT in reward\n"


@pytest.mark.slow
def test_one_rank_alone_needs_no_launcher_and_no_peers(tmp_path):
    ended = run_guarded(tmp_path, Program(tmp_path, raise_value_error), failing=0, world_size=1)
    assert ended.codes == [1]
    assert ended.errors[0].endswith("\nfailed in reward: ValueError: the label is 'seven'\n")


# ---- the meeting ----------------------------------------------------------------------------------------------------
def meet_with(monkeypatch, **environ):
    from datetime import timedelta

    from spmdrl.distributed import comm

    monkeypatch.setattr(comm, "MEETING_TIMEOUT", timedelta(seconds=2))
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return comm.meet()


def test_a_rank_that_waits_for_one_that_never_comes_says_where_and_for_how_long(monkeypatch):
    from spmdrl.errors import UserError

    port = str(free_port())
    with pytest.raises(UserError, match=rf"the 2 ranks .* did not meet at .*127.0.0.1:{port} within 2 s"):
        meet_with(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def test_a_port_that_is_taken_is_named(monkeypatch):
    import socket

    from spmdrl.errors import UserError

    with socket.create_server(("", 0)) as other:
        port = str(other.getsockname()[1])
        with pytest.raises(UserError, match=f":{port} is taken by another program"):
            meet_with(monkeypatch, RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)


def connected(monkeypatch, world_size, stranger=None):
    """Peers of all ranks in this process, and the failures that each was told."""
    import torch.distributed as dist

    from spmdrl.distributed.peers import ADDRESS_KEY, Peers

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    store, told = dist.HashStore(), [[] for _ in range(world_size)]
    peers = [Peers(rank, world_size, told[rank].append) for rank in range(world_size)]
    threads = [threading.Thread(target=p.connect, args=(store, 5.0)) for p in peers]
    threads[0].start()
    if stranger is not None:
        import json

        stranger(json.loads(store.get(ADDRESS_KEY))["port"])
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    return peers, told


def test_only_one_of_several_failures_is_the_first_and_all_others_hear_of_it(monkeypatch):
    peers, told = connected(monkeypatch, 4)
    assert [peers[rank].fail(f"failed {rank}", code=1) for rank in (2, 0, 3)] == [True, False, False]
    until(lambda: all(told[rank] for rank in (0, 1, 3)))
    assert {failure.text for failures in told for failure in failures} == {"failed 2"}
    assert not told[2]


def test_a_stranger_on_the_port_is_turned_away(monkeypatch):
    import socket

    def knock(port):
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"token": "?", "rank": 1}\n', b""):
            with socket.create_connection(("127.0.0.1", port)) as link:
                link.sendall(words)

    peers, told = connected(monkeypatch, 2, stranger=knock)
    peers[1].tell_phase("generate")
    until(lambda: peers[0].phases[1] == "generate")
    assert told == [[], []]


def test_ranks_that_left_are_not_missed(monkeypatch):
    peers, told = connected(monkeypatch, 3)
    leaving = [threading.Thread(target=p.leave) for p in peers]
    for thread in leaving:
        thread.start()
    for thread in leaving:
        thread.join(5)
        assert not thread.is_alive()
    peers[1]._links[0].shutdown(2)
    time.sleep(0.1)
    assert told == [[], [], []]


def test_missing_ranks_are_named(monkeypatch):
    import torch.distributed as dist

    from spmdrl.distributed.peers import Peers
    from spmdrl.errors import UserError

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(UserError, match=r"of 3 ranks \(WORLD_SIZE\) these did not come: \[1, 2\]"):
        Peers(0, 3, print).connect(dist.HashStore(), timeout_s=0.2)
