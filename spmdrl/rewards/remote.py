"""Rewards from servers that speak OpenRLHF's protocol, which cli/serve_rm.py speaks too.

One POST for each batch of samples:

    {"query": [texts], "prompts": [texts], "labels": [values]}  ->  {"rewards": [numbers]}

and optionally "scores" (what dynamic filtering goes by) and "extra_logs" (name -> numbers) in the answer. A query is
prompt + response, with the EOS that ended it. Faults that pass are tried again, with growing waits, until
--remote_rm_timeout; any other answer than one finite number a query ends the run. No reward is ever made up.
"""

import asyncio
import ipaddress
import json
import logging
import os
import random
import socket
import ssl
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import torch

from spmdrl.distributed import preemption, whereabouts
from spmdrl.errors import UserError, first_line
from spmdrl.rewards.function import read_output
from spmdrl.rewards.source import NOTHING, RewardBatch, RewardError, RewardOutput

logger = logging.getLogger(__name__)
TOKEN_VARIABLE = "SPMDRL_RM_TOKEN"  # a bearer token for the servers; the environment is in no log
IN_FLIGHT = 4  # requests to one server at a time, of each rank
CONNECT_S = 10.0
MAX_TRIES = 8  # with their waits about a minute, besides the time of the tries
MAX_WAIT_S = 15.0
MAX_ANSWER_BYTES = 2**26
POLL_S = 0.2  # for a request to stop
TRANSIENT = {408, 429, 502, 503, 504}  # busy, or behind a gateway that finds nobody yet
SOMETIMES_TRANSIENT, MAX_TRIES_500 = 500, 4
EXPECTED = 'expected {"rewards": [one number a query]}'


class RemoteReward:
    """The reward servers `urls`, among which batches are dealt; the first one goes to number `first`.

    timeout_s: for all samples of a call.
    """

    normalizes = False

    def __init__(self, urls: Sequence[str], *, timeout_s: float, batch_size: int, first: int = 0):
        self.urls, self.timeout_s, self.batch_size, self.first = list(urls), timeout_s, batch_size, first
        token = bearer_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._uses_proxies = {url: not is_local(urlsplit(url).hostname or "") for url in self.urls}

    def check_columns(self, available: Sequence[str]) -> None:
        """A server sees no columns."""

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """Rewards of B samples, or where the run is asked to stop zeros, which the safe point that follows drops.
        Raises RewardError."""
        if not batch.queries:
            return NOTHING
        return asyncio.run(self._reward(batch))

    async def _reward(self, batch: RewardBatch) -> RewardOutput:
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        async with AsyncExitStack() as stack:
            servers = [_Server(url, await stack.enter_async_context(self._client(url))) for url in self.urls]
            starts = range(0, len(batch), self.batch_size)
            tasks = [
                asyncio.create_task(self._ask(servers, number, self._part(batch, start), deadline))
                for number, start in enumerate(starts)
            ]
            try:
                if await _done_or_asked_to_stop(tasks):
                    return _joined([task.result() for task in tasks])
                return RewardOutput(torch.zeros(len(batch)))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _client(self, url: str) -> Any:
        """Proxies of the environment are used for servers elsewhere only, its certificates (SSL_CERT_FILE) for all.
        Redirects are not followed."""
        import httpx2

        try:
            verify = httpx2.create_ssl_context() if url.startswith("https:") else True
            trust_env = self._uses_proxies[url]
            return httpx2.AsyncClient(headers=self._headers, trust_env=trust_env, verify=verify, timeout=None)
        except (ImportError, ValueError, OSError) as error:  # a proxy or certificate that cannot be used
            raise RewardError(
                f"reward server {url}: cannot be asked with the proxies and certificates that the environment names: "
                f"{first_line(error)}"
            ) from None

    def _part(self, batch: RewardBatch, start: int) -> "_Part":
        rows = slice(start, start + self.batch_size)
        endings = batch.endings or [""] * len(batch)
        queries = [query + ending for query, ending in zip(batch.queries[rows], endings[rows], strict=True)]
        body = {"query": queries, "prompts": list(batch.prompts[rows]), "labels": list(batch.labels[rows])}
        sample_ids = batch.sample_ids[rows]
        try:
            return _Part(json.dumps(body, allow_nan=False).encode(), sample_ids)
        except (TypeError, ValueError) as error:
            raise RewardError(
                f"--remote_rm_url: labels of {sample_ids[0]} to {sample_ids[-1]} are no JSON: {first_line(error)}"
            ) from None

    async def _ask(self, servers: list["_Server"], number: int, part: "_Part", deadline: float) -> RewardOutput:
        """One batch's rewards, from one server after the other until one gives them."""
        loop, tries = asyncio.get_running_loop(), 0
        while True:
            server = servers[(self.first + number + tries) % len(servers)]
            tries += 1
            try:
                async with server.free:
                    left = deadline - loop.time()
                    answer = await asyncio.wait_for(server.post(part.body), max(left, 0.001))
                whereabouts.beat()
                return _read(answer, part.sample_ids, server.url)
            except asyncio.TimeoutError:
                raise RewardError(
                    f"reward server {server.url}: no answer within --remote_rm_timeout {self.timeout_s:g} s"
                ) from None
            except _Fault as fault:
                wait = max(fault.wait_s, min(MAX_WAIT_S, 2.0 ** (tries - 2)) * _jitter())
                left = deadline - loop.time()
                if tries >= fault.max_tries or wait >= left:
                    within = "" if tries >= fault.max_tries else f", within --remote_rm_timeout {self.timeout_s:g} s"
                    raise RewardError(f"reward server {server.url}: {fault}, tried {tries} times{within}") from None
                logger.warning("Reward server %s: %s; trying again in %.1f s", server.url, fault, wait)
            await asyncio.sleep(wait)


def bearer_token() -> str | None:
    """Of the environment; without the line break that a file may have left. Raises UserError, which does not show it,
    for one that no header can hold."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise UserError(f"the token in {TOKEN_VARIABLE} has characters that no HTTP header can hold")
    return token or None


async def _done_or_asked_to_stop(tasks: Sequence["asyncio.Task[RewardOutput]"]) -> bool:
    """True once all are done; False where the run is asked to stop before. Raises what the first failed one did."""
    while not preemption.requested():
        done, waiting = await asyncio.wait(tasks, timeout=POLL_S, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        if not waiting:
            return True
    return False


@dataclass(frozen=True)
class _Part:
    """The samples of one request."""

    body: bytes
    sample_ids: Sequence[str]


class _Fault(Exception):
    """What may be over soon."""

    def __init__(self, text: str, *, max_tries: int = MAX_TRIES, wait_s: float = 0.0):
        super().__init__(text)
        self.max_tries, self.wait_s = max_tries, wait_s


class _Server:
    def __init__(self, url: str, client: Any):
        self.url, self.client = url, client
        self.free = asyncio.Semaphore(IN_FLIGHT)

    async def post(self, body: bytes) -> bytes:
        """The body of a 200. Raises _Fault for what may pass, RewardError for what stays."""
        import httpx2

        timeout = httpx2.Timeout(None, connect=CONNECT_S)
        headers = {"Content-Type": "application/json"}
        try:
            async with self.client.stream(
                "POST", self.url, content=body, headers=headers, timeout=timeout
            ) as response:
                answer = await self._body(response)
                self._check_status(response, answer)
                return answer
        except httpx2.ProxyError as error:
            raise RewardError(f"reward server {self.url}: the proxy refused: {first_line(error)}") from None
        except (httpx2.NetworkError, httpx2.TimeoutException, httpx2.RemoteProtocolError) as error:
            if _is_refused_by_tls(error):
                hint = "SSL_CERT_FILE names a file of certificates to trust"
                raise RewardError(f"reward server {self.url}: {first_line(error)}; {hint}") from None
            raise _Fault(f"{type(error).__name__} ({first_line(error)})") from None
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise RewardError(f"reward server {self.url}: {type(error).__name__}: {first_line(error)}") from None

    async def _body(self, response: Any) -> bytes:
        parts, size = [], 0
        async for part in response.aiter_bytes():
            parts.append(part)
            size += len(part)
            if size > MAX_ANSWER_BYTES:
                raise RewardError(f"reward server {self.url}: answered more than {MAX_ANSWER_BYTES} bytes; {EXPECTED}")
        return b"".join(parts)

    def _check_status(self, response: Any, answer: bytes) -> None:
        status = response.status_code
        if status == 200:
            return
        text = f"HTTP {status} {response.reason_phrase}".strip()
        said = _shown(answer)
        if status in TRANSIENT:
            raise _Fault(f"{text}{said}", wait_s=_retry_after(response.headers.get("Retry-After")))
        if status == SOMETIMES_TRANSIENT:
            raise _Fault(f"{text}{said}", max_tries=MAX_TRIES_500)
        if 300 <= status < 400:
            target = response.headers.get("Location", "nowhere").partition("?")[0]
            raise RewardError(f"reward server {self.url}: {text}, to {target}: give that as --remote_rm_url")
        if status in (401, 403):
            said += f"; a bearer token is taken from the environment variable {TOKEN_VARIABLE}"
        if status == 413:
            said += "; --micro_rollout_batch_size is the most samples of a request"
        raise RewardError(f"reward server {self.url}: {text}{said}; {EXPECTED}")


def _read(answer: bytes, sample_ids: Sequence[str], url: str) -> RewardOutput:
    where = f"reward server {url}"
    try:
        content = json.loads(answer)
    except (ValueError, RecursionError):
        raise RewardError(f"{where} answered no JSON{_shown(answer)}; {EXPECTED}") from None
    if not isinstance(content, dict) or "rewards" not in content:
        raise RewardError(f"{where} answered without 'rewards'{_shown(answer)}; {EXPECTED}")
    known = {key: content[key] for key in ("rewards", "scores", "extra_logs") if key in content}
    return read_output(known, sample_ids, where)


def _joined(outputs: Sequence[RewardOutput]) -> RewardOutput:
    """The batches' outputs one after the other. Raises RewardError where they do not have the same parts."""
    kinds = {(output.scores is not None, *sorted(output.extra_logs)) for output in outputs}
    if len(kinds) > 1:
        raise RewardError("reward servers: 'scores' or 'extra_logs' of some batches and not of others")
    scores = [output.scores for output in outputs if output.scores is not None]
    return RewardOutput(
        rewards=torch.cat([output.rewards for output in outputs]),
        scores=torch.cat(scores) if scores else None,
        extra_logs={
            name: torch.cat([output.extra_logs[name] for output in outputs]) for name in outputs[0].extra_logs
        },
    )


def is_local(host: str) -> bool:
    """Whether a host is this machine or in a private network, where a proxy of the environment has no business."""
    try:
        found = {str(info[4][0]).partition("%")[0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return "." not in host
    return all(ipaddress.ip_address(address).is_private for address in found)


def _is_refused_by_tls(error: BaseException | None) -> bool:
    """Whether the two do not agree on a certificate or a protocol, which no second try changes."""
    passing = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None and not isinstance(error, passing)


def _jitter() -> float:
    return random.SystemRandom().uniform(0.75, 1.25)  # not the seeded one, which a reward function may use


def _retry_after(value: str | None) -> float:
    """Seconds that a server asks to wait, given as such or as a date (RFC 9110); 0 for what is neither."""
    if not value or value.isdecimal():
        return float(value or 0)
    try:
        until = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(until.timestamp() - time.time(), 0.0)


def _shown(answer: bytes) -> str:
    """What a server said, short enough for one line; without the token, should it have sent that back."""
    if token := bearer_token():
        answer = answer.replace(token.encode(), b"***")
    text = " ".join(answer[:1000].decode("utf-8", errors="replace").split())
    return f" ({text if len(text) <= 200 else text[:197] + '...'})" if text else ""
