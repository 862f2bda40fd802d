"""Certificates, keys and tokens for the router's edge."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

JWT_SECRET = b"a-secret-of-at-least-32-bytes-length"


_USES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


class Authority:
    """A certificate authority of one test."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.certificate = self._sign(self._name, self._key, is_authority=True)

    @property
    def pem(self) -> bytes:
        return _pem(self.certificate)

    def issue(self, name: str) -> tuple[bytes, bytes]:
        """(certificate, key) in PEM, for 127.0.0.1."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        return _pem(self._sign(subject, key)), private

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, is_authority: bool = False
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        uses = dict.fromkeys(_USES, False)
        uses["key_cert_sign" if is_authority else "digital_signature"] = True
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
            # Python 3.13 checks by RFC 5280 to the letter.
            .add_extension(x509.KeyUsage(**uses), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(issuer, critical=False)
            .add_extension(
                x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def place(folder: Path, authority: Authority, name: str, *, mutual: bool = True) -> None:
    """Renames a server's certificate into a TLS folder, as an operator does."""
    folder.mkdir(exist_ok=True)
    certificate, key = authority.issue(name)
    files = {"server.key": key, "server.crt": certificate}
    if mutual:
        files["clients.crt"] = authority.pem
    for file, content in files.items():
        private(folder / f".{file}.new", content).rename(folder / file)


def private(path: Path, content: bytes | str) -> Path:
    """Writes a file that nobody else can read."""
    path.touch(mode=0o600)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def jwks(path: Path) -> Path:
    """The public side of `token`."""
    k = base64.urlsafe_b64encode(JWT_SECRET).rstrip(b"=").decode()
    keys = {"keys": [{"kty": "oct", "alg": "HS256", "kid": "1", "k": k}]}
    return private(path, json.dumps(keys))


def token(subject: str, secret: bytes = JWT_SECRET, **claims: str) -> str:
    import jwt

    expires = datetime.now(UTC) + timedelta(minutes=10)
    return jwt.encode(
        {"sub": subject, "exp": expires, **claims}, secret, "HS256", headers={"kid": "1"}
    )
