"""Reward servers for tests: real sockets on loopback, each request answered as a test says."""

import datetime
import ipaddress
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from spmdrl.launch import free_port

Answer = Callable[["RewardServer", dict[str, Any], BaseHTTPRequestHandler], Any]


class RewardServer:
    """`answer(server, body of the request, handler)` returns what is sent as JSON, (status, text), or None where it
    has used the handler itself."""

    def __init__(self, answer: Answer, *, host: str = "127.0.0.1", certificate: str | Path | None = None):
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_a_time = self._now = 0
        self._lock, self.answer, server = threading.Lock(), answer, self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                server._handle(self)

            def log_message(self, *args: Any) -> None: ...

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def handle_error(self, *args: Any) -> None: ...  # such as clients that do not trust it

        self._http = Server((host, 0), Handler)
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            self._http.socket = context.wrap_socket(self._http.socket, server_side=True)
        scheme, name = "http" if certificate is None else "https", f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{name}:{self._http.server_port}/get_reward"

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


def make_certificate(path: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by nobody else, in one file."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "reward")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    day = datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(*pem) + certificate.public_bytes(serialization.Encoding.PEM))
    return path
