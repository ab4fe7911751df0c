"""Engines' /metrics pages to what we want to know, under the names of vLLM, SGLang and TensorRT-LLM.

A page has hundreds of lines, of which a dozen matter. They are looked for where they were on the page before, so a reading
costs microseconds; parsing all of it is what makes scraping a hundred engines cost llm-d's picker several cores
(llm-d-router issue 2441). Several series of one name (data-parallel ranks) are added up, shares averaged.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec

from extproc.endpoints.engine_reports import CacheConfig, EngineReport
from extproc.endpoints.table import LoraState

if TYPE_CHECKING:
    from collections.abc import Mapping

# Lines move a little from page to page, as numbers grow.
_DRIFT: Final = 1024
# In pages: how often to look for what hardly ever changes or was not there.
_RARELY: Final = 20


class MetricNames(msgspec.Struct, frozen=True):
    """Where an engine says what; names of families, tried in order. Histograms without their ``_sum`` and ``_count``."""

    waiting: tuple[str, ...]
    running: tuple[str, ...]
    kv_usage: tuple[str, ...]
    ttft: tuple[str, ...]
    tpot: tuple[str, ...]
    # one series whose labels say block size and number of blocks, or two gauges
    cache_info: str = ""
    block_label: str = ""
    blocks_label: str = ""
    block_size: str = ""
    blocks: str = ""
    loras: str = ""


NAMES: Final[Mapping[str, MetricNames]] = MappingProxyType(
    {
        "vLLM": MetricNames(
            waiting=("vllm:num_requests_waiting",),
            running=("vllm:num_requests_running",),
            kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
            ttft=("vllm:time_to_first_token_seconds",),
            tpot=("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
            cache_info="vllm:cache_config_info",
            block_label="block_size",
            blocks_label="num_gpu_blocks",
            loras="vllm:lora_requests_info",
        ),
        "SGLang": MetricNames(
            waiting=("sglang:num_queue_reqs",),
            running=("sglang:num_running_reqs",),
            kv_usage=("sglang:token_usage",),
            ttft=("sglang:time_to_first_token_seconds",),
            tpot=("sglang:inter_token_latency_seconds", "sglang:time_per_output_token_seconds"),
            cache_info="sglang:cache_config_info",
            block_label="page_size",
            blocks_label="num_pages",
        ),
        "TensorRT-LLM": MetricNames(
            waiting=("trtllm_num_requests_waiting",),
            running=("trtllm_num_requests_running",),
            kv_usage=("trtllm_kv_cache_utilization",),
            ttft=("trtllm_time_to_first_token_seconds",),
            tpot=("trtllm_time_per_output_token_seconds", "trtllm_inter_token_latency_seconds"),
            block_size="trtllm_kv_cache_tokens_per_block",
            blocks="trtllm_kv_cache_max_blocks",
        ),
    }
)


class EngineMetrics(msgspec.Struct, frozen=True):
    """What one page says. ``has_restarted``: counts ran backwards, so the process is a new one with an empty cache."""

    state: EngineReport
    cache: CacheConfig | None
    has_restarted: bool


class MetricsReader:
    """Reads the pages of one engine, one after the other. ``with_loras``: adapters are asked for."""

    def __init__(self, names: MetricNames, *, with_loras: bool = True) -> None:
        self._waiting, self._running = _Family(names.waiting), _Family(names.running)
        self._kv_usage = _Family(names.kv_usage)
        self._ttft, self._tpot = _Mean(names.ttft), _Mean(names.tpot)
        self._loras = _Family((names.loras,) if names.loras and with_loras else ())
        self._cache_info = _Family((names.cache_info,) if names.cache_info else ())
        self._block_size, self._blocks = _Family((names.block_size,)), _Family((names.blocks,))
        self._labels = (names.block_label, names.blocks_label)
        self._pages = 0

    def read(self, page: bytes) -> EngineMetrics:
        """A page in Prometheus' text format. What is missing or cannot be read is None."""
        page = b"\n" + page if not page.startswith(b"#") else page
        ttft = self._ttft.since(page)
        state = EngineReport(
            waiting=self._waiting.total(page),
            running=self._running.total(page),
            kv_usage=self._kv_usage.mean(page),
            ttft_s=ttft.mean,
            tpot_s=self._tpot.since(page).mean,
            loras=self._read_loras(page),
            first_tokens=ttft.count,
        )
        self._pages += 1
        # a cache does not change while its engine lives
        asks_cache = ttft.ran_backwards or self._pages % _RARELY == 1
        return EngineMetrics(state, self._read_cache(page) if asks_cache else None, ttft.ran_backwards)

    def _read_cache(self, page: bytes) -> CacheConfig | None:
        block_label, blocks_label = self._labels
        if block_label:
            labels = map(_labels, self._cache_info.lines(page))
            sizes = [(_whole(one.get(block_label)), _whole(one.get(blocks_label))) for one in labels]
        else:
            sizes = [(int(self._block_size.mean(page) or 0), int(self._blocks.total(page) or 0))]
        known = [(block, blocks) for block, blocks in sizes if block and blocks]
        return CacheConfig(known[0][0], sum(block * blocks for block, blocks in known)) if known else None

    def _read_loras(self, page: bytes) -> LoraState | None:
        lines = self._loras.lines(page)
        if not lines:
            return None
        # each change is a new series, its value the time of it
        labels = _labels(max(lines, key=lambda line: _value(line) or 0.0))
        return LoraState(
            active=_set_of(labels.get("running_lora_adapters", "")),
            waiting=_set_of(labels.get("waiting_lora_adapters", "")),
            max_active=_whole(labels.get("max_lora")),
        )


class _Family:
    """The samples of the first of several names that a page has; they stand together."""

    def __init__(self, names: tuple[str, ...], suffix: str = "") -> None:
        # with the end of the line before and the beginning of what follows: found means found
        self._needles = [f"\n{name}{suffix}{end}".encode() for name in names if name for end in "{ "]
        self._needle = b""
        self._place = 0
        self._misses = 0

    def total(self, page: bytes) -> float | None:
        values = self._values(page)
        return sum(values) if values else None

    def mean(self, page: bytes) -> float | None:
        values = self._values(page)
        return sum(values) / len(values) if values else None

    def lines(self, page: bytes) -> list[bytes]:
        found: list[bytes] = []
        start = self._find(page)
        while start >= 0:
            end = page.find(b"\n", start + 1)
            found.append(page[start + 1 :] if end < 0 else page[start + 1 : end])
            start = end if end >= 0 and page.startswith(self._needle, end) else -1
        return found

    def _values(self, page: bytes) -> list[float]:
        return [value for line in self.lines(page) if (value := _value(line)) is not None]

    def _find(self, page: bytes) -> int:
        place = self._place
        if self._needle:
            start = page.find(self._needle, place - _DRIFT if place > _DRIFT else 0, place + _DRIFT)
            if start >= 0:
                self._place = start
                return start
        elif self._misses:
            # looking through all of a page for what is not there costs more than the rest
            self._misses -= 1
            return -1
        for needle in self._needles:
            start = page.find(needle)
            if start >= 0:
                self._needle, self._place = needle, start
                return start
        self._needle, self._misses = b"", _RARELY
        return -1


class _Taken(msgspec.Struct, frozen=True):
    """What a histogram took in between two pages; None: nothing, or not known."""

    mean: float | None = None
    count: float | None = None
    ran_backwards: bool = False


class _Mean:
    """What a histogram's mean was between two pages."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._sum, self._count = _Family(names, "_sum"), _Family(names, "_count")
        self._before: tuple[float, float] | None = None

    def since(self, page: bytes) -> _Taken:
        """Since the page before."""
        count = self._count.total(page)
        if count is None:
            return _Taken()
        if self._before is not None and count == self._before[0]:
            return _Taken(count=0.0)
        total = self._sum.total(page)
        if total is None:
            return _Taken()
        before, self._before = self._before, (count, total)
        if before is None:
            return _Taken()
        if count < before[0]:
            return _Taken(total / count if count else None, count, ran_backwards=True)
        came = count - before[0]
        return _Taken((total - before[1]) / came, came)


def _value(line: bytes) -> float | None:
    """Of ``name{labels} value`` or ``name value``, a timestamp after it or not."""
    rest = line[line.rfind(b"}") + 1 :] if b"}" in line else line[line.find(b" ") :]
    try:
        value = float(rest)
    except ValueError:
        parts = rest.split()
        return _value(b" " + parts[0]) if len(parts) > 1 else None
    return value if value == value else None  # noqa: PLR0124 - NaN is not equal to itself


def _labels(line: bytes) -> dict[str, str]:
    text = line[line.find(b"{") + 1 : line.rfind(b"}")].decode(errors="replace")
    found = {}
    while text:
        name, _, rest = text.partition('="')
        value, closing, text = rest.partition('"')
        if not closing:
            break
        found[name.strip(", ")] = value
    return found


def _whole(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _set_of(text: str) -> frozenset[str]:
    return frozenset(name for name in (part.strip() for part in text.split(",")) if name)
