"""The store: one fsspec URL, one folder per model, artifacts published whole or not at all.

    <store>/<model>/log/predictions/date=YYYY-MM-DD/hour=HH/*.parquet
    <store>/<model>/log/labels/date=YYYY-MM-DD/hour=HH/*.parquet
    <store>/<model>/snapshots/<episode>/   runs/<episode>/   exports/<episode>/
    <store>/<model>/versions/<N>/          releases/<episode>/

An artifact is written to a temporary, non-numeric name beside its target, its files are synced and
hashed, `manifest.json` is written last, and the folder is renamed. Readers demand the manifest.
TF Serving never sees a half-written version, since only numeric names are versions.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from perennial.errors import Conflict, Permanent
from perennial.records import FileEntry, Manifest

MANIFEST = "manifest.json"


class Store:
    """Paths and atomic publishing under one root.

    Args:
        url: `file:///absolute/path`. Object stores are refused by this version.
    """

    def __init__(self, url: str) -> None:
        scheme, separator, rest = url.partition("://")
        if separator and scheme != "file":
            raise Permanent(
                "store.scheme",
                f"store URL {url!r}: only file:// is supported by this version",
                hint="set PERENNIAL_STORE_URL to file:///some/absolute/folder",
            )
        self.root = Path(rest if separator else url)
        if not self.root.is_absolute():
            raise Permanent("store.relative", f"store path {str(self.root)!r} is not absolute")

    def model_dir(self, model: str) -> Path:
        return self.root / model

    def predictions(self, model: str) -> Path:
        return self.root / model / "log" / "predictions"

    def labels(self, model: str) -> Path:
        return self.root / model / "log" / "labels"

    def snapshot(self, model: str, episode: str) -> Path:
        return self.root / model / "snapshots" / episode

    def run(self, model: str, episode: str) -> Path:
        return self.root / model / "runs" / episode

    def export(self, model: str, episode: str) -> Path:
        return self.root / model / "exports" / episode

    def versions(self, model: str) -> Path:
        """TF Serving's base path of the model."""
        return self.root / model / "versions"

    def version(self, model: str, version: int) -> Path:
        return self.versions(model) / str(version)

    def release(self, model: str, episode: str) -> Path:
        return self.root / model / "releases" / episode


@contextmanager
def publishing(
    target: Path,
    *,
    kind: str,
    model: str,
    id: str,
    parents: dict[str, str] | None = None,
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Writes an artifact atomically.

    Yields a temporary folder to fill and a dict for the manifest's facts. When the block ends, the
    files are synced and hashed, the manifest is written and the folder is renamed to `target`. When
    it raises, nothing remains.

    Raises:
        Conflict: `store.exists`, when `target` was published meanwhile (or before).
    """
    if is_published(target):
        raise Conflict("store.exists", f"{target} is already published")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"tmp-{target.name}-{secrets.token_hex(6)}")
    temporary.mkdir()
    facts: dict[str, Any] = {}
    try:
        yield temporary, facts
        manifest = Manifest(
            kind=kind,
            model=model,
            id=id,
            created=datetime.now(UTC),
            files=tuple(_entries(temporary)),
            parents=parents or {},
            facts=facts,
        )
        _write_synced(temporary / MANIFEST, manifest.model_dump_json(indent=1).encode())
        _sync_folder(temporary)
        if target.exists() and not is_published(target):
            shutil.rmtree(target)
        try:
            temporary.rename(target)
        except OSError as error:
            if is_published(target):
                raise Conflict("store.exists", f"{target} is already published") from error
            raise
        _sync_folder(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_published(target: Path) -> bool:
    """Whether `target` is a whole artifact (its manifest is there)."""
    return (target / MANIFEST).is_file()


def read_manifest(target: Path) -> Manifest:
    """The manifest of a published artifact.

    Raises:
        Permanent: `store.unpublished` or `store.manifest`.
    """
    path = target / MANIFEST
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise Permanent(
            "store.unpublished",
            f"{target} has no {MANIFEST}: it was never published whole",
            hint="run the step that writes it again",
        ) from None
    try:
        return Manifest.model_validate_json(text)
    except ValueError as error:
        raise Permanent("store.manifest", f"{path} cannot be read: {error}") from error


def verify(target: Path) -> Manifest:
    """Checks every file of an artifact against its manifest.

    Raises:
        Permanent: `store.checksum`, naming the first file that is missing, changed or not listed.
    """
    manifest = read_manifest(target)
    listed = {entry.path: entry for entry in manifest.files}
    for path in _files(target):
        name = path.relative_to(target).as_posix()
        if name not in listed:
            raise Permanent("store.checksum", f"{path} is not in the artifact's manifest")
    for name, entry in listed.items():
        path = target / name
        if not path.is_file():
            raise Permanent("store.checksum", f"{path} is missing")
        size = path.stat().st_size
        if size != entry.size_bytes:
            raise Permanent(
                "store.checksum", f"{path} has {size} bytes, the manifest says {entry.size_bytes}"
            )
        if file_sha256(path) != entry.sha256:
            raise Permanent(
                "store.checksum",
                f"{path} was changed after it was published",
                hint="publish the artifact again; never edit one in place",
            )
    return manifest


def write_atomic(path: Path, content: bytes) -> None:
    """Replaces one file: temporary sibling, sync, rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        _write_synced(temporary, content)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            yield path


def _entries(folder: Path) -> Iterator[FileEntry]:
    for path in _files(folder):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        yield FileEntry(
            path=path.relative_to(folder).as_posix(),
            size_bytes=path.stat().st_size,
            sha256=file_sha256(path),
        )


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
