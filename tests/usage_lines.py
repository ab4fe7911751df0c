# SPDX-License-Identifier: Apache-2.0
"""Lines of the usage log, as Envoy writes them."""

from __future__ import annotations

import msgspec

from extproc.api.pricing import Price, Rates
from extproc.api.usage_log import UsageContext, UsageCounts, UsageLine

# 2026-11-23 12:00 UTC
NOON_S = 1_795_435_200
PRICE = Price(id="p1", currency="USD", rates=Rates(input=1_000_000, output=2_000_000, cached=100_000))


def context(**changes: object) -> UsageContext:
    made = UsageContext(
        ticket="t1",
        tenant="team-a",
        user="alice",
        api_key="key-1",
        key_id="k-1",
        route="default/llama",
        server="default/llama",
        model="llama",
        served_model="meta-llama/Llama-3.1-8B",
        api="CHAT",
        input_tokens=90,
        output_tokens=50,
        price=PRICE,
    )
    return msgspec.structs.replace(made, **changes)


def counts(**changes: object) -> UsageCounts:
    made = UsageCounts(prompt_tokens=100.0, completion_tokens=20.0, cached_tokens=40.0, finish="stop")
    return msgspec.structs.replace(made, **changes)


def line(name: str = "r1", *, of: UsageContext | None = None, **changes: object) -> UsageLine:
    """``of``: its context, if not the usual one."""
    made = UsageLine(
        id=name,
        at=float(NOON_S),
        status=200,
        request_id=f"x-{name}",
        path="/v1/chat/completions",
        context=msgspec.json.encode(of or context()).decode(),
        usage=counts(),
        served="10.0.0.1:8000",
        duration_us=1_500_000,
        first_byte_us=120_000,
        answer_bytes=2_000,
        attempts=1,
    )
    return msgspec.structs.replace(made, **changes)


def text(one: UsageLine) -> bytes:
    return msgspec.json.encode(one) + b"\n"
