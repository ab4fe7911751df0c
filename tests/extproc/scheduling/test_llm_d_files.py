# SPDX-License-Identifier: Apache-2.0
"""Small files with what llm-d's, KServe's and the Inference Extension's own have: loaded, and told what has no
effect.
"""

from __future__ import annotations

import pytest

from extproc.api.config_loader import load_snapshot
from extproc.llmd.picker_builder import PickerFactory, picker_notes
from extproc.scheduling.picker_cache import pickers_for

SERVER = b"""
apiVersion: attache.dev/v1alpha1
kind: ModelServer
metadata: {name: llama}
spec: {model: m, endpoints: [{address: "10.0.0.1:8000"}], pickerConfig: epp.yaml}
"""
QUEUE = "schedulingProfiles: [{name: default, plugins: [{pluginRef: queue-scorer}]}]"

# what the file has, what of it is told
FILES = {
    "affinity with load in tokens": (
        """
plugins:
  - {type: token-load-scorer, parameters: {nonTextTokenWeight: 1.5}}
  - {type: inflight-load-producer, name: load}
  - {type: approx-prefix-cache-producer, parameters: {maxPrefixTokensToMatch: 4096}}
  - {type: prefix-cache-affinity-filter, name: sticky, parameters: {
      maxTokensInFlightPenalty: 1000, maxTTFTPenaltyMs: 0, inFlightLoadProducerName: load}}
schedulingProfiles: [{name: default, plugins: [{pluginRef: sticky}, {pluginRef: token-load-scorer}]}]
""",
        ["nonTextTokenWeight has no effect", "inFlightLoadProducerName has no effect", "the in-flight ledger"],
    ),
    "expected latency, strict and loose": (
        """
plugins:
  - {type: predicted-latency-producer, parameters: {streamingMode: true}}
  - type: prefix-cache-affinity-filter
    name: strict
    parameters: {affinityThreshold: 0.99, ttftSource: latencyPredictor}
  - {type: prefix-cache-affinity-filter, name: loose, parameters: {explorationProbability: 0.01}}
  - {type: latency-scorer, parameters: {ttftWeight: 1, tpotWeight: 0, compositeKVWeight: 2}}
  - {type: weighted-random-picker}
schedulingProfiles:
  - {name: default, plugins: [{pluginRef: predicted-latency-producer}, {pluginRef: strict}, {pluginRef: loose},
      {pluginRef: latency-scorer}, {pluginRef: weighted-random-picker}]}
""",
        ["learned prefill rates", "explorationProbability has no effect", "compositeKVWeight has no effect"],
    ),
    "prefill and decode with older names": (
        """
plugins:
  - {type: disagg-headers-handler, parameters: {encodeProfile: encode}}
  - {type: always-disagg-pd-decider}
  - {type: pd-profile-handler, parameters: {deciderPluginName: always-disagg-pd-decider, encodeProfile: encode,
      prefixPluginType: prefix-cache-scorer, prefixPluginName: prefix-cache-scorer, primaryPort: 8000}}
  - {type: kv-cache-scorer}
schedulingProfiles:
  - {name: prefill, plugins: [{pluginRef: kv-cache-scorer}]}
  - {name: decode, plugins: [{pluginRef: kv-cache-scorer}]}
""",
        ["prefixPluginName has no effect", "primaryPort has no effect", "encodeProfile has no effect"],
    ),
    "precise prefixes with sources and extractors": (
        """
plugins:
  - {type: token-producer, parameters: {modelName: m, vllm: {url: "http://render:8000"}}}
  - {type: endpoint-notification-source}
  - {type: metrics-data-source, parameters: {scheme: http, interval: 1s}}
  - {type: core-metrics-extractor, parameters: {defaultEngine: sglang}}
  - {type: precise-prefix-cache-producer, parameters: {speculativeIndexing: true, kvEventsConfig: {engineType: sglang}}}
  - {type: prefix-cache-scorer, name: precise, parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}}
  - {type: no-hit-lru-scorer, parameters: {lruSize: 2048, prefixMatchInfoProducerName: precise-prefix-cache-producer}}
dataLayer:
  injectDefaults: true
  sources:
    - {pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}
    - {pluginRef: endpoint-notification-source, extractors: [{pluginRef: precise-prefix-cache-producer}]}
schedulingProfiles: [{name: default, plugins: [{pluginRef: precise, weight: 2}, {pluginRef: no-hit-lru-scorer}]}]
""",
        ["it has no kvEvents", "lruSize has no effect", "dataLayer: read, and not used", "the ModelServer's tokenizer"],
    ),
    "the precise scorer of old": (
        """
plugins:
  - {type: precise-prefix-cache-scorer, parameters: {tokenProcessorConfig: {blockSize: 64}, indexerConfig: {}}}
  - {type: active-request-scorer, parameters: {requestTimeout: 2m, idleThreshold: 0, maxBusyScore: 0}}
  - {type: prefix-cache-scorer, parameters: {mode: cache_tracking, hashBlockSize: 5}}
schedulingProfiles:
  - {name: default, plugins: [{pluginRef: precise-prefix-cache-scorer, weight: 3},
      {pluginRef: active-request-scorer}, {pluginRef: prefix-cache-scorer}]}
""",
        [
            "requestTimeout has no effect",
            "tokenProcessorConfig has no effect",
            "score by one estimate",
            "hashBlockSize",
        ],
    ),
    "flow control of this year": (
        f"""
featureGates: [flowControl]
plugins:
  - {{type: queue-scorer}}
  - {{type: program-aware-fairness, parameters: {{strategy: turn-priority}}}}
  - {{type: concurrency-detector, parameters: {{maxConcurrency: 132, headroom: 0.0}}}}
flowControl:
  maxBytes: 10Gi
  maxRequests: 1k
  defaultRequestTTL: 0s
  enableEviction: true
  saturationDetector: {{pluginRef: concurrency-detector}}
  priorityBands:
    - {{priority: -1, defaultRequestTTL: 9000s, maxRequests: "50", fairnessPolicyRef: program-aware-fairness}}
    - {{priority: 0}}
{QUEUE}
""",
        [
            "enableEviction",
            "band -1: defaultRequestTTL has no effect",
            "by every strategy",
            "requests wait 59m at most",
        ],
    ),
    "flow control of the Inference Extension": (
        f"""
featureGates: [flowControl, prepareDataPlugins]
plugins: [{{type: queue-scorer}}, {{type: slo-deadline-ordering-policy}}]
saturationDetector: {{queueDepthThreshold: 3, kvCacheUtilThreshold: 0.8}}
flowControl: {{maxBytes: 1073741824, priorityBands: [{{priority: 1, orderingPolicyRef: slo-deadline-ordering-policy}}]}}
{QUEUE}
""",
        ["featureGates: prepareDataPlugins"],
    ),
    "flow control that is off": (
        f"""
plugins: [{{type: queue-scorer}}, {{type: utilization-detector}}]
saturationDetector: {{pluginRef: utilization-detector}}
{QUEUE}
""",
        ["saturationDetector: not used without the feature gate flowControl"],
    ),
    "lengths, labels and parsers": (
        """
plugins:
  - {type: openai-parser, parameters: {propagatePriority: true}}
  - {type: context-length-aware, parameters: {label: range, enableFiltering: true, reusableTokensProducerName: p2p}}
  - {type: p2p-source-producer, name: p2p, parameters: {prefillProfileName: default}}
  - {type: header-label-affinity-scorer, parameters: {headerName: x-zone, labelKey: zone, stampResponseHeader: false}}
requestHandler: {parsers: [{pluginRef: openai-parser}]}
schedulingProfiles:
  - {name: default, plugins: [{pluginRef: context-length-aware}, {pluginRef: header-label-affinity-scorer}]}
""",
        ["reusableTokensProducerName has no effect", "stampResponseHeader has no effect", "requestHandler: read"],
    ),
    "names of an engine's metrics, and attributes that nobody reports": (
        """
plugins:
  - type: model-server-protocol-metrics
    parameters:
      engineLabelKey: engine
      engineConfigs:
        - {name: mine, queuedRequestsSpec: q, kvUsageSpec: "", loraSpec: l,
           customMetrics: [{attributeKey: depth, metricSpec: d}]}
  - {type: endpoint-attribute-filter, name: here, parameters: {attribute: depth, algorithm: {type: topK, topK: {k: 1}}}}
  - {type: endpoint-attribute-filter, name: gpu, parameters: {attribute: heat, producer: dcgm-extractor,
      onMissing: Fail, algorithm: {type: topK, topK: {k: 1}}}}
schedulingProfiles: [{name: default, plugins: [{pluginRef: here}, {pluginRef: gpu}]}]
""",
        [
            "gpu: no endpoint has a value: no core-metrics-extractor has 'heat' in customMetrics; requests fail",
        ],
    ),
    "ceilings that leave a priority out": (
        f"""
featureGates: [flowControl]
plugins:
  - {{type: queue-scorer}}
  - {{type: priority-holdback-policy, parameters: {{domain: explicit, ceilings: {{"10": 0.9}}}}}}
flowControl: {{priorityBands: [{{priority: 10}}, {{priority: 5}}],
  usageLimitPolicyPluginRef: priority-holdback-policy}}
{QUEUE}
""",
        ["ceilings name no priority 0, so its requests", "ceilings name no priority 5, so its requests"],
    ),
    "agents without flow control": (
        f"""
plugins: [{{type: queue-scorer}}, {{type: agent-identity}}]
{QUEUE}
""",
        ["agent-identity: no flows of agents without the feature gate flowControl"],
    ),
    "sessions of agents on endpoints with room": (
        """
featureGates: [flowControl]
plugins:
  - {type: agent-identity}
  - {type: thunder-agent, name: thunder, parameters: {capacityTokens: 524288, sessionFinalHeader: x-final}}
  - {type: queue-scorer}
flowControl: {saturationDetector: {pluginRef: thunder}, defaultPriorityBand: {fairnessPolicyRef: thunder}}
schedulingProfiles: [{name: default, plugins: [{pluginRef: thunder, weight: 3}, {pluginRef: queue-scorer}]}]
""",
        [
            "capacityTokens has no effect",
            "does not hold them back",
            "thunder-agent is not built here; in its place, util",
        ],
    ),
    "clusters": (
        """
plugins:
  - {type: multicluster-file-discovery, name: discovery, parameters: {path: /clusters.yaml}}
  - {type: latency-observer-producer-hub, name: observer, parameters: {windowSize: 500}}
  - {type: latency-observation-scorer-hub, parameters: {explorationRate: 0.1, ttftPercentilesProducerName: observer}}
  - {type: multicluster-queue-scorer}
  - {type: multicluster-topology-scorer, parameters: {field: zone, weights: {a: 1.0}}}
dataLayer: {discovery: {endpoints: {pluginRef: discovery}}, sources: [{pluginRef: observer}]}
""",
        [
            "write each cluster's gateway as one",
            "explorationRate has no effect",
            "by requests in flight to each cluster",
        ],
    ),
    "an encode stage of an earlier release": (
        """
plugins:
  - {type: always-encode-decider}
  - {type: ed-profile-handler, parameters: {deciderPluginName: always-encode-decider}}
  - {type: queue-scorer}
schedulingProfiles:
  - {name: encode, plugins: [{pluginRef: queue-scorer}]}
  - {name: decode, plugins: [{pluginRef: queue-scorer}]}
""",
        ["only the decode profile runs"],
    ),
    "a token as if it were a cookie, and an older port": (
        """
plugins:
  - {type: session-affinity-scorer, parameters: {maxAge: 86400, secure: true, sameSite: Strict}}
  - {type: data-parallel-profile-handler, parameters: {targetPort: 8000}}
""",
        ["maxAge has no effect: no release of llm-d reads it", "targetPort has no effect"],
    ),
    "a profile without plugins, and a phase in a header": (
        """
plugins: [{type: header-phase-profile-handler}, {type: decode-filter}, {type: random-picker}]
schedulingProfiles: [{name: prefill, plugins: []}, {name: decode, plugins: [{pluginRef: decode-filter, weight: 2}]}]
""",
        ["a weight for 'decode-filter' has no effect"],
    ),
}


@pytest.mark.parametrize("version", ["llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1"])
@pytest.mark.parametrize("what", sorted(FILES))
def test_a_file_is_loaded_and_what_has_no_effect_is_told(what: str, version: str) -> None:
    text, told = FILES[what]
    files = {"server.yaml": SERVER, "epp.yaml": f"apiVersion: {version}\nkind: EndpointPickerConfig{text}".encode()}
    snapshot = load_snapshot(files)
    assert set(pickers_for(snapshot, {}, PickerFactory())) == {"default/llama"}
    notes = "\n".join(picker_notes(snapshot, tries_plugins=True))
    assert [one for one in told if one not in notes] == []
