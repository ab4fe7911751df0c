# SPDX-License-Identifier: Apache-2.0
"""Broken configuration files at random: ``python -m tests.fuzz files --minutes 10``.

Valid documents are cut, doubled, spliced, and sprinkled with what YAML and JSON find special. Every file must end in a
snapshot or in ConfigInvalid; anything else is printed with the seed that made it, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import logging
import random
import resource
import sys
import time
from typing import TYPE_CHECKING, Final

from controller.bundle.envoy.bundle import build_bundle
from extproc.api.config_errors import ConfigInvalid
from extproc.api.config_loader import load_snapshot
from extproc.core.core import Core
from extproc.llmd.picker_builder import picker_notes
from tests.fuzz.values import broken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from extproc.api.config_snapshot import Snapshot

VALID: Final = (
    """apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: s, namespace: default, labels: {a: b}}
spec:
  model: m
  endpoints: [{address: "10.0.0.1:8000", labels: {pd: prefill}}, {address: "10.0.0.2:8000"}]
  trafficPolicy: {timeout: 5m, retry: {attempts: 1}}
  flowControl: {timeout: 10s, maxBytes: 1Gi, saturation: {queueDepth: 3, maxWait: 250ms}, weights: {a: 1.5}}
""",
    """apiVersion: attache.dev/v1alpha1
kind: ModelRoute
metadata: {name: r}
spec:
  modelName: chat
  loraAdapters: [sql]
  rateLimits: [{per: Tenant, unit: minute, requests: 10, burst: 1.5}]
  rules:
  - modelMatch: {headers: {x-a: {regex: "a+"}}, uri: {prefix: /v1}}
    targetModels: [{modelServerName: s, weight: 10}]
  - targetModels: [{modelServerName: s}]
""",
    """apiVersion: attache.dev/v1alpha1
kind: GatewayConfig
metadata: {name: g}
spec:
  listen: "0.0.0.0:8080"
  maxBodySize: 64Mi
  authentication: {apiKeys: [{name: a, key: sk-0123456789, tenant: t}]}
""",
    """apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceObjective
metadata: {name: o}
spec: {priority: 10, poolRef: {name: s}}
""",
    """apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [flowControl]
flowControl: {maxBytes: 10G, priorityBands: [{priority: 1, maxRequests: 10}]}
plugins:
- {type: queue-scorer}
- {type: max-score-picker}
- {type: utilization-detector, parameters: {queueDepthThreshold: 5}}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer, weight: 2}, {pluginRef: max-score-picker}]
""",
    '{"apiVersion": "attache.dev/v1alpha1", "kind": "ModelServer", "metadata": {"name": "j"},'
    ' "spec": {"model": "m", "endpoints": [{"address": "10.0.0.3:8000"}]}}',
)
_TAGS: Final = (
    "bool",
    "int",
    "float",
    "null",
    "timestamp",
    "set",
    "omap",
    "pairs",
    "binary",
    "str",
    "map",
    "seq",
    "merge",
)
SPECIAL: Final = (
    *(f"!!{tag} " for tag in _TAGS),
    *("!x ", "!<a> ", "! ", "!!python/name:os.system "),
    *("&a ", "*a", "<<: ", "? ", ": ", "- ", "--- ", "\n---\n", "\n...\n", "%YAML 1.1\n", "| ", "> ", "# ", "@", "`"),
    *(
        "[",
        "]",
        "{",
        "}",
        ",",
        '"',
        "'",
        "\\",
        "\n",
        "\t",
        "\r",
        "\0",
        "\x1b[2J",
        "\ufeff",
        "\u2028",
        "\ud7ff",
        "\U0001f600",
    ),
    *(
        ".nan",
        ".inf",
        "-.inf",
        "0x",
        "0b_",
        "1:1",
        "2001-99-99",
        "2001-01-01",
        "1e400",
        "-0",
        "1.0e+400",
        "~",
        "null",
        "=",
    ),
    *("9" * 30, "9" * 5000, "1:" * 500 + "1", "a" * 5000, "[" * 200, "{a: " * 200, "- " * 200, '{"a":' * 1200),
    *("10G", "1h", "-5s", "true", "''", "[]", "{}", "[*a, *a]", "(" * 300, "a{99999999999}"),
)
_SPECIAL: Final = tuple(one.encode() for one in SPECIAL)
_VALID: Final = tuple(one.encode() for one in VALID)


def mutant(rng: random.Random) -> dict[str, bytes]:
    """Some files, of which at least one is broken in some way."""
    chosen = rng.sample(VALID, rng.randint(1, len(VALID)))
    files = {}
    for number, text in enumerate(chosen):
        is_json = text.startswith("{") != (rng.random() < 0.1)
        # one is broken for certain, the others now and then
        content = _broken(text, rng) if not number or rng.random() < 0.2 else text.encode()
        files[f"{number}.{'json' if is_json else 'yaml'}"] = content
    if rng.random() < 0.1:
        files["noise.yaml"] = rng.randbytes(rng.randint(0, 2000))
    return files


def _broken(text: str, rng: random.Random) -> bytes:
    content = text.encode()
    for _ in range(rng.choice((0, 1, 1, 2, 3, 8))):
        content = broken(content, rng, _SPECIAL, _VALID)
    return content


def try_files(files: dict[str, bytes]) -> bool:
    """Whether they can be used; raises whatever ends neither in a configuration in use nor in ConfigInvalid."""
    try:
        snapshot = load_snapshot(files)
        picker_notes(snapshot)
        core = Core(_good(), rng=random.Random(0), ticket_prefix="fuzz")
        core.apply(snapshot, 1.0)
        build_bundle(snapshot, "/nowhere")
    except ConfigInvalid as error:
        unforeseen = [one for one in error.mistakes if "makes the reader fail" in one.message]
        if unforeseen:
            raise RuntimeError(str(unforeseen[0])) from error
        return False
    return True


@functools.cache
def _good() -> Snapshot:
    """What the core starts with."""
    return load_snapshot({"good.yaml": VALID[0].encode()})


def main(words: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 1 if something else than a refusal was seen."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz files", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first directory; the next has the next")
    options = parser.parse_args(words)
    logging.basicConfig(level=logging.ERROR)
    clock = time.perf_counter
    before, end_at_s = _memory_mib(), clock() + 60 * options.minutes
    counts, longest_s, seed = {"used": 0, "refused": 0, "failed": 0}, 0.0, options.seed
    while clock() < end_at_s:
        files, start_s = mutant(random.Random(seed)), clock()
        try:
            counts["used" if try_files(files) else "refused"] += 1
        except Exception as error:  # noqa: BLE001 - this test checks that there is none
            counts["failed"] += 1
            print(f"seed {seed}: {type(error).__name__}: {error}")
        longest_s = max(longest_s, clock() - start_s)
        seed += 1
    print(f"{counts}, longest {longest_s:.2f} s, peak memory {before:.0f} MiB before and {_memory_mib():.0f} MiB after")
    return 1 if counts["failed"] else 0


def _memory_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sys.exit(main())
