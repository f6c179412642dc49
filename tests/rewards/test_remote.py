"""Rewards over HTTP, from servers that are slow, down, wrong or restless: a reward is a server's or there is none."""

import datetime
import gzip
import time

import pytest

from spmdrl.config import PPOConfig
from spmdrl.config.parse import read_config
from spmdrl.errors import UserError
from spmdrl.rewards import remote
from spmdrl.rewards.remote import RemoteReward, is_local
from spmdrl.rewards.source import RewardBatch, RewardError
from tests.rewards.servers import RewardServer, first, lengths, make_certificate, nobody, send


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """A hundredth of a second between tries."""
    monkeypatch.setattr(remote, "MAX_WAIT_S", 0.01)


def batch_of(*queries, labels=None, endings=()):
    ids = [f"row {i + 1}, sample 0" for i in range(len(queries))]
    return RewardBatch(queries, ["p"] * len(queries), labels or [None] * len(queries), {}, ids, endings=endings)


THREE = batch_of("pa", "pbc", "pdef")


def ask(*urls, batch=THREE, timeout_s=10.0, batch_size=8):
    return RemoteReward(urls, timeout_s=timeout_s, batch_size=batch_size)(batch)


def refusal(*urls, **options):
    with pytest.raises(RewardError) as error:
        ask(*urls, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# ---- what is sent, and what comes back ------------------------------------------------------------------------------
def test_queries_go_with_the_eos_that_ended_them_and_one_request_has_the_whole_batch():
    with RewardServer(lengths) as server:
        output = ask(server.url, batch=batch_of("pa", "pbc", labels=[{"n": 1}, None], endings=["<e>", ""]))
    assert output.rewards.tolist() == [5, 3]
    assert output.scores is None and output.extra_logs == {}
    assert server.bodies == [{"query": ["pa<e>", "pbc"], "prompts": ["p", "p"], "labels": [{"n": 1}, None]}]


def test_scores_and_logs_come_along_and_other_keys_are_left():
    answer = {"rewards": [1, 2, 3], "scores": [[0], [1], [1]], "extra_logs": {"x": [4, 5, 6]}, "time": "now"}
    with RewardServer(first(answer)) as server:
        output = ask(server.url)
    assert output.scores is not None and output.scores.tolist() == [0, 1, 1]
    assert output.extra_logs["x"].tolist() == [4, 5, 6]


def test_an_answer_may_be_compressed():
    def answer(server, body, handler):
        content = gzip.compress(b'{"rewards": [1, 2, 3]}')
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    with RewardServer(answer) as server:
        assert ask(server.url).rewards.tolist() == [1, 2, 3]


def test_an_answer_may_come_in_chunks():
    def answer(server, body, handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for part in (b'{"rewa', b'rds": [1, ', b"2, 3]}", b""):
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        return None

    with RewardServer(answer) as server:
        assert ask(server.url).rewards.tolist() == [1, 2, 3]


@pytest.mark.parametrize("announced", [True, False])
def test_a_server_may_close_each_connection_after_its_answer(caplog, announced):
    """Which is nothing to be told about where it says so; else a request may meet the end of a connection, and goes
    again."""

    def answer(server, body, handler):
        handler.close_connection = True
        closing = {"Connection": "close"} if announced else {}
        send(handler, 200, '{"rewards": [1]}', **closing)
        return None

    with RewardServer(answer) as server:
        assert ask(server.url, batch=batch_of(*["p"] * 12), batch_size=1).rewards.tolist() == [1] * 12
    assert server.num_requests == 12
    assert caplog.messages == [] or not announced


def test_a_server_may_have_an_address_of_ipv6():
    with RewardServer(lengths, host="::1") as server:
        assert server.url.startswith("http://[::1]:")
        assert ask(server.url).rewards.tolist() == [2, 3, 4]


def test_batches_are_dealt_to_the_servers_in_turn_and_put_together_in_order():
    with RewardServer(lengths) as a, RewardServer(lengths) as b:
        output = ask(a.url, b.url, batch=batch_of("p", "pp", "ppp", "pppp", "ppppp"), batch_size=2)
    assert output.rewards.tolist() == [1, 2, 3, 4, 5]
    assert sorted(len(body["query"]) for body in a.bodies) == [1, 2]
    assert [body["query"] for body in b.bodies] == [["ppp", "pppp"]]


def test_a_server_has_at_most_so_many_requests_at_a_time():
    def slow(server, body, handler):
        time.sleep(0.05)
        return lengths(server, body, handler)

    with RewardServer(slow) as server:
        ask(server.url, batch=batch_of(*["p"] * 12), batch_size=1)
    assert server.num_requests == 12
    assert 1 < server.most_at_a_time <= remote.IN_FLIGHT


def test_no_samples_is_no_request():
    with nobody() as url:
        assert ask(url, batch=batch_of()).rewards.shape == (0,)


def test_a_token_goes_along_and_is_in_no_message(monkeypatch):
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "s3cret")
    with RewardServer(first((401, '{"error": "no"}'))) as server:
        message = refusal(server.url)
        ask(server.url)
    assert [h["Authorization"] for h in server.headers] == ["Bearer s3cret"] * 2
    assert "s3cret" not in message
    assert remote.TOKEN_VARIABLE in message


def test_a_token_that_a_server_sends_back_is_in_no_message(monkeypatch):
    monkeypatch.setenv(remote.TOKEN_VARIABLE, "s3cret")
    with RewardServer(lambda s, b, handler: {"headers": dict(handler.headers)}) as server:
        message = refusal(server.url)
    assert "s3cret" not in message
    assert '"Authorization": "Bearer ***"' in message


@pytest.mark.parametrize("token", ["s3cret\n", " s3cret"])
def test_a_token_from_a_file_has_no_line_break(monkeypatch, token):
    monkeypatch.setenv(remote.TOKEN_VARIABLE, token)
    with RewardServer(lengths) as server:
        ask(server.url)
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


@pytest.mark.parametrize("token", ["s3crét", "s3\ncret"])
def test_a_token_that_no_header_can_hold_is_refused_without_showing_it(monkeypatch, token):
    monkeypatch.setenv(remote.TOKEN_VARIABLE, token)
    with pytest.raises(UserError) as error:
        remote.RemoteReward(["http://127.0.0.1:9/x"], timeout_s=1, batch_size=1)
    assert str(error.value) == f"the token in {remote.TOKEN_VARIABLE} has characters that no HTTP header can hold"


# ---- what passes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_faults_that_pass_are_tried_again(status):
    with RewardServer(first((status, "busy"), (status, "busy"))) as server:
        assert ask(server.url).rewards.tolist() == [2, 3, 4]
    assert server.num_requests == 3


def test_a_connection_that_breaks_is_tried_again():
    def answer(server, body, handler):
        if server.num_requests == 1:
            handler.close_connection = True
            handler.connection.shutdown(2)
            return None
        return lengths(server, body, handler)

    with RewardServer(answer) as server:
        assert ask(server.url).rewards.tolist() == [2, 3, 4]


def test_another_server_is_tried_where_one_is_down():
    with nobody() as down, RewardServer(lengths) as server:
        assert ask(down, server.url, batch_size=1).rewards.tolist() == [2, 3, 4]
    assert server.num_requests == 3


@pytest.mark.parametrize(
    ("value", "wait_s"),
    [
        (None, 0),
        ("7", 7),
        ("Fri, 01 Jan 2100 00:00:00 GMT", datetime.datetime(2100, 1, 1, tzinfo=datetime.UTC).timestamp()),
        ("Wed, 21 Oct 1959 07:28:00 GMT", 0),
        ("soon", 0),
        ("-3", 0),
        ("\u00b2", 0),
    ],
)
def test_seconds_and_dates_are_read_as_waits(monkeypatch, value, wait_s):
    monkeypatch.setattr(remote.time, "time", lambda: 0.0)
    assert remote._retry_after(value) == wait_s


def test_the_wait_that_a_server_asks_for_is_kept():
    def answer(server, body, handler):
        if server.num_requests == 1:
            send(handler, 503, "starting", Retry_After="1")
            return None
        return lengths(server, body, handler)

    start = time.monotonic()
    with RewardServer(answer) as server:
        ask(server.url)
    assert time.monotonic() - start >= 1


# ---- what stays -----------------------------------------------------------------------------------------------------
def test_a_server_that_stays_down_ends_in_an_error():
    with nobody() as url:
        message = refusal(url)
    assert message.startswith(f"reward server {url}: ConnectError (")
    assert message.endswith(f", tried {remote.MAX_TRIES} times")


def test_an_error_of_the_server_is_not_tried_for_ever():
    with RewardServer(lambda *_: (500, "out of memory")) as server:
        message = refusal(server.url)
    assert server.num_requests == remote.MAX_TRIES_500
    assert "HTTP 500 Internal Server Error (out of memory), tried 4 times" in message


@pytest.mark.parametrize("dribbles", [False, True])
def test_a_server_that_hangs_ends_in_time(dribbles):
    """Silent, or with a byte every so often."""

    def hang(server, body, handler):
        if dribbles:
            handler.send_response(200)
            handler.send_header("Content-Length", "1000")
            handler.end_headers()
        for _ in range(60):
            time.sleep(0.05)
            if dribbles:
                handler.wfile.write(b" ")
        return None

    start = time.monotonic()
    with RewardServer(hang) as server:
        message = refusal(server.url, timeout_s=0.4, batch_size=1)
        assert time.monotonic() - start < 2.5
    assert message == f"reward server {server.url}: no answer within --remote_rm_timeout 0.4 s"


def test_a_run_that_is_asked_to_stop_does_not_wait_for_a_server(monkeypatch):
    """Its zeros are dropped at the safe point that follows."""
    from spmdrl.distributed import preemption

    def hang(server, body, handler):
        monkeypatch.setattr(preemption, "requested", lambda: True)
        time.sleep(3)
        return None

    start = time.monotonic()
    with RewardServer(hang) as server:
        assert ask(server.url, timeout_s=60).rewards.tolist() == [0, 0, 0]
        assert time.monotonic() - start < 2.5


def test_tries_end_with_the_time_too():
    start = time.monotonic()
    with RewardServer(lambda s, b, handler: send(handler, 503, "later", Retry_After="30")) as server:
        message = refusal(server.url, timeout_s=5)
    assert time.monotonic() - start < 2
    assert message.endswith("HTTP 503 Service Unavailable (later), tried 1 times, within --remote_rm_timeout 5 s")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ({"rewards": [1.0, 2.0]}, "returned 2 numbers for 3 samples"),
        ({"rewards": 0.5}, "returned 0.5 (float) for 3 samples; return 3 numbers"),
        ({"rewards": [0.5]}, "returned 1 numbers for 3 samples"),
        ({"rewards": [1.0, float("nan"), 2.0]}, "returned nan for row 2, sample 0, not a finite fp32 number"),
        ({"rewards": [1.0, 2.0, float("inf")]}, "returned inf for row 3, sample 0, not a finite fp32 number"),
        ({"rewards": ["1", 2, 3]}, "returned '1' for row 1, sample 0, not a number"),
        ({"rewards": [None, 2, 3]}, "returned None for row 1, sample 0, not a number"),
        ({"rewards": None}, "returned None (NoneType) for 3 samples"),
        ({"reward": [1, 2, 3]}, "answered without 'rewards' ({\"reward\": [1, 2, 3]}); expected"),
        ([1, 2, 3], "answered without 'rewards' ([1, 2, 3]); expected"),
        ({"rewards": [1, 2, 3], "scores": [1]}, "'scores' returned 1 numbers for 3 samples"),
        ({"rewards": [[1, 2], [3, 4], [5, 6]]}, "returned [1, 2] for row 1, sample 0, not a number"),
        ({"rewards": [[[1]], [[2]], [[3]]]}, "returned [1] for row 1, sample 0, not a number"),
        ({"rewards": {"0": 1, "1": 2, "2": 3}}, "(dict) for 3 samples; return 3 numbers"),
        ({"rewards": [1, 2, 10**400]}, "returned 1000"),
        ({"rewards": [1, 2, 1e39]}, "returned 1e+39 for row 3, sample 0, not a finite fp32 number"),
        ((200, '{"rewards": [1, 2, ' + "3" * 5000 + "]}"), "answered no JSON"),
        ((200, "[" * 100_000), "answered no JSON"),
        ({"rewards": [1, 2, 3], "extra_logs": []}, "returned extra_logs of type list, not a dict of numbers"),
        ({"rewards": [1, 2, 3], "extra_logs": {"x": None}}, "extra_logs['x'] returned None (NoneType) for 3 samples"),
        ({"rewards": [1, 2, 3], "extra_logs": {"x": {"y": 1}}}, "extra_logs['x'] returned {'y': 1} (dict) for 3"),
        ({"rewards": [1, 2, 3], "extra_logs": {"x": [1, "2", 3]}}, "extra_logs['x'] returned '2' for row 2"),
        ((413, "too large"), "HTTP 413 Request Entity Too Large (too large); --micro_rollout_batch_size is the most"),
        ((407, ""), "HTTP 407 Proxy Authentication Required; expected"),
        ((204, ""), "HTTP 204 No Content; expected"),
        ((200, "<html>welcome"), "answered no JSON (<html>welcome); expected"),
        ((200, ""), "answered no JSON; expected"),
        ((404, "not here"), "HTTP 404 Not Found (not here); expected"),
        ((400, '{"error": "no query"}'), 'HTTP 400 Bad Request ({"error": "no query"}); expected'),
        ((302, ""), "HTTP 302 Found, to nowhere: give that as --remote_rm_url"),
    ],
)
def test_any_other_answer_is_an_error_at_once(answer, reason):
    with RewardServer(lambda *_: answer) as server:
        message = refusal(server.url)
    assert server.num_requests == 1
    assert message.startswith(f"reward server {server.url}")
    assert reason in message


def test_a_redirect_is_not_followed():
    with RewardServer(lengths) as elsewhere:
        with RewardServer(lambda s, b, handler: send(handler, 307, "", Location=elsewhere.url)) as server:
            assert f"HTTP 307 Temporary Redirect, to {elsewhere.url}: give that" in refusal(server.url)
        with RewardServer(lambda s, b, handler: send(handler, 302, "", Location="/login?token=s3cret")) as server:
            assert "HTTP 302 Found, to /login: give that" in refusal(server.url)
        assert elsewhere.num_requests == 0


def test_an_endless_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 100)
    with RewardServer(lambda *_: (200, " " * 200)) as server:
        assert "answered more than 100 bytes" in refusal(server.url)


def test_an_answer_that_unpacks_to_more_than_it_should_is_cut_off(monkeypatch):
    def answer(server, body, handler):
        content = gzip.compress(bytes(10_000_000))
        handler.send_response(200)
        handler.send_header("Content-Encoding", "gzip")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    monkeypatch.setattr(remote, "MAX_ANSWER_BYTES", 1_000_000)
    with RewardServer(answer) as server:
        assert "answered more than 1000000 bytes" in refusal(server.url)


def test_a_certificate_that_nobody_vouches_for_is_an_error_at_once(tmp_path, monkeypatch):
    """Until the environment names it, also where proxies of the environment are not used."""
    certificate = make_certificate(tmp_path / "reward.pem")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    start = time.monotonic()
    with RewardServer(lengths, certificate=certificate) as server:
        message = refusal(server.url)
        assert message.startswith(f"reward server {server.url}: ")
        assert "certificate verify failed" in message
        assert message.endswith("; SSL_CERT_FILE names a file of certificates to trust")
        assert time.monotonic() - start < 2
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        assert ask(server.url).rewards.tolist() == [2, 3, 4]


def test_https_where_only_http_is_spoken_is_an_error_at_once(caplog):
    with RewardServer(lengths) as server:
        assert "WRONG_VERSION_NUMBER" in refusal(server.url.replace("http:", "https:")).upper().replace(" ", "_")
    assert caplog.messages == []


def test_batches_with_different_logs_are_an_error():
    with RewardServer(first({"rewards": [1], "extra_logs": {"x": [1]}})) as server:
        assert "'extra_logs' of some batches and not of others" in refusal(server.url, batch_size=1)


def test_labels_that_are_no_json_are_an_error():
    with nobody() as url:
        message = refusal(url, batch=batch_of("pa", labels=[datetime.date(2026, 1, 1)]))
    assert message.startswith("--remote_rm_url: labels of row 1, sample 0 to row 1, sample 0 are no JSON: ")


# ---- proxies --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_not_asked_for_a_server_on_this_machine(monkeypatch, name):
    with nobody() as proxy, RewardServer(lengths) as server:
        monkeypatch.setenv(name, proxy.removesuffix("/get_reward"))
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert ask(server.url).rewards.tolist() == [2, 3, 4]


def test_a_proxy_of_the_environment_is_asked_for_a_server_elsewhere(monkeypatch):
    def answer(server, body, handler):
        asked.append((handler.path, handler.headers["Proxy-Authorization"]))
        return lengths(server, body, handler) if len(asked) == 1 else (407, "who are you?")

    asked = []
    monkeypatch.setattr(remote, "is_local", lambda host: False)
    with RewardServer(answer) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url.replace("//", "//me:s3cret@"))
        assert ask("http://rewards.example/get_reward").rewards.tolist() == [2, 3, 4]
        message = refusal("http://rewards.example/get_reward")
    assert asked == [("http://rewards.example/get_reward", "Basic bWU6czNjcmV0")] * 2
    assert "HTTP 407 Proxy Authentication Required (who are you?)" in message
    assert "s3cret" not in message


@pytest.mark.parametrize(
    ("name", "value"),
    [("HTTP_PROXY", "ftp://me:s3cret@proxy:9"), ("ALL_PROXY", "socks9://proxy:9"), ("SSL_CERT_FILE", "/no/file")],
)
def test_a_proxy_or_certificate_that_cannot_be_used_is_one_line(monkeypatch, name, value):
    """Where the environment counts, which is for servers outside private networks."""
    monkeypatch.setattr(remote, "is_local", lambda host: False)
    monkeypatch.setenv(name, value)
    with RewardServer(lengths) as server:
        message = refusal(server.url)
        assert server.num_requests == 0
    assert message.startswith(
        f"reward server {server.url}: cannot be asked with the proxies and certificates that the"
    )
    assert "s3cret" not in message


@pytest.mark.parametrize(
    ("host", "local"),
    [
        *((host, True) for host in ("127.0.0.1", "::1", "localhost", "10.1.2.3", "192.168.0.7", "nobody-knows-me")),
        *((host, False) for host in ("8.8.8.8", "2606:4700::1111")),
    ],
)
def test_hosts_that_are_reached_without_a_proxy(host, local):
    assert is_local(host) == local


# ---- flags ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--remote_rm_url ftp://host/x", "--remote_rm_url ftp://host/x: a reward server is http://host:port/path"),
        ("--remote_rm_url http:///x", "--remote_rm_url http:///x: a reward server is http://host:port/path"),
        *(
            (f"--remote_rm_url {url}", f"--remote_rm_url {url}: a reward server is http://host:port/path")
            for url in ("http://[::1/x", "http://a:99999/x", "http://a:port/x", "http://a:0/x")
        ),
        ("--remote_rm_url http://a/x,reward.py", "either servers or one Python file"),
        ("--remote_rm_timeout 5", "--remote_rm_timeout changes nothing without a server in --remote_rm_url"),
        ("--remote_rm_url http://a/x --remote_rm_timeout 0", "--remote_rm_timeout must be above 0, got 0.0"),
    ],
)
def test_servers_that_cannot_be_meant_are_refused(flags, message):
    with pytest.raises(UserError) as error:
        read_config(PPOConfig, flags.split())
    assert message in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://me:s3cret@host/x",
        "http://s3cret@host/x",
        "http://host/x?n=1&api_key=s3cret",
        "http://host/x?access_TOKEN=s3cret",
        "http://host/x?X-Amz-Signature=s3cret",
    ],
)
def test_a_secret_in_the_address_is_refused_without_showing_it(url):
    with pytest.raises(UserError) as error:
        read_config(PPOConfig, ["--remote_rm_url", url])
    assert "s3cret" not in str(error.value)
    assert remote.TOKEN_VARIABLE in str(error.value)


@pytest.mark.parametrize("url", ["http://me:s3cret@host:99999/x", "ftp://me:s3cret@host/x", "http://me:s3/cret@h/x"])
def test_a_secret_in_what_is_no_address_is_not_shown_either(url):
    with pytest.raises(UserError, match=r"^--remote_rm_url \w+://\*\*\*@h.*: a reward server is http://host:port/"):
        read_config(PPOConfig, ["--remote_rm_url", url])


def test_several_servers_are_one_source():
    config = read_config(PPOConfig, ["--remote_rm_url", "http://a/x, http://b/x", "--reward_weights", "2"])
    assert config.reward.servers == ("http://a/x", "http://b/x")
    assert config.reward.num_sources == 1
    assert read_config(PPOConfig, ["--remote_rm_url", "http://a/x?model=m&n=1"]).reward.num_sources == 1
