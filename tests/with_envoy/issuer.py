# SPDX-License-Identifier: Apache-2.0
"""An issuer of tokens on loopback: it signs them, publishes its keys over TLS, changes them, and may be away."""

from __future__ import annotations

import base64
import hmac
import json
import ssl
import threading
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from bench.cluster.certificates import Authority

if TYPE_CHECKING:
    from pathlib import Path

ISSUER = "https://login.example"
AUDIENCE = "attache"


class SigningKey:
    """An RSA key with its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._private = rsa.generate_private_key(65537, 2048)
        self.public_pem = self._private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def jwk(self) -> dict[str, str]:
        numbers = self._private.public_key().public_numbers()
        parts = {name: _part(number.to_bytes((number.bit_length() + 7) // 8)) for name, number in _members(numbers)}
        return {"kty": "RSA", "kid": self.name, "alg": "RS256", **parts}

    def token(self, **changes: object) -> str:
        """A good token but for ``changes``; None removes a claim."""
        return self._signed({"alg": "RS256", "kid": self.name}, _claims(changes), self._sign)

    def token_with(self, algorithm: str, secret: bytes | None, **changes: object) -> str:
        """The same under another algorithm: by HMAC with ``secret``, or without a signature."""

        def sign(text: bytes) -> bytes:
            return b"" if secret is None else hmac.digest(secret, text, "sha256")

        return self._signed({"alg": algorithm, "kid": self.name}, _claims(changes), sign)

    def _sign(self, text: bytes) -> bytes:
        return self._private.sign(text, padding.PKCS1v15(), hashes.SHA256())

    def _signed(self, header: dict[str, str], claims: dict[str, Any], sign: Any) -> str:  # noqa: ANN401 - a function
        text = ".".join(_part(json.dumps(one).encode()) for one in (header, claims))
        return f"{text}.{_part(sign(text.encode()))}"


class Issuer:
    """``uri``: its key set, which only those find good that trust ``ca_file``."""

    def __init__(self, folder: Path) -> None:
        authority = Authority(datetime.now(UTC))
        self.ca_file = folder / "ca.pem"
        self.ca_file.write_text(authority.certificate)
        certificate, key = authority.issue("login", addresses=["127.0.0.1"])
        (folder / "login.pem").write_text(certificate + key)
        self._pair = folder / "login.pem"
        self.key = SigningKey("first")
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.fetches = 0

    @property
    def uri(self) -> str:
        return f"https://127.0.0.1:{self._port}/keys"

    def start(self) -> None:
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.fetches += 1
                content = json.dumps({"keys": [issuer.key.jwk()]}).encode()
                self.send_response(200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Nothing is printed."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._port = self._server.server_port
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._pair)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


def _claims(changes: dict[str, object]) -> dict[str, Any]:
    claims = {"iss": ISSUER, "exp": 4_000_000_000, "aud": AUDIENCE, "sub": "alice", "tenant": "acme", **changes}
    return {name: value for name, value in claims.items() if value is not None}


def _members(numbers: rsa.RSAPublicNumbers) -> list[tuple[str, int]]:
    return [("n", numbers.n), ("e", numbers.e)]


def _part(value: bytes) -> str:
    return base64.urlsafe_b64encode(value).decode().rstrip("=")
