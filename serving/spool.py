"""The spool: text lines that Envoy appends, taken in batches, each exactly once.

Progress is an offset per file, saved after what was read up to it is on disk for good. Killed in
between, the next run reads from the same offset again, at least as far: so whoever names what it
writes after `Batch.id` (file and start) replaces its own earlier attempt, and nothing is lost or
written twice.

A file is known by its inode and its first line, for inodes are used again. The active file is
renamed when it is large; the renamed one is drained and deleted. Lines hold unmasked values: the
folder has mode 0700 and lies on tmpfs where there is one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final

from perennial.errors import Conflict, Permanent
from perennial.store import write_atomic

logger = logging.getLogger(__name__)

MAX_LINE_BYTES: Final = 4 << 20
"""Longer than the router's cap allows: not a line."""
MAX_BATCH_BYTES: Final = 8 << 20
MAX_BATCH_LINES: Final = 10_000
_SETTLE_S: Final = 2.0
"""After a rename, Envoy may still write into the old file for a flush interval."""


@dataclass(frozen=True)
class Batch:
    """Whole lines of one file, from `start` up to `end` bytes."""

    file: str
    start: int
    end: int
    lines: tuple[bytes, ...]
    torn: int = 0
    """How many pieces were skipped because they are no whole line."""

    @property
    def id(self) -> str:
        return f"{self.file}-{self.start:012d}"


@dataclass
class Spool:
    """The reader's side of one spool folder.

    Args:
        active: the file that Envoy appends to; renamed ones lie beside it.
        state: where progress is saved; on lasting disk, beside nothing secret.
        rotate_bytes: size at which the active file is renamed.
        reopen: asks Envoy to open `active` anew; may fail, it's asked again.
    """

    active: Path
    state: Path
    reopen: Callable[[], None]
    rotate_bytes: int = 64 << 20
    _offsets: dict[str, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.active.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.active.parent.chmod(0o700)
        try:
            self._offsets = {str(k): int(v) for k, v in json.loads(self.state.read_text()).items()}
        except FileNotFoundError:
            pass
        except (ValueError, AttributeError, TypeError) as error:
            raise Permanent(
                "recorder.state",
                f"{self.state} cannot be read: {error}",
                hint="moving it away makes the recorder take the whole spool again: calls that "
                "are in the log already would be in it twice",
            ) from error

    def batches(self) -> Iterator[Batch]:
        """What is there now, oldest first. Commit each before asking for the next."""
        for path in self._files():
            with path.open("rb") as file:
                name = _identity(file)
                while name and (batch := _read(file, name, self._offsets.get(name, 0))):
                    yield batch

    def commit(self, batch: Batch) -> None:
        """Says that everything of `batch` is on disk.

        When the offset can't be saved (OSError), the batch counts as not taken: else what follows
        it would be written under names that the next run does not replace.
        """
        self._save({**self._offsets, batch.file: batch.end})

    def backlog_bytes(self) -> int:
        """Bytes that are not committed yet."""
        total = 0
        for path in self._files():
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                total += size - self._offsets.get(_identity(file), 0)
        return total

    def rotate(self) -> int:
        """Renames the active file when it is large, deletes renamed ones that are drained.

        Returns how many torn ends were given up with the deleted files.
        """
        if self.active.exists() and self.active.stat().st_size >= self.rotate_bytes:
            self.active.rename(self.active.with_name(f"capture.{time.time_ns()}.log"))
        renamed = self._renamed()
        if not renamed:
            return 0
        if not self.active.exists():
            self.reopen()
            return 0
        torn = 0
        for path in renamed:
            with path.open("rb") as file:
                stat = os.fstat(file.fileno())
                name = _identity(file)
                left = stat.st_size - self._offsets.get(name, 0)
                file.seek(stat.st_size - left)
                drained = b"\n" not in file.read(MAX_LINE_BYTES)
            if drained and time.time() - max(stat.st_mtime, stat.st_ctime) > _SETTLE_S:
                path.unlink()
                if name in self._offsets:
                    self._save({k: v for k, v in self._offsets.items() if k != name})
                torn += left > 0
        return torn

    def _files(self) -> list[Path]:
        """Renamed files, oldest first, then the active one."""
        return [*self._renamed(), *([self.active] if self.active.exists() else [])]

    def _renamed(self) -> list[Path]:
        return sorted(self.active.parent.glob("capture.*.log"))

    def _save(self, offsets: dict[str, int]) -> None:
        write_atomic(self.state, json.dumps(offsets).encode())
        self._offsets = offsets


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Holds the spool for this process.

    Raises:
        Conflict: `recorder.running`, when another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / "recorder.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Conflict(
                "recorder.running", f"another recorder takes the calls in {folder}"
            ) from None
        yield
    finally:
        os.close(descriptor)


def _identity(file: BinaryIO) -> str:
    """Inode and digest of the first line; "" while the file has no whole line."""
    descriptor = file.fileno()
    head = os.pread(descriptor, 4096, 0)
    # The start of a long first line is enough, its beginning is a time in microseconds; a short
    # one must be whole, or the name would change as it grows.
    if b"\n" not in head and len(head) < 4096:
        return ""
    digest = hashlib.sha256(head.split(b"\n", 1)[0]).hexdigest()[:12]
    return f"{os.fstat(descriptor).st_ino:x}-{digest}"


def _read(file: BinaryIO, name: str, start: int) -> Batch | None:
    descriptor = file.fileno()
    data = os.pread(descriptor, MAX_BATCH_BYTES, start)
    cut = data.rfind(b"\n") + 1
    if not cut:
        if len(data) <= MAX_LINE_BYTES:
            return None
        # No newline in more than a line can be: give up what was read, look on behind it.
        return Batch(name, start, start + len(data), (), torn=1)
    lines = data[:cut].split(b"\n", MAX_BATCH_LINES)
    rest = lines.pop()
    end = start + cut - len(rest)
    return Batch(name, start, end, tuple(lines))
