"""The recorder: what the router captured becomes the prediction log, masked, exactly once.

    python -m serving.recorder

Takes lines from the spool in batches of at most 10,000, once a second while traffic is low, every
five seconds or when a batch is full while it is high, and writes Parquet under
`Store.predictions(model)/date=/hour=/`, by the time of the request. A batch is on disk (file and
folder synced, renamed) before its offset is saved; its files are named after where it starts in the
spool, so that a batch that is taken again replaces itself. SIGTERM drains and exits with 0.

A line that gives no row is counted by reason and kept in the spool folder (bounded, unmasked, so
never on lasting disk). A disk that takes nothing is tried again each turn. When the backlog, the
router's own buffer or the disk pass their limits, capture is suspended through Envoy's admin
interface and the suspended time is counted.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from perennial.service import run_service
from perennial.settings import Settings
from perennial.spec import ModelSpec, load_specs
from perennial.store import Store
from serving.capture import Reason, Rows, Unparsable, parse_line
from serving.parquet import write_parquet
from serving.router.envoy import admin_url, capture_log, set_capture_percent
from serving.sequence import SequenceGaps
from serving.spool import MAX_BATCH_BYTES, MAX_BATCH_LINES, Batch, Spool, exclusive

logger = logging.getLogger(__name__)

TURN_S: Final = 1.0
MAX_GATHER_TURNS: Final = 5
QUIET_LINES: Final = 100
"""Fewer lines in a turn are written at once: few rows are soon seen, many make few files."""
_UNPARSABLE_BYTES: Final = 16 << 20


class Metrics:
    """What the recorder tells Prometheus."""

    def __init__(self, registry: CollectorRegistry) -> None:
        prefix = "perennial_recorder"
        self.records = Counter(
            f"{prefix}_records", "Rows written.", ["model", "arm", "route"], registry=registry
        )
        self.unparsable = Counter(
            f"{prefix}_unparsable", "Calls that gave no row.", ["reason"], registry=registry
        )
        self.lost = Counter(
            f"{prefix}_lost", "Captured calls whose line never came.", registry=registry
        )
        self.suspended_s = Counter(
            f"{prefix}_suspended_seconds", "How long capture was suspended.", registry=registry
        )
        self.failures = Counter(
            f"{prefix}_write_failures",
            "Turns in which the log's disk took nothing; what waits stays in the spool.",
            registry=registry,
        )
        self.dropped = Gauge(
            f"{prefix}_router_write_failures",
            "Writes into the spool that failed in the router since it started: lines that never "
            "came.",
            registry=registry,
        )
        self.backlog_bytes = Gauge(
            f"{prefix}_backlog_bytes", "Spool that is not in the log yet.", registry=registry
        )
        self.lag_s = Gauge(
            f"{prefix}_lag_seconds", "Age of the newest row when it was written.", registry=registry
        )
        for reason in Reason:
            self.unparsable.labels(reason)


class Writer:
    """Batches of captured lines as Parquet files of the prediction log."""

    def __init__(
        self,
        store: Store,
        specs: Mapping[str, ModelSpec],
        secret: bytes,
        metrics: Metrics,
        rejects: Path,
    ) -> None:
        self._store = store
        self._specs = specs
        self._secret = secret
        self._metrics = metrics
        self._rejects = rejects
        self._gaps = SequenceGaps()

    def write(self, batch: Batch) -> None:
        """Writes the batch's rows. When it returns, they are on disk."""
        rows = Rows(self._specs, self._secret)
        rejected: list[tuple[Reason, bytes]] = [(Reason.LINE, b"")] * batch.torn
        lost = 0
        for line in batch.lines:
            try:
                call = parse_line(line)
                lost += self._gaps.see(call.worker, call.sequence)
                rows.add(call)
            except Unparsable as error:
                logger.debug("line in %s: %s", batch.id, error)
                rejected.append((error.reason, line))
        for model, hour, table in rows.tables():
            folder = self._store.predictions(model) / f"{hour:date=%Y-%m-%d/hour=%H}"
            write_parquet(table, folder / f"{batch.id}.parquet")
        for labels, count in rows.counts().items():
            self._metrics.records.labels(*labels).inc(count)
        self._metrics.lost.inc(lost)
        self._keep(rejected)
        if (newest_us := rows.newest_us()) is not None:
            self._metrics.lag_s.set(max(0.0, time.time() - newest_us / 1e6))

    def _keep(self, rejected: list[tuple[Reason, bytes]]) -> None:
        for reason, _ in rejected:
            self._metrics.unparsable.labels(reason).inc()
        if not rejected:
            return
        if self._rejects.exists() and self._rejects.stat().st_size > _UNPARSABLE_BYTES:
            self._rejects.rename(self._rejects.with_suffix(".old"))
        descriptor = os.open(self._rejects, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.writelines(b"%s\t%s\n" % (reason.encode(), line) for reason, line in rejected)


def gather_turns(lines: int, turns: int) -> int:
    """How many turns to gather the next batch for, when the last `turns` brought `lines`.

    One while traffic is low; else until a batch is full, at most `MAX_GATHER_TURNS`.
    """
    per_turn = lines / turns
    if per_turn < QUIET_LINES:
        return 1
    return max(1, min(MAX_GATHER_TURNS, round(MAX_BATCH_LINES / per_turn)))


@dataclass
class Guard:
    """Suspends capture before it fills memory or disk, and resumes it.

    Args:
        client: of the router's admin interface.
        folders: whose disks must keep `min_free_bytes`, or `min_free_share` of a small one.
        percent: of the calls to capture while nothing is wrong.
    """

    client: httpx.Client
    metrics: Metrics
    folders: tuple[Path, ...]
    percent: int
    max_backlog_bytes: int = 256 << 20
    max_buffered_bytes: int = 64 << 20
    min_free_bytes: int = 512 << 20
    min_free_share: float = 0.1
    _applied: int | None = None
    _last: float = 0.0

    def check(self, backlog_bytes: int) -> None:
        """Call about once a second, with the spool's backlog."""
        now = time.monotonic()
        if self._applied == 0:
            self.metrics.suspended_s.inc(now - self._last)
        self._last = now
        reason = self._reason(backlog_bytes)
        if reason:
            # Said again each time: a router that restarted has forgotten it.
            self._set(0, reason)
        elif self._applied is None:
            # Whoever recorded before may have been killed while capture was suspended.
            self._set(self.percent, "recording")
        elif self._applied == 0 and backlog_bytes < self.max_backlog_bytes // 4:
            self._set(self.percent, "the backlog is taken")

    def _reason(self, backlog_bytes: int) -> str | None:
        if backlog_bytes > self.max_backlog_bytes:
            return f"backlog of {backlog_bytes} bytes"
        stats = self._stats()
        self.metrics.dropped.set(stats.get("write_failed", 0))
        if (buffered := stats.get("write_total_buffered", 0)) > self.max_buffered_bytes:
            return f"the router holds {buffered} bytes: its disk hangs"
        for folder in self.folders:
            usage = shutil.disk_usage(folder)
            if usage.free < min(self.min_free_bytes, usage.total * self.min_free_share):
                return f"{usage.free} bytes free on the disk of {folder}"
        return None

    def _stats(self) -> dict[str, int]:
        """The router's `filesystem.*`; none when it is away, and then it buffers nothing."""
        try:
            reply = self.client.get("/stats", params={"filter": "^filesystem.write_"})
            lines = reply.raise_for_status().text.splitlines()
            pairs = [line.removeprefix("filesystem.").split(": ") for line in lines]
            return {name: int(value) for name, value in pairs}
        except (httpx.HTTPError, ValueError):
            return {}

    def _set(self, percent: int, reason: str) -> None:
        try:
            set_capture_percent(self.client, percent)
        except httpx.HTTPError as error:
            logger.debug("capture could not be set to %d %%: %s", percent, error)
            return
        if self._applied != percent:
            logger.warning("capture at %d %%: %s", percent, reason)
        self._applied = percent


def run(settings: Settings, stop: threading.Event) -> None:
    """Records until `stop` is set, then drains.

    Raises:
        Conflict: `recorder.running`.
        Permanent: from `load_specs`, `Store` or `Spool`.
    """
    store = Store(settings.store)
    specs = load_specs(settings.models_dir, settings.profile)
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    active = capture_log(settings)
    with (
        exclusive(active.parent),
        httpx.Client(base_url=admin_url(settings), timeout=1.0, trust_env=False) as client,
    ):
        spool = Spool(active, settings.run_dir / "recorder.json", lambda: _reopen(client))
        writer = Writer(
            store, specs, settings.key_secret(), metrics, active.with_name("unparsable.txt")
        )
        store.root.mkdir(parents=True, exist_ok=True)
        guard = Guard(client, metrics, (store.root, active.parent), settings.capture_percent)
        server, thread = start_http_server(
            settings.recorder_metrics_port, addr=settings.bind, registry=registry
        )
        logger.info("recording %s into %s", active, store.root)
        try:
            gathered, gather = 0, 1
            while True:
                last = stop.wait(TURN_S)
                gathered += 1
                try:
                    if last or gathered >= gather or spool.backlog_bytes() >= MAX_BATCH_BYTES:
                        gather = gather_turns(_take(spool, writer), gathered)
                        gathered = 0
                    metrics.unparsable.labels(Reason.LINE).inc(spool.rotate())
                except OSError as error:
                    # A full disk, most likely. Nothing is lost: it is all taken again.
                    metrics.failures.inc()
                    logger.warning("nothing was recorded: %s", error)
                backlog = spool.backlog_bytes()
                metrics.backlog_bytes.set(backlog)
                guard.check(backlog)
                if last:
                    return
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


def _take(spool: Spool, writer: Writer) -> int:
    """Writes all that is there; returns how many lines it was."""
    lines = 0
    for batch in spool.batches():
        writer.write(batch)
        spool.commit(batch)
        lines += len(batch.lines)
    return lines


def _reopen(client: httpx.Client) -> None:
    try:
        client.post("/reopen_logs").raise_for_status()
    except httpx.HTTPError as error:
        logger.warning("the router did not reopen its log, asking again: %s", error)


if __name__ == "__main__":
    sys.exit(run_service(run))
