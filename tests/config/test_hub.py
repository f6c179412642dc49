"""Names of the hub are answered within seconds where it cannot be reached, and left to its libraries where it can."""

import os
import socket
import threading
import time

import pytest

from spmdrl.config import hub
from spmdrl.config.preflight import check_models, check_sources
from spmdrl.errors import UserError

PROXIES = [name for word in ("http", "https", "all", "no") for name in (f"{word}_proxy", f"{word.upper()}_PROXY")]
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


@pytest.fixture(autouse=True)
def alone(tmp_path, monkeypatch):
    """An empty cache, no proxy, and a machine that asks the hub; what a check sets is taken back."""
    for name in (*PROXIES, *OFFLINE, "HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "RANK"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "RETRY_S", 0.0)
    hub.unreachable.cache_clear()
    yield
    hub.unreachable.cache_clear()


@pytest.fixture
def listening():
    """The port of something that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed():
    """A port that refuses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return port


def at(port):
    return f"http://127.0.0.1:{port}"


def test_a_hub_that_is_there_is_left_to_the_libraries(listening, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", at(listening))
    check_models({"pretrain": "owner/name"})
    check_sources({"dataset": "owner/rows@main"})
    assert "HF_HUB_OFFLINE" not in os.environ


def test_what_is_nowhere_is_one_line(closed, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", at(closed))
    with pytest.raises(UserError) as error:
        check_models({"pretrain": "owner/name"})
    assert str(error.value) == (
        f"--pretrain owner/name: no such directory here, and {at(closed)} cannot be reached (Connection refused) "
        "to fetch it from there"
    )
    with pytest.raises(UserError, match=r"--dataset owner/rows: no such file or directory here, and http"):
        check_sources({"dataset": "owner/rows@main"})


def test_what_is_in_the_cache_is_taken_from_there_without_asking_again(tmp_path, closed, monkeypatch, capsys):
    monkeypatch.setenv("HF_ENDPOINT", at(closed))
    repository = tmp_path / "cache" / "hub" / "models--owner--name"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "snapshots" / "abc" / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    (tmp_path / "cache" / "datasets" / "owner___rows").mkdir(parents=True)
    check_sources({"dataset": "Owner/Rows"})
    assert os.environ.pop("HF_HUB_OFFLINE") == "1"
    check_models({"pretrain": "owner/name"})
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    assert "--pretrain owner/name is taken from the cache: http" in capsys.readouterr().out


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_offline_nothing_is_asked(closed, monkeypatch, variable):
    monkeypatch.setenv("HF_ENDPOINT", at(closed))
    monkeypatch.setenv(variable, "1")
    check_models({"pretrain": "owner/name"})
    check_sources({"dataset": "owner/rows"})
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "0")
    with pytest.raises(UserError, match="--dataset owner/rows"):
        check_sources({"dataset": "owner/rows"})


def test_the_way_leads_over_a_proxy_where_there_is_one(listening, closed, monkeypatch):
    endpoint = "https://hub.invalid"
    monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{listening}")
    assert hub.unreachable(endpoint) is None
    monkeypatch.setenv("HTTPS_PROXY", at(closed))
    hub.unreachable.cache_clear()
    assert hub.unreachable(endpoint) == (f"the proxy 127.0.0.1 to {endpoint} cannot be reached (Connection refused)")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert hub.unreachable(f"https://127.0.0.1:{listening}") is None


def test_a_network_that_does_not_answer_is_not_waited_for_long(monkeypatch):
    monkeypatch.setattr(hub, "PATIENCE_S", 0.3)
    silent = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: silent.wait(20) and [])
    start = time.monotonic()
    assert hub.unreachable("https://hub.invalid") == "https://hub.invalid cannot be reached (no answer in 0.3 s)"
    assert time.monotonic() - start < 5
    silent.set()


def test_a_network_that_comes_back_in_time_is_used(listening, monkeypatch):
    monkeypatch.setattr(hub, "RETRY_S", 3.0)
    own, calls = socket.getaddrinfo, []

    def flaky(*args, **options):
        calls.append(args[1])
        if calls == [listening]:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return own(*args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", flaky)
    assert hub.unreachable(at(listening)) is None
    assert calls.count(listening) == 2
