"""Who may call: API keys from a file, compared in constant time.

One key per line, `NAME KEY` or just `KEY`; empty lines and lines that begin with `#` are left out.
The file is read again when it changes, so that a key is added or withdrawn without a restart.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from perennial.errors import NeedsHuman, Permanent

logger = logging.getLogger(__name__)

MIN_CHARACTERS: Final = 16
_LOOK_S: Final = 1.0
_SCHEME: Final = "bearer "


class ApiKeys:
    """The keys of one file. Thread-safe.

    Raises:
        Permanent: `access.keys`, when the file can't be read, holds no key or a short one.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._seen = _stamp(path)
        self._digests = _read(path)
        self._looked = time.monotonic()

    def allow(self, key: str) -> bool:
        """Whether the key is in the file. Takes equally long whichever key matches, and if none."""
        digest = hashlib.sha256(key.encode()).digest()
        found = False
        for known in self._current():
            found |= hmac.compare_digest(digest, known)
        return found

    def _current(self) -> tuple[bytes, ...]:
        with self._lock:
            if time.monotonic() - self._looked >= _LOOK_S:
                self._looked = time.monotonic()
                self._look()
            return self._digests

    def _look(self) -> None:
        stamp = _stamp(self._path)
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._digests = _read(self._path)
        except Permanent as error:
            logger.error("the keys read before stay in force: %s", error)
        else:
            logger.info("%s: %d keys", self._path, len(self._digests))


def first_key(path: Path) -> str:
    """A key of the file, for a client of ours. Raises Permanent `access.keys`."""
    return next(_keys(path))


def keys_for(bind: str, key_file: str, *, setting: str) -> ApiKeys | None:
    """The keys that a listener asks for; None: nobody is asked, on loopback only.

    Args:
        bind: the address that it listens on.
        key_file: path of the keys, or "".
        setting: the variable that names the key file, for the error.

    Raises:
        NeedsHuman: `access.open`, for an address beyond loopback without keys.
        Permanent: `access.keys`.
    """
    if key_file:
        return ApiKeys(Path(key_file))
    if not is_loopback(bind):
        raise NeedsHuman(
            "access.open",
            f"{bind} can be reached from other machines, and no API keys are set",
            hint=f"write one key per line to a file and set {setting} to its path, "
            "or bind to 127.0.0.1",
        )
    return None


def is_loopback(bind: str) -> bool:
    """Whether an address is reached from this machine only; a name other than localhost isn't."""
    try:
        return ipaddress.ip_address(bind.strip("[]")).is_loopback
    except ValueError:
        return bind == "localhost"


def presented_key(headers: Mapping[str, str]) -> str:
    """The key in `authorization: Bearer KEY` or `x-api-key: KEY`; "" without one.

    Args:
        headers: HTTP headers or gRPC metadata, names in lower case.
    """
    authorization = headers.get("authorization", "")
    if authorization[: len(_SCHEME)].lower() == _SCHEME:
        return authorization[len(_SCHEME) :].strip()
    return headers.get("x-api-key", "").strip()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in _keys(path))


def _keys(path: Path) -> Iterator[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise Permanent("access.keys", f"the API keys in {path} can't be read: {error}") from error
    found = 0
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2 or len(words[-1]) < MIN_CHARACTERS:
            raise Permanent(
                "access.keys",
                f"{path}:{number}: expected NAME KEY or KEY, the key of at least "
                f"{MIN_CHARACTERS} characters",
                hint="make one with: openssl rand -hex 32",
            )
        found += 1
        yield words[-1]
    if not found:
        raise Permanent(
            "access.keys",
            f"{path} holds no API key",
            hint="one key per line; make one with: openssl rand -hex 32",
        )
