"""Pages on a Redis or Valkey server, shared by all engines that name it.

A page is up to three values: its header and its parts. The server evicts each by itself, so a page may lose a part; one
that lost its header is no page any more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from tailreplay.errors import CacheConfigError
from tailreplay.tiers.base import PARTS, Found, TierError, TierFullError, TierPage, Usage
from tailreplay.tiers.batches import Changes, by_bytes, changes, contiguous, replacement

INSTALL = "pip install 'tailreplay[redis]'"
_ALIASES = {"valkey": "redis", "valkeys": "rediss"}
# One MULTI holds the server up for as long as it takes to store it.
_TRANSACTION_BYTES = 8 << 20


class RedisTier:
    """A tier on one Redis (6.0 or newer) or Valkey server; not on a cluster.

    How many bytes it holds is the server's affair: ``maxmemory`` with ``maxmemory-policy allkeys-lru``. No call connects
    before it has to, so a server that is not there yet is an error of the first call and not of the constructor.

    Parameters
    ----------
    url : str
        ``redis://``, ``rediss://`` (TLS), ``unix://`` or ``valkey://``, with user, password and database as in redis-py.
    prefix : str
        In front of every key, so that a server can be shared with others.
    timeout : float
        Seconds to connect, and seconds in which a read or write must go on.
    ttl : float or None
        Seconds after which what was put is gone; a read does not lengthen them.

    Raises
    ------
    CacheConfigError
        If the package is missing or the URL is not understood; one sentence, without the password.
    """

    name = "redis"

    def __init__(self, url: str, prefix: str = "tailreplay", timeout: float = 1.0, ttl: float | None = None) -> None:
        redis = _library()
        self._prefix = prefix.encode()
        self._ttl = None if ttl is None else max(1, round(ttl * 1000))
        self._errors = (redis.exceptions.RedisError, OSError)
        self._where, self._secret = _address(url)
        self._closed = False
        scheme, rest = url.split("://", 1)
        try:
            self._client: Any = redis.Redis.from_url(
                f"{_ALIASES.get(scheme, scheme)}://{rest}",
                socket_timeout=timeout,
                socket_connect_timeout=timeout,
                # Whoever calls has a deadline and a back-off of its own.
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
                protocol=2,
                # A page of 1 MiB in pieces of redis-py's 64 KiB takes three times as long.
                socket_read_size=1 << 20,
                # hiredis, where it is installed, reads faster but copies what it writes several times.
                command_packer=redis.connection.PythonRespSerializer(
                    6000, redis.connection.Encoder("utf-8", "strict", False).encode
                ),
                decode_responses=False,
            )
        except (ValueError, TypeError) as error:
            raise CacheConfigError(f"The URL of {self._where} is not understood: {self._clean(error)}.") from None

    def __repr__(self) -> str:
        return f"RedisTier({self._where})"

    def contains(self, keys: Sequence[bytes]) -> list[Found | None]:
        """See `Tier`. Reading a header counts as a use of the header, though of no part."""
        return self._look_up(keys, ())[0] if keys else []

    def resolve(self, hints: Sequence[bytes]) -> list[bytes | None]:
        """See `Tier`."""
        if not hints:
            return []
        with self._sentences():
            found: list[bytes | None] = self._client.mget([self._hint(hint) for hint in hints])
        return found

    def get(self, keys: Sequence[bytes], part: str) -> Iterator[memoryview | None]:
        """See `Tier`. All of `keys` come in one answer, which is held in memory until it has been read."""
        if not keys:
            return
        with self._sentences():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.mget([self._part(key, part) for key in keys])
            # A page in use keeps its header too: without it the part is worth nothing.
            pipeline.touch(*(self._header(key) for key in keys))
            values = pipeline.execute()[0]
        for i in range(len(values)):
            value, values[i] = values[i], None
            yield None if value is None else memoryview(value)

    def put(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`. Two round trips at most for every 8 MiB; one if all is there.

        If two processes add different parts of one page at once, a checksum in its header may be wrong for one of them.
        """
        for batch in by_bytes(pages, _TRANSACTION_BYTES):
            found, hints = self._look_up([page.key for page in batch], [hint for page in batch for hint in page.hints])
            todo = changes(batch, found, hints)
            if todo.pages or todo.hints:
                self._write(todo)

    def replace(self, pages: Sequence[TierPage]) -> None:
        """See `Tier`. A part that a page does not bring is removed."""
        for batch in by_bytes(pages, _TRANSACTION_BYTES):
            hints = {hint: page.key for page in batch for hint in page.hints}
            self._write(Changes({page.key: replacement(page) for page in batch}, hints))

    def drop(self, keys: Sequence[bytes], part: str | None = None) -> None:
        """See `Tier`."""
        parts = PARTS if part is None else (part,)
        names = [self._part(key, name) for key in keys for name in parts]
        if part is None:
            names += [self._header(key) for key in keys]
        if names:
            with self._sentences():
                self._client.unlink(*names)

    def usage(self) -> Usage:
        """See `Tier`. The whole server's, whoever stored it; redis does not count pages."""
        info = self.info()
        limit = int(info.get("maxmemory", 0))
        return Usage(int(info["used_memory"]), limit or None, None, int(info.get("evicted_keys", 0)))

    def info(self) -> dict[str, Any]:
        """Return what the server's INFO says.

        Raises
        ------
        TierError
            If it does not answer.
        """
        with self._sentences():
            answer: dict[str, Any] = self._client.info()
        return answer

    def close(self) -> None:
        """See `Tier`."""
        self._closed = True
        with self._sentences(closing=True):
            self._client.close()
            self._client.connection_pool.disconnect()

    def _look_up(self, keys: Sequence[bytes], hints: Sequence[bytes]) -> tuple[list[Found | None], set[bytes]]:
        """Return what is there of `keys`, and which `hints` are; one round trip."""
        with self._sentences():
            pipeline = self._client.pipeline(transaction=False)
            pipeline.mget([self._header(key) for key in keys])
            for key in keys:
                for part in PARTS:
                    pipeline.exists(self._part(key, part))
            if hints:
                pipeline.mget([self._hint(hint) for hint in hints])
            answers = pipeline.execute()
        headers, there = answers[0], iter(answers[1 : 1 + len(PARTS) * len(keys)])
        found: list[Found | None] = []
        for header in headers:
            parts = frozenset([part for part in PARTS if next(there)])
            found.append(None if header is None else Found(header, parts))
        named = answers[-1] if hints else ()
        return found, {hint for hint, key in zip(hints, named, strict=True) if key is not None}

    def _write(self, todo: Changes) -> None:
        """Write all of it or nothing: one MULTI."""
        with self._sentences():
            pipeline = self._client.pipeline(transaction=True)
            for key, change in todo.pages.items():
                for part, buffers in change.parts.items():
                    pipeline.set(self._part(key, part), contiguous(buffers), px=self._ttl)
                for part in change.drop:
                    pipeline.unlink(self._part(key, part))
                pipeline.set(self._header(key), change.header, px=self._ttl)
            for hint, key in todo.hints.items():
                pipeline.set(self._hint(hint), key, px=self._ttl)
            pipeline.execute()

    def _header(self, key: bytes) -> bytes:
        return b"%b:page:%b" % (self._prefix, key.hex().encode())

    def _part(self, key: bytes, part: str) -> bytes:
        return b"%b:%b" % (self._header(key), part.encode())

    def _hint(self, hint: bytes) -> bytes:
        return b"%b:hint:%b" % (self._prefix, hint.hex().encode())

    @contextmanager
    def _sentences(self, closing: bool = False) -> Iterator[None]:
        """Turn errors of the library into one sentence, and keep the password out of it."""
        if self._closed and not closing:
            raise TierError(f"{self._where} has been closed.")
        try:
            yield
        except self._errors as error:
            text = self._clean(error)
            if "used memory > 'maxmemory'" in text:
                raise TierFullError(f"{self._where} is full, and its maxmemory-policy does not let it evict.") from None
            raise TierError(f"{self._where} does not serve: {text}.") from None

    def _clean(self, error: BaseException) -> str:
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        return text.replace(self._secret, "***") if self._secret else text


def _library() -> Any:
    try:
        import redis
        import redis.backoff
        import redis.connection
        import redis.exceptions
        import redis.retry
    except ImportError as error:
        raise CacheConfigError(f"A cache on Redis or Valkey needs the package redis: {INSTALL}.") from error
    return redis


def _address(url: str) -> tuple[str, str]:
    """Return a URL's server for people, and its password."""
    try:
        parts = urlsplit(url)
        place = parts.path if parts.scheme == "unix" else f"{parts.hostname or 'localhost'}:{parts.port or 6379}"
    except ValueError:
        raise CacheConfigError("The URL of the Redis server is malformed: write redis://HOST:6379/0.") from None
    if parts.scheme not in ("redis", "rediss", "unix", *_ALIASES) or "://" not in url:
        raise CacheConfigError("The URL of a Redis server begins with redis://, rediss://, unix:// or valkey://.")
    product = "Valkey" if parts.scheme.startswith("valkey") else "Redis"
    secret = parts.password or dict(parse_qsl(parts.query)).get("password", "")
    return f"{product} at {place}", unquote(secret)
