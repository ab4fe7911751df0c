# SPDX-License-Identifier: Apache-2.0
"""The picking rules of other routers with their products' defaults, what every proxy has, and an oracle.

llm-d's default for prefill-bound traffic: prefix affinity, then token load.

The default since August 2026. ``prefix-cache-affinity-filter``: endpoints that hold at least 80% of the prompt,
unless the best of them is more than 18 s behind the best of the others. Then ``token-load-scorer``: the least
``uncached tokens in flight + uncached tokens of this prompt``. Tokens leave the load at the first token; divided by a
calibrated peak throughput they are the estimated TTFT. Source: llm-d-router's plugins of these names, and
llm-d.github.io, "sticky until saturated", 2026-08-17. The older blend is ``configs/llm-d-default.yaml``, the profile
for precise prefixes ``configs/llm-d-precise.yaml``.

Kthena's defaults: ``least-request`` as a filter, then three scores of equal weight.

The scores are least-request, least-latency and prefix-cache, whole numbers from 0 to 100. The prefix score covers the
first 8 KiB of a prompt (128 blocks of 64 bytes) and the best five pods, and records a prompt when its answer has ended.
Where the filter (fewer than 10 waiting) leaves no pod, Kthena answers with an error; here all stay, because a refused
request has no latency to compare. Source: volcano-sh/kthena, ``scheduler/plugins``.

SGLang's ``cache_aware``: the best match in its tree, unless loads are unequal.

It is now part of the Shepherd Model Gateway. Loads are requests in flight. If they differ by more than 32 and the
highest is more than 1.1 times the lowest: the least loaded. Else, if an endpoint holds more than half of the prompt,
the one that holds most; else the least loaded (formerly the smallest tree, which ignores load: sgl-project/sglang
issue 14305). Source: lightseekorg/smg, ``model_gateway/src/policies/cache_aware.rs``.

NVIDIA Dynamo's KV router: the least ``prefill blocks + decode blocks``.

    cost = max(active prefill tokens + own tokens - overlap, 0) / block size + active decode blocks, own ones included

Prefill tokens are active until the first token; a block that several running requests share counts once. Temperature 0,
credit 1. Source: ai-dynamo/dynamo, ``lib/llm/src/kv_router/scheduler.rs`` and ``docs/router``.

Preble's E2, exploit and explore (ICLR 2025; WukLab/preble).

Exploit: if more than half of the prompt is cached somewhere, the least loaded endpoint among those that hold most of
it, unless its load is more than 1.5 times the least load. Else explore: the least ``L + M + P``. ``L``: work sent
there in the last three minutes, prefill of uncached tokens and decode. ``M``: prefill time of the blocks to evict for
the prompt, each weighed by its share of recent uses. ``P``: prefill time of the uncached tokens.

AIBrix's ``prefix-cache`` and ``least-kv-cache``.

``prefix-cache``: if running counts differ by more than 8, the fewest running. Else the best match among endpoints
whose running count is at most the mean plus one standard deviation, the fewest running among equal matches; without a
match, the fewest running. Source: vllm-project/aibrix 0.7, ``pkg/plugins/gateway/algorithms`` (the chart sets 16 and
two deviations).

Ray Serve's ``PrefixCacheAffinityRouter``: best match, else power of two.

If requests in flight differ by at most 10: the best match if it covers a tenth of the prompt, else the endpoint with
the smallest part of the prefix tree, which never evicts. Source: ray-project/ray,
``python/ray/llm/_internal/serve/routing_policies/prefix_aware``, with the threshold of the documentation (that of the
code is infinite).

LMetric (arXiv 2603.15202): the least product of prefill tokens and batch size.

Prefill tokens: uncached tokens of queued requests and of this one. There are no parameters.

An oracle: the least TTFT by the engines' real state, which no router has.

For each engine: the time to prefill everything that waits there, by the engine's own step times with its present
decodes, and then this request's uncached tokens. Greedy: the cost to later requests counts once, as this request's
own prefill.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from itertools import islice
from typing import TYPE_CHECKING, Final, Literal

import numpy as np

from bench.engine.step_time import prefill_s
from extproc.endpoints.engine_reports import estimated_waiting
from extproc.scheduling.picker import Pick
from extproc.scheduling.plugins.latency import LeastLatencyScorer
from extproc.scheduling.plugins.load_scorers import LeastRequestScorer

if TYPE_CHECKING:
    import random

    from bench.engine.request import Request
    from bench.engine.scheduler import Scheduler
    from bench.lab.policies.trackers import InFlightTracker
    from extproc.endpoints.table import Bools, Floats
    from extproc.scheduling.picker import View

_AFFINITY = 0.80
_MAX_PENALTY_S = 18.0
_MOST_WAITING: Final = 10
_SEEN_TOKENS: Final = 8192 / 4
_BEST: Final = 5
_SGLANG_APART: Final = 32
_TIMES: Final = 1.1
_SGLANG_MATCH: Final = 0.5
WINDOW_S: Final = 180.0
_IMBALANCE: Final = 1.5
_AIBRIX_APART: Final = 8
_DEVIATIONS: Final = 1.0
_RAY_APART: Final = 10
_RAY_MATCH: Final = 0.1


def least_cost(view: View, cost: Floats, rng: random.Random, among: Bools | None = None) -> Pick:
    """The candidates by cost, the least first. ``cost``: by row of the endpoint table.

    ``among``: the rows to choose from; all candidates if it is None or holds no candidate. Raises ValueError if a
    row has no cost, or one that is not a number.
    """
    may = view.candidates()
    rows = np.flatnonzero(may & among) if among is not None else np.flatnonzero(may)
    if not rows.size:
        rows = np.flatnonzero(may)
    if cost.ndim != 1 or cost.size <= rows[-1]:
        msg = f"cost has the shape {cost.shape}; it needs a number for each row of view.table, here to row {rows[-1]}"
        raise ValueError(msg)
    if np.isnan(cost[rows]).any():
        msg = f"the cost of row {rows[np.isnan(cost[rows])][0]} is not a number (nan), as after 0/0"
        raise ValueError(msg)
    shuffled = rows[rng.sample(range(rows.size), rows.size)]
    ordered: list[int] = shuffled[cost[shuffled].argsort(kind="stable")].tolist()
    return Pick(ordered[: view.choices], float(view.ttft_s()[ordered[0]]))


def prefix_match_ratio(view: View) -> Floats:
    """By row, the share of the prompt that the endpoint has in its cache, 0 to 1."""
    ratio: Floats = view.demand.cached_tokens / max(view.request.input_tokens, 1.0)
    return ratio


def requests_in_flight(view: View) -> Floats:
    """By row, the requests that were sent and have not ended."""

    return view.table.in_flight.astype(np.float64)


class RandomPick:
    """Every endpoint equally often."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Any order is as likely as any other."""
        return least_cost(view, np.zeros(len(view.table.addresses)), rng)


class LeastRequest:
    """The fewest requests in flight: nginx's ``least_conn``, Envoy's ``LEAST_REQUEST`` with all hosts as choices."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """Counts are the router's own, so they are never late."""
        return least_cost(view, requests_in_flight(view), rng)


class PowerOfTwo:
    """The better of two random endpoints (Mitzenmacher, 2001): Envoy's ``LEAST_REQUEST`` with its defaults."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The other endpoints follow as fallbacks, in random order."""

        rows = np.flatnonzero(view.candidates())
        drawn = rows[rng.sample(range(rows.size), min(2, rows.size))]
        cost = np.full(len(view.table.addresses), np.inf)
        cost[drawn] = requests_in_flight(view)[drawn]
        return least_cost(view, cost, rng)


class AffinityWithTokenLoad:
    """``prefill_tokens_per_s``: the peak of one engine, by llm-d's calibration."""

    def __init__(self, tracker: InFlightTracker, prefill_tokens_per_s: float) -> None:
        self._tracker = tracker
        self._prefill_tokens_per_s = prefill_tokens_per_s

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        self._tracker.observe(view)
        may = view.candidates()
        waiting = self._tracker.prefill_tokens
        load = waiting + view.request.input_tokens - view.demand.cached_tokens
        sticky = may & (prefix_match_ratio(view) >= _AFFINITY)
        others = may & ~sticky
        if sticky.any() and others.any():
            penalty_s = (float(waiting[sticky].min()) - float(waiting[others].min())) / self._prefill_tokens_per_s

            if penalty_s > _MAX_PENALTY_S:
                sticky = may
        return least_cost(view, load, rng, sticky)


class KthenaPublished:
    """What Kthena's published comparison ran (docs blog, 2025-09-09).

    The least-request score of that time, ``running + 100 * waiting`` as scraped once a second with nothing added
    since, alone or with a prefix score of the same weight.
    """

    def __init__(self, *, prefix: Literal["", "seen", "whole"] = "") -> None:
        """``prefix``: "" no prefix score; "seen" of the first 8 KiB; "whole" of all, as ``kvcache-aware`` by KV
        events.
        """
        self._prefix = prefix

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The highest sum of the scores, each from 0 to 100."""
        among, table = view.candidates(), view.table
        base = table.running + 100 * table.waiting
        most = float(base[among].max())
        score = np.trunc(100 * (most - base) / most) if most else np.full(base.size, 100.0)
        if self._prefix:
            score = score + np.trunc(100 * (_prefix(view) if self._prefix == "seen" else prefix_match_ratio(view)))
        return least_cost(view, -score, rng, among)


class KthenaDefault:
    """The sum of three scores."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        among = view.candidates()
        short = among & (estimated_waiting(view.table, view.now_s) < _MOST_WAITING)
        among = short if short.any() else among
        score = np.trunc(100 * LeastRequestScorer().score(view, among))
        score += np.trunc(100 * LeastLatencyScorer().score(view, among))
        score += np.trunc(100 * _prefix(view))
        return least_cost(view, -score, rng, among)


def _prefix(view: View) -> Floats:
    seen = min(view.request.input_tokens, _SEEN_TOKENS)
    ratio: Floats = np.minimum(view.demand.cached_tokens, seen) / max(seen, 1.0)
    if ratio.size > _BEST:
        ratio[ratio < np.partition(ratio, -_BEST)[-_BEST]] = 0.0
    return ratio


class SglangCacheAware:
    """Balance first, then the tree."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        may, load = view.candidates(), requests_in_flight(view)
        most, fewest = float(load[may].max()), float(load[may].min())
        ratio = prefix_match_ratio(view)
        if (most - fewest > _SGLANG_APART and most > _TIMES * fewest) or float(ratio[may].max()) <= _SGLANG_MATCH:
            return least_cost(view, load, rng)
        # the lower load between equal matches

        return least_cost(view, -ratio + load / (1e6 * (1 + most)), rng, may & np.isfinite(load))


class DynamoKvRouter:
    """``block_size``: the engines', in tokens."""

    def __init__(self, tracker: InFlightTracker, block_size: int) -> None:
        self._tracker = tracker
        self._block_size = block_size

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        tracker = self._tracker
        request = tracker.observe(view)
        tokens = tracker.prefill_tokens + view.request.input_tokens - view.demand.cached_tokens
        cost = np.maximum(tokens, 0.0) / self._block_size + tracker.distinct_block_counts_with(request)
        return least_cost(view, cost, rng)


class _EngineHistory:
    """What was sent to one engine in the window."""

    def __init__(self) -> None:
        self.load_s = 0.0
        self._sent: deque[tuple[float, float, list[int]]] = deque()
        self._blocks: OrderedDict[int, None] = OrderedDict()
        self._uses: Counter[int] = Counter()

    def send(self, now: float, seconds: float, blocks: list[int]) -> None:
        self._sent.append((now, seconds, blocks))
        self.load_s += seconds
        self._uses.update(blocks)
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)

    def forget(self, before_s: float, capacity: int) -> None:
        """Drop what was sent before the instant ``before_s``, and blocks beyond the ``capacity``."""
        while self._sent and self._sent[0][0] < before_s:
            _, seconds, blocks = self._sent.popleft()
            self.load_s -= seconds
            self._uses.subtract(blocks)
        while len(self._blocks) > capacity:
            block, _ = self._blocks.popitem(last=False)
            self._uses.pop(block, None)

    def eviction(self, count: int, capacity: int) -> float:
        """The recent uses of the blocks to evict for ``count`` new ones, per request sent."""
        needed = max(0, len(self._blocks) + count - capacity)
        used = sum(self._uses[block] for block in islice(self._blocks, needed))
        return used / max(1, len(self._sent))


class PrebleExploitExplore:
    """``prefill_tokens_per_s`` and ``decode_s_per_token`` are measured on an idle engine, as in Preble."""

    def __init__(
        self, tracker: InFlightTracker, *, prefill_tokens_per_s: float, decode_s_per_token: float, block_size: int
    ) -> None:
        """``block_size``: the engines', in tokens."""
        self._tracker = tracker
        self._prefill_tokens_per_s, self._decode_s_per_token = prefill_tokens_per_s, decode_s_per_token
        self._block_size = block_size

        self._histories: list[_EngineHistory] = []
        self._output_tokens = 200.0

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        request = self._tracker.observe(view)
        table, now = view.table, view.now_s
        self._histories += [_EngineHistory() for _ in range(len(table.addresses) - len(self._histories))]
        capacity = max(1, int(table.kv_capacity_tokens.max()) // self._block_size)
        for history in self._histories:
            history.forget(now - WINDOW_S, capacity)
        may, cached = view.candidates(), view.demand.cached_tokens
        load = np.array([history.load_s for history in self._histories])
        missed = view.request.input_tokens - cached
        pick = self._exploit(view, load, rng) or least_cost(view, load + self._costs(missed, capacity), rng, may)
        self._send(pick.rows[0], request, float(missed[pick.rows[0]]), now)
        return pick

    def _exploit(self, view: View, load: Floats, rng: random.Random) -> Pick | None:
        may, cached = view.candidates(), view.demand.cached_tokens
        most = float(cached[may].max())
        if most <= view.request.input_tokens - most:
            return None
        pick = least_cost(view, load, rng, may & (cached >= most))
        return pick if load[pick.rows[0]] <= _IMBALANCE * max(float(load[may].min()), 1.0) else None

    def _costs(self, missed: Floats, capacity: int) -> Floats:
        seconds = self._block_size / self._prefill_tokens_per_s
        evicted = [
            seconds * history.eviction(int(tokens) // self._block_size, capacity)
            for history, tokens in zip(self._histories, missed, strict=True)
        ]
        return np.array(evicted) + missed / self._prefill_tokens_per_s

    def _send(self, row: int, request: Request, missed: float, now: float) -> None:
        seconds = missed / self._prefill_tokens_per_s + self._output_tokens * self._decode_s_per_token
        self._histories[row].send(now, seconds, list(request.text.hashes))


class AibrixPrefixCache:
    """``prefix-cache`` with the defaults of the code."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        may, load = view.candidates(), requests_in_flight(view)
        if float(load[may].max() - load[may].min()) > _AIBRIX_APART:
            return least_cost(view, load, rng)
        matched = np.trunc(100 * prefix_match_ratio(view))
        # the mean and deviation of all candidates, not only of those that match
        bearable = may & (load <= load[may].mean() + _DEVIATIONS * load[may].std()) & (matched > 0)
        if not bearable.any():
            return least_cost(view, load, rng)
        return least_cost(view, -matched + load / (1 + load.max()), rng, bearable)


class LeastKvCache:
    """The lowest usage of the KV cache, as engines report it."""

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        """The usage is as old as the last scrape."""

        return least_cost(view, view.table.kv_usage, rng)


class RayPrefixAffinity:
    """Keeps the size of each endpoint's part of the tree: the tokens that it was the first to be sent."""

    def __init__(self) -> None:
        self._tree: Floats = np.zeros(0)

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        self._tree = np.pad(self._tree, (0, len(view.table.addresses) - self._tree.size))
        may, load, ratio = view.candidates(), requests_in_flight(view), prefix_match_ratio(view)
        if float(load[may].max() - load[may].min()) > _RAY_APART:
            pick = PowerOfTwo().pick(view, rng=rng)
        elif float(ratio[may].max()) >= _RAY_MATCH:
            pick = least_cost(view, -ratio, rng)
        else:
            pick = least_cost(view, self._tree, rng)
        first = pick.rows[0]
        self._tree[first] += view.request.input_tokens - float(view.demand.cached_tokens[first])
        return pick


class LMetric:
    """The batch includes this request."""

    def __init__(self, tracker: InFlightTracker) -> None:
        self._tracker = tracker

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        self._tracker.observe(view)
        tokens = self._tracker.prefill_tokens + view.request.input_tokens - view.demand.cached_tokens
        return least_cost(view, tokens * (1 + requests_in_flight(view)), rng)


class Oracle:
    """Reads the engines' state directly. ``others``: weight of this request's prefill as a delay of the requests behind
    it.
    """

    def __init__(self, tracker: InFlightTracker, others: float = 1.0) -> None:
        self._tracker = tracker
        self._others = others

    def pick(self, view: View, *, rng: random.Random) -> Pick:
        request = self._tracker.observe(view)
        cost = np.full(len(view.table.addresses), np.inf)
        for address, engine in self._tracker.engines.items():
            row = view.table.row_of(address)
            if row is not None:
                cost[row] = self._seconds(engine, request, self._tracker.requests_in_prefill(row))
        return least_cost(view, cost, rng)

    def _seconds(self, engine: Scheduler, request: Request, ahead: list[Request]) -> float:
        waits = sum(_left(engine, one) for one in ahead)
        return waits + (1 + self._others) * _left(engine, request)


def _left(engine: Scheduler, request: Request) -> float:
    """Seconds of prefill that a request still needs, whether it is on its way, waiting or running."""
    if request.is_running:
        return _prefill_s(engine, request.tokens - request.computed, request.computed)
    size = engine.limits.block_size
    cached = len(engine.pool.match_prefix(request.text.hashes[: (request.tokens - 1) // size])) * size
    return _prefill_s(engine, request.tokens - cached, cached)


def _prefill_s(engine: Scheduler, tokens: int, history: int) -> float:
    """Beside the requests that the engine decodes now; every chunk counts their decodes again."""
    decodes = [one for one in engine.running if one.tokens - one.computed == 1]
    return prefill_s(
        engine.speed,
        tokens,
        history,
        budget=engine.limits.max_num_batched_tokens,
        decodes=len(decodes),
        decodes_read=sum(one.computed for one in decodes),
    )
