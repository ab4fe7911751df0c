"""Between machines: one Redis channel. While Redis is away every process decides by what it sees itself."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S: Final = 10.0
_TIMEOUT_S: Final = 1.0


class RedisMissing(Exception):
    """The client library is not installed."""


class RedisBus:
    """``url``: redis://host:port/db; ``channel``: shared by those that serve the same engines."""

    def __init__(self, url: str, channel: str) -> None:
        try:
            # an extra: only who runs on several machines needs it
            from redis.asyncio import Redis  # noqa: PLC0415
            from redis.exceptions import RedisError  # noqa: PLC0415
        except ImportError:
            raise RedisMissing("install the extra: pip install 'attache[redis]'") from None
        self._error: type[Exception] = RedisError
        self._channel = channel
        self._redis: Any = Redis.from_url(url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S)
        # a subscriber waits for as long as nobody says anything
        self._listening: Any = Redis.from_url(url, socket_connect_timeout=_TIMEOUT_S, socket_keepalive=True)
        self._is_away = False

    async def run(self, receive: Callable[[bytes], None]) -> None:
        """Until cancelled."""
        pause_s = 0.1
        try:
            while True:
                try:
                    async with self._listening.pubsub(ignore_subscribe_messages=True) as subscription:
                        await subscription.subscribe(self._channel)
                        log.info("sharing over Redis channel %s", self._channel)
                        pause_s = 0.1
                        async for message in subscription.listen():
                            receive(message["data"])
                except (self._error, OSError) as error:
                    log.warning("Redis is away, this process decides by what it sees itself: %s", error)
                await asyncio.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        finally:
            await self._redis.aclose()
            await self._listening.aclose()

    async def send(self, payload: bytes) -> None:
        """Raises OSError while Redis is away."""
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await self._redis.publish(self._channel, payload)
        except (self._error, TimeoutError) as error:
            raise OSError(str(error)) from None
