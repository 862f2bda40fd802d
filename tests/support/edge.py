"""Files with certificates, keys and tokens for the router's edge."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

from tests.support.certificates import Authority

JWT_SECRET = b"a-secret-of-at-least-32-bytes-length"


def place(folder: Path, authority: Authority, name: str, *, mutual: bool = True) -> None:
    """Renames a server's certificate into a TLS folder, as an operator does."""
    folder.mkdir(exist_ok=True)
    pair = authority.issue(name)
    files = {"server.key": pair.key, "server.crt": pair.certificate}
    if mutual:
        files["clients.crt"] = authority.certificate
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
