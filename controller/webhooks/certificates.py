# SPDX-License-Identifier: Apache-2.0
"""Certificates of the webhooks' server, from an authority of its own: made, renewed, and stored in one Secret.

Replicas share one Material, which a Secret holds. Nothing of it is used before all clients can trust it: a new
authority is published for ``SETTLED`` before it signs, and an old one stays published until it ends. Every replica does
the same: it renews what is old, unless another was first, and uses what the Secret has.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import logging
import re
import secrets
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from yarl import URL

from controller.api.certificate_checks import check_key_pair
from controller.kube.api_resources import SECRETS, ApiResource
from controller.kube.errors import ClusterError, Conflict, NotFound

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from controller.kube.client import Client

log = logging.getLogger(__name__)

# Of chance, in the path.
_PATH_BYTES: Final = 24
# The API server takes small letters, digits and few other characters in a webhook's path.
_ACCEPTED_PATH: Final = re.compile(r"[0-9a-z]+")
# Clocks of other machines may be behind.
_EARLIER: Final = timedelta(minutes=10)
# Of the Secret: one key with all of it, so that no reader meets half of it; the others are for people and tools.
_DATA: Final = "material.json"
PATH: Final = "/validate"
WEBHOOK_CONFIGURATIONS: Final = ApiResource(
    "admissionregistration.k8s.io",
    "v1",
    "validatingwebhookconfigurations",
    "ValidatingWebhookConfiguration",
    namespaced=False,
)
API_SERVICES: Final = ApiResource("apiregistration.k8s.io", "v1", "apiservices", "APIService", namespaced=False)


class Lifetimes(msgspec.Struct, frozen=True, kw_only=True):
    """How long things last. ``settled``: how long a new authority is published before it signs.

    A third before its end, a certificate or an authority gets a successor.
    """

    authority: timedelta = timedelta(days=365)
    certificate: timedelta = timedelta(days=30)
    settled: timedelta = timedelta(hours=1)


class KeyPair(msgspec.Struct, frozen=True):
    """A certificate and its private key, in PEM."""

    certificate: str
    key: str

    def __repr__(self) -> str:
        return "Pair(...)"

    @property
    def begins_at(self) -> datetime:
        """When it was made."""
        return _loaded(self.certificate).not_valid_before_utc + _EARLIER

    @property
    def ends_at(self) -> datetime:
        """When it ends."""
        return _loaded(self.certificate).not_valid_after_utc

    def is_renewal_due(self, now: datetime) -> bool:
        """Whether less than a third of its life is left."""
        return now >= self.ends_at - (self.ends_at - self.begins_at) / 3


class CertificateMaterial(msgspec.Struct, frozen=True):
    """``authorities``: oldest first. ``server``: what the server shows. ``path``: the secret end of the webhooks' path,
    by which the server knows API servers, as these show no certificate of their own.
    """

    authorities: tuple[KeyPair, ...]
    server: KeyPair
    path: str = ""

    def __repr__(self) -> str:
        return "CertificateMaterial(...)"

    @property
    def ca_bundle(self) -> str:
        """All authorities, for ``caBundle``."""
        return "".join(one.certificate for one in self.authorities)


def renew_if_due(
    material: CertificateMaterial | None, names: Sequence[str], now: datetime, lifetimes: Lifetimes
) -> CertificateMaterial:
    """What replicas should have at ``now``: ``material`` itself while nothing is to be renewed.

    ``names``: host names and addresses by which API servers call the server.
    """
    known = () if material is None else material.authorities
    authorities = tuple(one for one in known if now < one.ends_at)
    if not authorities or authorities[-1].is_renewal_due(now):
        authorities = (*authorities, _make_authority(now, lifetimes.authority))
    signer = _signer(authorities, now, lifetimes.settled)
    known_path = material.path if material is not None and _ACCEPTED_PATH.fullmatch(material.path) else ""
    made = CertificateMaterial(
        authorities,
        material.server
        if material is not None and _is_good(material.server, signer, names, now)
        else _issue(signer, names, now, lifetimes.certificate),
        known_path or secrets.token_hex(_PATH_BYTES),
    )
    return material if material == made else made


def _signer(authorities: Sequence[KeyPair], now: datetime, settled: timedelta) -> KeyPair:
    """The newest authority that every trust bundle already has; at the very first start, the only one."""
    known = [one for one in authorities if now >= one.begins_at + settled]
    return known[-1] if known else authorities[0]


def _is_good(server: KeyPair, signer: KeyPair, names: Sequence[str], now: datetime) -> bool:
    certificate, authority = _loaded(server.certificate), _loaded(signer.certificate)
    try:
        certificate.verify_directly_issued_by(authority)
        shown = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # noqa: BLE001 - of another authority, or not of ours at all: cryptography has several errors for it
        return False
    return set(shown) == set(map(_alternative, names)) and not server.is_renewal_due(now)


def _make_authority(now: datetime, lifetime: timedelta) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    # each authority has its own name, too
    name = _name(f"attache webhooks {now:%Y-%m-%d %H:%M:%S}")
    built = _builder(name, name, key, now, lifetime)
    built = built.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    return _signed(built.add_extension(usage, critical=True), key, key)


def _issue(signer: KeyPair, names: Sequence[str], now: datetime, lifetime: timedelta) -> KeyPair:
    key = ec.generate_private_key(ec.SECP256R1())
    authority = _loaded(signer.certificate)
    built = _builder(_name("attache webhooks server"), authority.subject, key, now, min(lifetime, signer.ends_at - now))
    built = built.add_extension(x509.SubjectAlternativeName(list(map(_alternative, names))), critical=False)
    built = built.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signing = serialization.load_pem_private_key(signer.key.encode(), password=None)
    if not isinstance(signing, ec.EllipticCurvePrivateKey):
        raise TypeError(type(signing).__name__)
    return _signed(built, key, signing)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    return (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLIER)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signing: ec.EllipticCurvePrivateKey
) -> KeyPair:
    built = builder.add_extension(
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False
    )
    certificate = built.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyPair(certificate, private.decode())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _loaded(certificate: str) -> x509.Certificate:
    return x509.load_pem_x509_certificate(certificate.encode())


def to_secret(material: CertificateMaterial) -> Mapping[str, str]:
    """The data of a Secret."""
    content = {
        _DATA: msgspec.json.encode(material),
        "ca.crt": material.ca_bundle.encode(),
        "tls.crt": material.server.certificate.encode(),
    }
    return {name: base64.b64encode(text).decode() for name, text in content.items()}


def from_secret(data: Mapping[str, Any]) -> CertificateMaterial | None:
    """None if its content is invalid: the certificates are then issued again."""
    try:
        material = msgspec.json.decode(base64.b64decode(data[_DATA], validate=True), type=CertificateMaterial)
        for one in (*material.authorities, material.server):
            check_key_pair(one.certificate.encode(), one.key.encode())
    except (KeyError, TypeError, ValueError, msgspec.DecodeError):
        return None
    return material if material.authorities else None


def utc_now() -> datetime:
    """For the edges."""
    return datetime.now(UTC)


class CertificateConsumer(Protocol):
    """A server that shows the certificate."""

    def set_certificate(self, pair: KeyPair, /) -> None:
        """From now on; raises OSError."""
        ...


class RotationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """``namespace`` and ``secret``: of the Secret. ``configuration``: name of the ValidatingWebhookConfiguration.
    ``names``: by which API servers call the server. ``every_s``: seconds between two checks. ``api_service``: the
    APIService of this server, which gets the authorities, too; empty: none does.
    """

    namespace: str
    secret: str
    configuration: str
    names: tuple[str, ...]
    lifetimes: Lifetimes = Lifetimes()
    every_s: float = 30.0
    api_service: str = ""


def _client(config: Mapping[str, Any], material: CertificateMaterial) -> dict[str, Any]:
    """What we write of a webhook's ``clientConfig``."""
    trusted = {"caBundle": base64.b64encode(material.ca_bundle.encode()).decode()}
    path = f"{PATH}/{material.path}"
    if "service" in config:
        return {**trusted, "service": {**config["service"], "path": path}}
    return {**trusted, "url": str(URL(config["url"]).with_path(path))}


class CertificateRotation:
    """``run`` does all of it; ``ready`` is set once there is a certificate. ``material``: what is in use."""

    def __init__(
        self,
        client: Client,
        settings: RotationSettings,
        servers: Sequence[CertificateConsumer],
        clock: Callable[[], datetime],
    ) -> None:
        self._client = client
        self._settings = settings
        self._servers = servers
        self._clock = clock
        self.ready = asyncio.Event()
        self.material: CertificateMaterial | None = None

    async def run(self) -> None:
        """Renew certificates until cancelled. What fails is tried again; meanwhile the last certificate is served."""
        while True:
            try:
                await self.renew_if_due()
            except Conflict:
                continue  # another replica was first: take what it wrote
            except (ClusterError, OSError) as error:
                log.warning("certificates could not be looked after, tried again: %s", error)
            await asyncio.sleep(self._settings.every_s if self.ready.is_set() else 1.0)

    async def renew_if_due(self) -> None:
        """Renew, publish, use; in this order, so that what is shown is trusted. Raises ClusterError."""
        settings = self._settings
        secret = await self._client.get(SECRETS, settings.secret, settings.namespace)
        known = from_secret(secret.get("data") or {})
        material = renew_if_due(known, settings.names, self._clock(), settings.lifetimes)
        if material != known:
            await self._client.replace(SECRETS, {**secret, "data": to_secret(material)})
            log.info("certificates renewed: the server's ends at %s", material.server.ends_at.isoformat())
        await self._publish(material)
        if settings.api_service:
            await self._publish_api(settings.api_service, material)
        for server in self._servers:
            server.set_certificate(material.server)
        self.material = material
        self.ready.set()

    async def _publish(self, material: CertificateMaterial) -> None:
        """Write the authorities and the path into every webhook of the configuration, if they are not there."""
        name = self._settings.configuration
        try:
            found = await self._client.get(WEBHOOK_CONFIGURATIONS, name)
        except NotFound:
            log.warning("there is no ValidatingWebhookConfiguration %s: nobody asks this server", name)
            return
        webhooks: list[dict[str, Any]] = found.get("webhooks") or []
        patched = [{"name": one["name"], "clientConfig": _client(one["clientConfig"], material)} for one in webhooks]
        known = [one["clientConfig"] for one in webhooks]
        if [{**old, **new["clientConfig"]} for old, new in zip(known, patched, strict=True)] == known:
            return
        applied = {
            "apiVersion": WEBHOOK_CONFIGURATIONS.api_version,
            "kind": WEBHOOK_CONFIGURATIONS.kind,
            "metadata": {"name": name},
            "webhooks": patched,
        }
        await self._client.apply(WEBHOOK_CONFIGURATIONS, applied, force=True)
        log.info("authorities and path are in ValidatingWebhookConfiguration %s", name)

    async def _publish_api(self, name: str, material: CertificateMaterial) -> None:
        """Write the authorities into the APIService, if they are not there."""
        found = await self._client.get_or_none(API_SERVICES, name)
        if found is None:
            log.warning("there is no APIService %s: nobody asks for external metrics", name)
            return
        trusted = base64.b64encode(material.ca_bundle.encode()).decode()
        if found["spec"].get("caBundle") != trusted:
            await self._client.merge_patch(API_SERVICES, name, None, {"spec": {"caBundle": trusted}})
            log.info("the authorities of the certificates are in APIService %s", name)
