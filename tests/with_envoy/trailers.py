# SPDX-License-Identifier: Apache-2.0
"""Requests that end with trailers, which no client of these APIs sends unless it tries something."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import h2.config
import h2.connection
import h2.events

if TYPE_CHECKING:
    from collections.abc import Mapping


async def with_trailers(url: str, content: bytes, more: Mapping[str, str]) -> tuple[int, bytes]:
    """Status and body of the answer to an HTTP/2 POST whose body is followed by a trailer. ``more``: headers."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
    connection.initiate_connection()
    stream = connection.get_next_available_stream_id()
    headers = [(":method", "POST"), (":path", f"/{path}"), (":scheme", "http"), (":authority", "gateway")]
    connection.send_headers(stream, [*headers, ("content-type", "application/json"), *more.items()])
    connection.send_data(stream, content)
    connection.send_headers(stream, [("x-late", "1")], end_stream=True)
    status, answer = 0, b""
    try:
        async with asyncio.timeout(120):
            while True:
                writer.write(connection.data_to_send())
                data = await reader.read(65_536)
                for event in connection.receive_data(data):
                    match event:
                        case h2.events.ResponseReceived():
                            status = int(dict(event.headers or [])[":status"])
                        case h2.events.DataReceived():
                            answer += event.data or b""
                        case h2.events.StreamEnded() | h2.events.StreamReset():
                            return status, answer
                assert data, "Envoy closed the connection"
    finally:
        writer.close()
