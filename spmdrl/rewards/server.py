"""The server of cli/serve_rm.py: a reward model behind the protocol that rewards/remote.py speaks.

Texts of all requests that wait share forwards, which run one at a time in a thread beside the event loop.
"""

import asyncio
import hmac
import json
import math
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import Tensor

from spmdrl.config.preflight import model_positions
from spmdrl.config.serve import ServeRMConfig
from spmdrl.distributed import comm
from spmdrl.distributed.strategy import compute_dtype
from spmdrl.errors import UserError, first_line
from spmdrl.models.tokenizer import encode_texts, load_tokenizer
from spmdrl.models.value_head import load_reward_model
from spmdrl.rewards.model import score_sequences
from spmdrl.rewards.remote import TOKEN_VARIABLE, bearer_token

MAX_CONNECTIONS = 256  # more are answered by 503, which clients try again
GRACE_S = 30  # for requests under way when the server is told to stop
Encode = Callable[[list[str]], list[Tensor]]  # texts -> token ids, (S,) each
Score = Callable[[Sequence[Tensor]], Tensor]  # token ids -> (B,) fp32 scores


class Batcher:
    """Scores token ids of many callers, up to `batch_size` in one call of `score`, in the order in which they come."""

    def __init__(self, score: Score, batch_size: int):
        self.score, self.batch_size = score, batch_size
        self._waiting: asyncio.Queue[tuple[Tensor, asyncio.Future[float]]] = asyncio.Queue()

    async def scores(self, sequences: Sequence[Tensor]) -> list[float]:
        """One score each, in their order. Raises what `score` raised on the forward that one of them was in."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in sequences]
        for i in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):  # similar lengths share a forward
            self._waiting.put_nowait((sequences[i], futures[i]))
        return list(await asyncio.gather(*futures))

    async def run(self) -> None:
        """Score what waits, for ever."""
        while True:
            batch = [await self._waiting.get()]
            while len(batch) < self.batch_size and not self._waiting.empty():
                batch.append(self._waiting.get_nowait())
            try:
                scores = (await asyncio.to_thread(self.score, [ids for ids, _ in batch])).tolist()
            except Exception as error:  # out of memory, say: the requests in it fail, the server goes on
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), score in zip(batch, scores, strict=True):
                if not future.done():
                    future.set_result(score)


def make_app(
    encode: Encode,
    score: Score,
    *,
    batch_size: int,
    max_len: int | None,
    max_request_bytes: int,
    token: str | None = None,
) -> Starlette:
    """Answers in JSON, errors too, as {"error": "..."}."""
    batcher = Batcher(score, batch_size)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker = asyncio.create_task(batcher.run())
        yield
        worker.cancel()

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def get_reward(request: Request) -> JSONResponse:
        check_token(request, token)
        queries = read_queries(await read_body(request, max_request_bytes))
        sequences = await asyncio.to_thread(encode, queries)
        check_lengths(sequences, max_len)
        rewards = await batcher.scores(sequences)
        if not all(map(math.isfinite, rewards)):
            raise HTTPException(500, "the model's score is not a finite number")
        return JSONResponse({"rewards": rewards})

    return Starlette(
        routes=[Route("/get_reward", get_reward, methods=["POST"]), Route("/health", health)],
        lifespan=lifespan,
        exception_handlers={HTTPException: answer_error, Exception: answer_error},
    )


def answer_error(request: Request, error: Any) -> JSONResponse:
    if isinstance(error, HTTPException):
        return JSONResponse({"error": error.detail}, error.status_code, headers=error.headers)
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)


def check_token(request: Request, token: str | None) -> None:
    given = request.headers.get("Authorization", "").encode()
    if token and not hmac.compare_digest(given, f"Bearer {token}".encode()):
        raise HTTPException(401, "wrong or no bearer token", headers={"WWW-Authenticate": "Bearer"})


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The request's body, of which no more than `max_bytes` is ever held."""
    announced = request.headers.get("Content-Length", "0")
    too_large = HTTPException(413, f"the request is larger than {max_bytes} bytes: send fewer texts at a time")
    if not announced.isdigit() or int(announced) > max_bytes:
        raise too_large
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)


def read_queries(body: bytes) -> list[str]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        raise HTTPException(400, "the request is no JSON") from None
    queries = content.get("query") if isinstance(content, dict) else None
    if isinstance(queries, str):
        queries = [queries]
    if not isinstance(queries, list) or not all(isinstance(query, str) and is_text(query) for query in queries):
        raise HTTPException(400, 'the request must be {"query": [texts]}; prompts and labels are not read')
    return queries


def is_text(query: str) -> bool:
    """Not empty, and no half of a surrogate pair, which JSON can spell and tokenizers refuse."""
    try:
        return bool(query.encode())
    except UnicodeEncodeError:
        return False


def check_lengths(sequences: Sequence[Tensor], max_len: int | None) -> None:
    for i, ids in enumerate(sequences):
        if not len(ids):
            raise HTTPException(400, f"query {i} has no tokens")
        if max_len is not None and len(ids) > max_len:
            raise HTTPException(400, f"query {i} has {len(ids)} tokens, the server takes up to {max_len} (--max_len)")


def load_app(config: ServeRMConfig) -> Starlette:
    """The app of the flags, with the model loaded. Raises UserError."""
    flag, name = "--reward_pretrain", str(config.reward_pretrain)
    tokenizer = load_tokenizer(config.model, flag=flag)
    model = load_reward_model(
        name,
        config.model,
        flag=flag,
        value_head_prefix=config.value_head_prefix,
        dtype=compute_dtype(config.bf16),
    )
    model.requires_grad_(False).eval().to(comm.device())
    mean, std = (0.0, 1.0)
    if config.normalize_reward:
        if model.normalization is None:
            raise UserError(f"--normalize_reward: the config of {flag} {name} has no mean and std: drop it")
        mean, std = model.normalization
    positions = model_positions(model.model.config.get_text_config().to_dict())
    if config.max_len is not None and positions is not None and config.max_len > positions:
        raise UserError(f"--max_len {config.max_len} is more than the {positions} positions of {flag} {name}")

    def encode(texts: list[str]) -> list[Tensor]:
        return [torch.tensor(ids, dtype=torch.int64) for ids in encode_texts(tokenizer, texts)]

    def score(sequences: Sequence[Tensor]) -> Tensor:
        return (score_sequences(model, sequences, micro_batch_size=config.batch_size) - mean) / std

    return make_app(
        encode,
        score,
        batch_size=config.batch_size,
        max_len=config.max_len or positions,
        max_request_bytes=int(config.max_request_mb * 2**20),
        token=bearer_token(),
    )


def serve(config: ServeRMConfig) -> None:
    """Load the model and answer requests until SIGINT or SIGTERM; those that come before it is there wait. Raises
    UserError."""
    listener = listen(config.host, config.port)
    app = load_app(config)
    host, port = listener.getsockname()[:2]
    if bearer_token() is None and not is_loopback(config.host):
        comm.say(f"warning: whoever reaches {host}:{port} can ask; {TOKEN_VARIABLE} would ask them for a token")
    comm.say(f"serving {config.reward_pretrain} at http://{f'[{host}]' if ':' in host else host}:{port}/get_reward")
    settings = uvicorn.Config(
        app, log_level="warning", limit_concurrency=MAX_CONNECTIONS, timeout_graceful_shutdown=GRACE_S
    )
    with suppress(KeyboardInterrupt):
        uvicorn.Server(settings).run(sockets=[listener])


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address; who connects from here on waits to be answered. Raises UserError where it is taken:
    by a socket that listens, since two that are bound can share an address that was in use a moment ago."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(MAX_CONNECTIONS)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"--host {host} --port {port}: cannot listen there: {reason}") from None
    return listener


def is_loopback(host: str) -> bool:
    return host == "localhost" or host.startswith("127.") or host == "::1"
