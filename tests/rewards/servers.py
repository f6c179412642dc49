"""Reward servers for tests: real sockets on loopback, each request answered as a test says."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from spmdrl.launch import free_port

Answer = Callable[["RewardServer", dict[str, Any], BaseHTTPRequestHandler], Any]


class RewardServer:
    """`answer(server, body of the request, handler)` returns what is sent as JSON, (status, text), or None where it
    has used the handler itself."""

    def __init__(self, answer: Answer):
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_a_time = self._now = 0
        self._lock, self.answer, server = threading.Lock(), answer, self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._handle(self)

            def log_message(self, *args: Any) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}/get_reward"

    @property
    def num_requests(self) -> int:
        return len(self.bodies)

    def _handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.bodies.append(body)
            self.headers.append(dict(handler.headers))
            self._now += 1
            self.most_at_a_time = max(self.most_at_a_time, self._now)
        try:
            answer = self.answer(self, body, handler)
            if answer is not None:
                status, text = answer if isinstance(answer, tuple) else (200, json.dumps(answer))
                send(handler, status, text)
        finally:
            with self._lock:
                self._now -= 1

    def __enter__(self) -> "RewardServer":
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._http.shutdown()
        self._http.server_close()


def send(handler: BaseHTTPRequestHandler, status: int, text: str, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(text.encode())), **headers}.items():
        handler.send_header(name.replace("_", "-"), value)
    handler.end_headers()
    handler.wfile.write(text.encode())


def lengths(server: RewardServer, body: dict[str, Any], handler: BaseHTTPRequestHandler) -> dict[str, Any]:
    """The length of each query as its reward."""
    return {"rewards": [len(query) for query in body["query"]]}


def first(*answers: Any) -> Answer:
    """These answers to the first requests, then lengths."""

    def answer(server: RewardServer, body: dict[str, Any], handler: BaseHTTPRequestHandler) -> Any:
        number = server.num_requests - 1
        return answers[number] if number < len(answers) else lengths(server, body, handler)

    return answer


@contextmanager
def nobody() -> Iterator[str]:
    """The URL of a server that is down."""
    yield f"http://127.0.0.1:{free_port()}/get_reward"
