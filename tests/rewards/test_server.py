"""The reward server: what it takes and refuses, how requests share forwards, and that it scores like the model."""

import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import torch
import uvicorn

from spmdrl.config.parse import read_config
from spmdrl.config.serve import ServeRMConfig
from spmdrl.errors import UserError
from spmdrl.rewards import server
from spmdrl.rewards.remote import TOKEN_VARIABLE, RemoteReward
from spmdrl.rewards.server import listen, load_app, make_app
from spmdrl.rewards.source import RewardBatch, RewardError
from tests.rewards.reward_models import make_reward_model, plain_scores
from tests.trainer.runs import FakeEngine, canned, completion, run, write_inputs

ROOT = Path(__file__).parents[2]


@contextmanager
def serving(app, listener=None):
    """The address of the app, on a real socket."""
    listener = listener or listen("127.0.0.1", 0)
    own = uvicorn.Server(uvicorn.Config(app, log_level="critical"))
    thread = threading.Thread(target=own.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not own.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        own.should_exit = True
        thread.join(timeout=10)


def bytes_of(texts):
    return [torch.tensor(list(text.encode()), dtype=torch.int64) for text in texts]


def mean_byte(sequences):
    return torch.stack([ids.float().mean() for ids in sequences])


def app(score=mean_byte, **options):
    return make_app(bytes_of, score, **{"batch_size": 4, "max_len": 10, "max_request_bytes": 10_000, **options})


def post(url, **kwargs):
    return httpx2.post(f"{url}/get_reward", trust_env=False, **kwargs)


# ---- answers --------------------------------------------------------------------------------------------------------
def test_scores_come_in_the_order_of_the_texts():
    """A is 65, a is 97; the batch is sorted by length before it is scored."""
    with serving(app()) as url:
        answer = post(url, json={"query": ["aaaa", "A", "aA"], "prompts": ["", "", ""], "labels": [1, 2, 3]})
        assert answer.status_code == 200
        assert answer.json() == {"rewards": [97.0, 65.0, 81.0]}
        assert post(url, json={"query": "a"}).json() == {"rewards": [97.0]}
        assert post(url, json={"query": []}).json() == {"rewards": []}
        assert httpx2.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}


def test_requests_that_wait_share_forwards():
    """The first forward holds the others up; then they go four at a time, each client getting its own scores."""
    calls = []

    def score(sequences):
        calls.append(len(sequences))
        time.sleep(0.2)
        return mean_byte(sequences)

    texts = ["A", "B", "C", "D", "E", "F", "G", "H", "I"]
    with serving(app(score)) as url, ThreadPoolExecutor(len(texts)) as pool:
        answers = list(pool.map(lambda text: post(url, json={"query": [text, text]}).json()["rewards"], texts))
    assert answers == [[float(ord(text))] * 2 for text in texts]
    assert sum(calls) == 18
    assert max(calls) <= 4
    assert len(calls) <= 7


@pytest.mark.parametrize(
    ("request_body", "status", "reason"),
    [
        ({"json": {"query": ["a" * 11]}}, 400, "query 0 has 11 tokens, the server takes up to 10 (--max_len)"),
        ({"json": {"query": ["a", 5]}}, 400, 'the request must be {"query": [texts]}'),
        ({"json": {"query": ["a", ""]}}, 400, 'the request must be {"query": [texts]}'),
        ({"json": {"queries": ["a"]}}, 400, 'the request must be {"query": [texts]}'),
        ({"json": ["a"]}, 400, 'the request must be {"query": [texts]}'),
        ({"content": b'{"query": ["\\ud800"]}'}, 400, 'the request must be {"query": [texts]}'),
        ({"content": b"query=a"}, 400, "the request is no JSON"),
        ({"content": b"[" * 5000}, 400, "the request is no JSON"),
        ({"content": b"x" * 10_001}, 413, "the request is larger than 10000 bytes: send fewer texts at a time"),
    ],
)
def test_wrong_requests_are_told_why(request_body, status, reason):
    with serving(app()) as url:
        answer = post(url, **request_body)
        assert answer.status_code == status
        assert answer.json()["error"].startswith(reason)


def test_a_body_of_unknown_length_is_measured_as_it_comes():
    with serving(app()) as url:
        answer = post(url, content=(b" " * 1000 for _ in range(20)))
        assert answer.status_code == 413
        assert post(url, content=(b'{"query": ', b'["a"]}')).json() == {"rewards": [97.0]}


def test_paths_and_methods_that_do_not_exist_are_errors_in_json():
    with serving(app()) as url:
        for answer, status in ((post(url + "/no", json={}), 404), (httpx2.get(f"{url}/get_reward"), 405)):
            assert answer.status_code == status
            assert "error" in answer.json()


def test_a_token_is_asked_for():
    with serving(app(token="s3cret")) as url:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
            answer = post(url, json={"query": ["a"]}, headers=headers)
            assert answer.status_code == 401
            assert answer.json() == {"error": "wrong or no bearer token"}
        answer = post(url, json={"query": ["a"]}, headers={"Authorization": "Bearer s3cret"})
        assert answer.json() == {"rewards": [97.0]}
        assert httpx2.get(f"{url}/health", trust_env=False).status_code == 200


def test_the_server_reads_the_token_as_its_clients_do(reward_model, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret\n")
    with serving(load_app(config_of("--reward_pretrain", reward_model))) as url:
        assert post(url, json={"query": ["a"]}).status_code == 401
        assert post(url, json={"query": ["a"]}, headers={"Authorization": "Bearer s3cret"}).status_code == 200


def test_a_forward_that_fails_is_an_error_of_its_requests_alone():
    def score(sequences):
        if any(0x58 in ids.tolist() for ids in sequences):  # X
            raise RuntimeError("out of memory")
        return mean_byte(sequences)

    with serving(app(score)) as url:
        answer = post(url, json={"query": ["X"]})
        assert answer.status_code == 500
        assert answer.json() == {"error": "RuntimeError: out of memory"}
        assert post(url, json={"query": ["a"]}).json() == {"rewards": [97.0]}


def test_a_score_that_is_no_number_is_an_error():
    with serving(app(lambda sequences: torch.full((len(sequences),), float("nan")))) as url:
        answer = post(url, json={"query": ["a"]})
        assert answer.status_code == 500
        assert answer.json() == {"error": "the model's score is not a finite number"}


# ---- a model --------------------------------------------------------------------------------------------------------
TEXTS = ["What is 1 plus 2?3<|im_end|>", "Hello", "What is 1 plus 2?4<|im_end|>" * 3]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return make_reward_model(tmp_path_factory.mktemp("rm") / "model", mean=0.5, std=2.0)


def config_of(*words):
    return read_config(ServeRMConfig, ["--no_bf16", *words])


def expected(reward_model):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    return plain_scores(reward_model, tokenizer(TEXTS)["input_ids"])


def test_served_scores_are_those_of_transformers(reward_model):
    scores = expected(reward_model)
    assert len({round(score, 2) for score in scores}) == 3
    with serving(load_app(config_of("--reward_pretrain", reward_model))) as url:
        assert post(url, json={"query": TEXTS}).json()["rewards"] == pytest.approx(scores, abs=1e-5)
        message = post(url, json={"query": ["a" * 600]}).json()["error"]
        assert message == "query 0 has 600 tokens, the server takes up to 512 (--max_len)"
    normalised = load_app(config_of("--reward_pretrain", reward_model, "--normalize_reward", "--batch_size", "1"))
    with serving(normalised) as url:
        assert post(url, json={"query": TEXTS}).json()["rewards"] == pytest.approx(
            [(score - 0.5) / 2 for score in scores], abs=1e-5
        )


def test_models_that_cannot_be_served_as_asked_are_refused(tmp_path, reward_model):
    plain = make_reward_model(tmp_path / "plain")
    with pytest.raises(UserError, match=r"--normalize_reward: the config of --reward_pretrain .* has no mean and std"):
        load_app(config_of("--reward_pretrain", plain, "--normalize_reward"))
    with pytest.raises(UserError, match="--max_len 513 is more than the 512 positions of --reward_pretrain"):
        load_app(config_of("--reward_pretrain", plain, "--max_len", "513"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "--reward_pretrain is missing: "),
        (("--reward_pretrain", "./no"), "--reward_pretrain ./no: no such directory"),
        (("--reward_pretrain", "a/b", "--port", "70000"), "--port must be from 0 (any that is free) to 65535, got"),
        (("--reward_pretrain", "a/b", "--batch_size", "0"), "--batch_size must be at least 1, got 0"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(words, message):
    with pytest.raises(UserError) as error:
        read_config(ServeRMConfig, list(words)).validate(1)
    assert str(error.value).startswith(message)


def test_a_port_is_taken_before_the_model_is_loaded(monkeypatch):
    """So that of two servers that start at once one says that it cannot, and loads nothing."""
    monkeypatch.setattr(server, "load_app", lambda config: pytest.fail("loads a model"))
    with listen("127.0.0.1", 0) as taken:  # the other one has come this far
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"--host 127.0.0.1 --port {port}: cannot listen there: Address already"):
            server.serve(config_of("--reward_pretrain", "a/b", "--port", str(port)))


def test_who_connects_while_the_model_loads_is_answered_afterwards():
    with listen("127.0.0.1", 0) as listener, ThreadPoolExecutor(1) as pool:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        waiting = pool.submit(post, url, json={"query": ["a"]}, timeout=30)
        time.sleep(0.1)
        assert not waiting.done()
        with serving(app(), listener):
            assert waiting.result(30).json() == {"rewards": [97.0]}


@pytest.mark.parametrize("host", ["a" * 70, "203.0.113.1"])
def test_an_address_that_is_not_this_machines_is_one_line(host):
    with pytest.raises(UserError, match=f"^--host {host} --port 0: cannot listen there: .+$") as error:
        listen(host, 0)
    assert "\n" not in str(error.value)


def train_against(url, folder, reward_model):
    """A run's rewards are the model's scores of the texts, EOS included where it was sampled."""
    from transformers import AutoTokenizer

    answers = completion([73, 74, 2]), completion([75, 76, 77], "length")
    inputs = write_inputs(folder / "inputs") | {"remote_rm_url": url}
    result = run(folder / "out", FakeEngine(canned(*answers)), **inputs, ckpt_path=folder / "ckpt")
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    samples = [s for step in result.samples for s in step]
    texts = [tokenizer.decode(s.sequence) for s in samples]
    assert sum(text.endswith("<|im_end|>") for text in texts) == len(texts) / 2 == 8
    expected = plain_scores(reward_model, tokenizer(texts)["input_ids"])
    assert [s.rewards for s in samples] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_the_command_serves_until_it_is_told_to_stop(reward_model, tmp_path, monkeypatch, one_rank):
    """Started as users do, asked by several requests at a time of the trainer's own client, with and without token."""
    monkeypatch.setenv(TOKEN_VARIABLE, "s3cret")
    command = [sys.executable, str(ROOT / "cli" / "serve_rm.py"), "--reward_pretrain", reward_model, "--no_bf16"]
    process = subprocess.Popen(
        [*command, "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        url = next(line.split(" at ")[1].strip() for line in lines if line.startswith("serving "))
        batch = RewardBatch(TEXTS * 4, [""] * 12, [None] * 12, {}, [f"row {i}" for i in range(12)])
        ask = RemoteReward([url], timeout_s=60, batch_size=2)
        assert ask(batch).rewards.tolist() == pytest.approx(expected(reward_model) * 4, abs=1e-5)
        train_against(url, tmp_path, reward_model)
        monkeypatch.delenv(TOKEN_VARIABLE)
        with pytest.raises(RewardError, match="HTTP 401 Unauthorized"):
            RemoteReward([url], timeout_s=60, batch_size=2)(batch)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in process.stdout.read()
    finally:
        process.kill()
        process.wait()
