"""Labels as files: dropped in `<store>/<model>/inbox/labels/`, moved to `done/` or `failed/`.

A `.csv` or `.parquet` file has the columns `request_id` and `value`, and may have `row` (0), `time`
(now) and `source` ("file"). Names that begin with a dot are ignored: write under such a name and
rename, or leave the file alone for a second.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

from perennial.errors import Permanent
from perennial.records import TIME
from perennial.store import write_atomic

logger = logging.getLogger(__name__)

CHUNK: Final = 10_000
_SETTLE_S: Final = 1.0
_TYPES: Final = {
    "request_id": pa.string(),
    "row": pa.int32(),
    "value": pa.float64(),
    "time": TIME,
    "source": pa.string(),
}
_REQUIRED: Final = ("request_id", "value")


@dataclass(frozen=True)
class Label:
    """One label as it was sent; `time` is when it came to be known, None: now."""

    request_id: str
    row: int
    value: float
    time: datetime | None = None


@dataclass(frozen=True)
class Inbox:
    """One model's folder of dropped files."""

    folder: Path

    def files(self) -> Iterator[Path]:
        """Files that nobody writes any more, oldest name first."""
        if not self.folder.is_dir():
            return
        for path in sorted(self.folder.iterdir()):
            if path.name.startswith(".") or not path.is_file():
                continue
            if time.time() - path.stat().st_mtime >= _SETTLE_S:
                yield path

    def read(self, path: Path) -> Iterator[tuple[str, list[Label]]]:
        """(source, at most `CHUNK` labels) by and by.

        Raises:
            Permanent: `labels.file`, naming what is wrong with the file; before anything is given.
        """
        table = _read(path)
        for batch in table.to_batches(max_chunksize=CHUNK):
            by_source: dict[str, list[Label]] = defaultdict(list)
            for entry in batch.to_pylist():
                value = entry["value"]
                label = Label(
                    entry["request_id"] or "",
                    entry.get("row") or 0,
                    float("nan") if value is None else value,
                    entry.get("time"),
                )
                by_source[entry.get("source") or "file"].append(label)
            yield from by_source.items()

    def finish(self, path: Path, rejected: Iterable[str]) -> None:
        """Moves a taken file to `done/`; what was refused in it is counted beside it."""
        target = self._move(path, "done")
        if counts := Counter(rejected):
            write_atomic(
                target.with_name(f"{target.name}.rejected.json"), json.dumps(counts).encode()
            )

    def fail(self, path: Path, reason: str) -> None:
        """Moves an unreadable file to `failed/`, with the reason beside it."""
        target = self._move(path, "failed")
        write_atomic(target.with_name(f"{target.name}.reason.txt"), f"{reason}\n".encode())

    def _move(self, path: Path, folder: str) -> Path:
        target = self.folder / folder / path.name
        target.parent.mkdir(exist_ok=True)
        if target.exists():
            target = target.with_name(f"{target.stem}.{time.time_ns()}{target.suffix}")
        path.rename(target)
        return target


def _read(path: Path) -> pa.Table:
    try:
        if path.suffix == ".csv":
            table = pc.read_csv(path, convert_options=pc.ConvertOptions(column_types=_TYPES))
        elif path.suffix == ".parquet":
            table = pq.read_table(path, partitioning=None)
        else:
            raise Permanent("labels.file", f"{path.name}: neither .csv nor .parquet")
        missing = [name for name in _REQUIRED if name not in table.column_names]
        if missing:
            raise Permanent(
                "labels.file",
                f"{path.name}: no column {' and no column '.join(missing)}",
                hint=f"columns: {', '.join(_TYPES)}",
            )
        known = [name for name in table.column_names if name in _TYPES]
        return pa.table({name: table[name].cast(_TYPES[name]) for name in known})
    except (pa.ArrowException, OSError) as error:
        raise Permanent("labels.file", f"{path.name}: {' '.join(str(error).split())}") from error
