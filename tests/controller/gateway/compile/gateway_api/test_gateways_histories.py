# SPDX-License-Identifier: Apache-2.0
"""Whatever happened before, objects of the Gateway API come to what a fresh compiler makes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.gateway.compile.compiler import Compiler
from controller.gateway.compile.gateway_api.gateways import GatewayApiSettings
from controller.kube.api_resources import key_of
from tests.controller.gateway.compile.gateway_api.outcomes import feed, snapshot
from tests.examples import examples
from tests.gateway_objects import (
    GROUP,
    Object,
    authorities,
    backend_ref,
    endpoint_slice,
    gateway,
    gateway_class,
    grant,
    grpc_route,
    http_route,
    https,
    listener,
    namespace,
    pool,
    service,
    tls_secret,
)
from tests.kube_objects import pod, resource, route, server

if TYPE_CHECKING:
    from controller.gateway.compile.compiler import CompileResult

# few, so that objects meet
NAMES = st.sampled_from(["a", "b"])
SPACES = st.sampled_from(["default", "default", "blue"])
TIMES = st.sampled_from(["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"])
HOSTS = st.sampled_from([None, "a.org", "*.org"])
SETTINGS = st.builds(
    GatewayApiSettings,
    gateway=st.sampled_from([None, None, "default/a"]),
    bind=st.sampled_from([("10.0.0.1",), ("10.0.0.1", "10.0.0.2"), ("0.0.0.0",)]),  # noqa: S104
    advertise=st.sampled_from(["", "service/default/a"]),
)


@st.composite
def listeners(draw: st.DrawFn) -> Object:
    fields: Object = {}
    if (host := draw(HOSTS)) is not None:
        fields["hostname"] = host
    source = draw(st.sampled_from(["Same", "All", "Selector"]))
    fields["allowedRoutes"] = {"namespaces": {"from": source, "selector": {"matchLabels": {"team": "x"}}}}
    if draw(st.booleans()):
        fields["allowedRoutes"]["kinds"] = [{"kind": draw(st.sampled_from(["HTTPRoute", "TLSRoute"]))}]
    name, port = draw(NAMES), draw(st.sampled_from([80, 443]))
    return https(name, port, draw(NAMES), **fields) if draw(st.booleans()) else listener(name, port, **fields)


@st.composite
def gateways(draw: st.DrawFn) -> Object:
    own = draw(st.lists(listeners(), min_size=1, max_size=2, unique_by=lambda one: one["name"]))
    more: Object = {}
    if draw(st.booleans()):
        reference = {"group": "attache.dev", "kind": "GatewayConfig", "name": draw(NAMES)}
        more["infrastructure"] = {"parametersRef": reference}
    if draw(st.booleans()):
        reference = {"group": "", "kind": "ConfigMap", "name": draw(NAMES)}
        more["tls"] = {"frontend": {"default": {"validation": {"caCertificateRefs": [reference]}}}}
    has = draw(st.sampled_from([(), ("10.0.0.2",)]))
    return gateway(draw(NAMES), *own, namespace=draw(SPACES), created=draw(TIMES), has=has, **more)


@st.composite
def routes(draw: st.DrawFn) -> Object:
    references = [
        backend_ref(),
        backend_ref(draw(NAMES), namespace=draw(SPACES)),
        backend_ref(draw(NAMES), None, group="inference.networking.k8s.io", kind="InferencePool"),
        backend_ref(draw(NAMES), None, group="attache.dev", kind="ModelServer"),
    ]
    backends = draw(st.lists(st.sampled_from(references), min_size=1, max_size=2))
    parents = draw(st.lists(st.builds(dict, name=NAMES, namespace=SPACES), min_size=1, max_size=2))
    more = {} if (host := draw(HOSTS)) is None else {"hostnames": [host]}
    make = draw(st.sampled_from([http_route, grpc_route]))
    created = draw(TIMES)
    return make(draw(NAMES), *backends, parents=tuple(parents), namespace=draw(SPACES), created=created, **more)


@st.composite
def model_routes(draw: st.DrawFn) -> Object:
    target = draw(st.sampled_from(["a", "inferencepool.a"]))
    made = route(draw(NAMES), target, namespace=draw(SPACES), model=draw(NAMES), creationTimestamp=draw(TIMES))
    if draw(st.booleans()):
        made["spec"]["parentRefs"] = [{"name": draw(NAMES)}]
    return made


SOURCES = st.tuples(SPACES, st.just(GROUP), st.sampled_from(["HTTPRoute", "GRPCRoute", "Gateway"]))
CONFIGS: list[Object] = [{}, {"x": 1}, {"authentication": {"apiKeySecrets": [{"name": "a"}]}}]
TARGETS = st.one_of(
    st.builds(dict, kind=st.just("Gateway"), group=st.just(GROUP), name=NAMES, sectionName=NAMES),
    st.builds(dict, kind=st.sampled_from(["ModelServer", "ModelRoute", "GatewayConfig"]), name=NAMES),
)
CONNECTIONS: list[Object] = [
    {"apiKeyRef": {"name": "a", "key": "tls.crt"}},
    {"tls": {"caCertificateRef": {"name": "a"}, "serverName": "a.b", "clientCertificateRef": {"name": "b"}}},
    {"tls": {"caCertificateRef": {"kind": "Secret", "name": "a", "key": "tls.crt"}, "serverName": "a.b"}},
]
THINGS = st.one_of(
    st.builds(server, NAMES, namespace=SPACES, app=NAMES, protocol=st.sampled_from(["OpenAI", "V2", "V2-gRPC"])),
    st.builds(server, NAMES, namespace=SPACES, app=NAMES, connection=st.sampled_from(CONNECTIONS)),
    st.builds(gateway_class, st.just("attache"), st.sampled_from(["attache.dev/gateway", "example.com/other"])),
    gateways(),
    routes(),
    model_routes(),
    st.builds(server, st.sampled_from(["a", "inferencepool.a"]), namespace=SPACES, app=NAMES),
    st.builds(pod, NAMES, st.sampled_from(["10.0.0.1", "10.0.0.2"]), namespace=SPACES, app=NAMES, ready=st.booleans()),
    st.builds(pool, NAMES, namespace=SPACES, app=NAMES),
    st.builds(service, NAMES, st.sampled_from([8080, 9090]), namespace=SPACES),
    st.builds(endpoint_slice, NAMES, st.sampled_from(["10.1.0.1", "10.1.0.2"]), name=NAMES, namespace=SPACES),
    st.builds(grant, SOURCES, st.sampled_from([("", "Service"), ("", "Secret")]), namespace=SPACES),
    st.builds(namespace, SPACES, team=st.sampled_from(["x", "y"])),
    st.builds(tls_secret, NAMES, namespace=SPACES, key=st.just(b"x")),
    st.builds(tls_secret, NAMES, namespace=SPACES),
    st.builds(authorities, NAMES, namespace=SPACES),
    st.builds(lambda name, spec: resource("GatewayConfig", name, spec), NAMES, st.sampled_from(CONFIGS)),
    st.builds(lambda name, ref: resource("ModelAccessPolicy", name, {"targetRefs": [ref]}), NAMES, TARGETS),
)


@settings(max_examples=examples(600), deadline=None)
@given(st.lists(st.tuples(THINGS, st.booleans(), st.booleans()), min_size=5, max_size=30), SETTINGS)
def test_any_history_ends_as_a_fresh_compilation(
    events: list[tuple[Object, bool, bool]], gateway_api: GatewayApiSettings
) -> None:
    # something is served from the start
    first = [gateway_class(), gateway("a"), service("a"), service("picker"), http_route("a", backend_ref("a"))]
    compiler = feed(Compiler(None, gateway_api), first)
    last = {(thing["kind"], key_of(thing)): thing for thing in first}
    for thing, is_gone, is_compiled in events:
        place = thing["kind"], key_of(thing)
        if is_gone:
            last.pop(place, None)
            compiler.update_object(*place, None)
        else:
            last[place] = thing
            compiler.update_object(*place, thing)
        if is_compiled:
            assert_loads(compiler.compile())
    outcome = compiler.compile()
    fresh = feed(Compiler(None, gateway_api), last.values()).compile()
    assert dict(sorted(outcome.files.items())) == dict(sorted(fresh.files.items()))
    assert outcome.statuses == fresh.statuses
    assert outcome.pointers == fresh.pointers
    assert_loads(outcome)


def assert_loads(outcome: CompileResult) -> None:
    """extproc takes it, every reference of a route is there, and each file that a listener or a connection names."""
    found = snapshot(outcome)
    names = {one.name for one in found.gateway.listeners}
    documents = {("ModelServer", one.metadata.key) for one in found.servers}
    documents |= {("Backend", one.metadata.key) for one in found.backends}
    for one in found.gateway_api_routes:
        assert {ref.section_name for ref in one.spec.parent_refs} <= names
        assert one.spec.parent_refs
        for rule in one.spec.rules:
            assert {(ref.kind, f"{ref.namespace}/{ref.name}") for ref in rule.backend_refs} <= documents
    for listener_ in found.gateway.listeners:
        for pair in listener_.tls.certificates if listener_.tls else ():
            assert {pair.cert_file, pair.key_file} <= outcome.files.keys()
    for server_ in found.servers:
        assert set(server_.spec.connection.referenced_files) <= outcome.files.keys()
