"""Models and data sets that are only on the Hugging Face hub: whether it can be reached is asked once, in seconds.

Its libraries would try each file for half a minute. Where it cannot be reached, they are told to use their cache.
"""

import functools
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

from spmdrl.errors import UserError

ENDPOINT = "https://huggingface.co"
RETRY_S = 3.0  # for a network that refuses at once
PATIENCE_S = 15.0  # for one that does not answer: a name server that is down takes 5 to 10 s
PORTS = {"http": 80, "https": 443, "socks5": 1080, "socks5h": 1080}
TRUE = {"1", "ON", "YES", "TRUE"}


def check_model(flag: str, name: str) -> None:
    """Raise UserError for a hub name that is not in the cache while the hub cannot be reached."""
    if not _is_set("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        _check(flag, name, "directory", is_cached=model_folder(name) is not None)


def check_dataset(flag: str, name: str) -> None:
    """The same for a data set."""
    own = "HF_DATASETS_OFFLINE" in os.environ
    if not _is_set(*(("HF_DATASETS_OFFLINE",) if own else ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))):
        prepared = Path(os.environ.get("HF_DATASETS_CACHE", _home() / "datasets")) / name.replace("/", "___").lower()
        is_cached = os.path.isdir(prepared) or os.path.isdir(_repository("datasets", name))
        _check(flag, name, "file or directory", is_cached=is_cached)


def model_folder(name: str) -> Path | None:
    """Where the cache has the files of a model; None where it has no config.json of it."""
    repository = _repository("models", name)
    main = repository / "refs" / "main"
    folder = repository / "snapshots" / (main.read_text().strip() if os.path.isfile(main) else "none")
    return folder if os.path.isfile(folder / "config.json") else None


def folder_of(name: str) -> Path | None:
    """Where the files of a model are, on this machine or in the cache; None where neither has a config.json of it."""
    return Path(name) if os.path.isfile(Path(name) / "config.json") else model_folder(name)


def _check(flag: str, name: str, kind: str, *, is_cached: bool) -> None:
    problem = unreachable(os.environ.get("HF_ENDPOINT") or ENDPOINT)
    if problem is None:
        return
    if not is_cached:
        raise UserError(f"--{flag} {name}: no such {kind} here, and {problem} to fetch it from there")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if (os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0") == "0":
        sys.stdout.write(f"--{flag} {name} is taken from the cache: {problem}\n")


@functools.cache
def unreachable(endpoint: str) -> str | None:
    """Why no connection to `endpoint`, or to the proxy that leads there, could be made; None where one could."""
    try:
        host, port, shown = _next_hop(endpoint)
    except ValueError:  # a library will say what is wrong with the URL
        return None
    answer: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=lambda: answer.put(_connect(host, port)), daemon=True, name="hub").start()
    try:
        reason = answer.get(timeout=PATIENCE_S)
    except queue.Empty:
        reason = f"no answer in {PATIENCE_S:g} s"
    return None if reason is None else f"{shown} cannot be reached ({reason})"


def _next_hop(endpoint: str) -> tuple[str, int, str]:
    """Host, port and what to call them. Raises ValueError for what is no URL of a host."""
    import urllib.request  # here, since few runs need it

    target, proxies = urlsplit(endpoint), urllib.request.getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if proxy and not urllib.request.proxy_bypass(target.hostname or ""):
        target = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        shown = f"the proxy {target.hostname} to {endpoint}"
    else:
        shown = endpoint
    port = target.port or PORTS.get(target.scheme)
    if not target.hostname or not port:
        raise ValueError(endpoint)
    return target.hostname, port, shown


def _connect(host: str, port: int) -> str | None:
    """What is wrong, None where a connection can be made."""
    start = time.monotonic()
    while True:
        try:
            socket.create_connection((host, port), timeout=PATIENCE_S).close()
            return None
        except OSError as error:
            if time.monotonic() - start > RETRY_S:
                return error.strerror or str(error)
        time.sleep(1)


def _home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("HF_HOME") or Path(cache, "huggingface")).expanduser()


def _repository(kind: str, name: str) -> Path:
    return Path(os.environ.get("HF_HUB_CACHE", _home() / "hub")) / f"{kind}--{name.replace('/', '--')}"


def _is_set(*variables: str) -> bool:
    return any(os.environ.get(name, "").upper() in TRUE for name in variables)
