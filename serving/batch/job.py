"""A batch job: one version over some files, into one published folder.

While it runs, it works in `.<name>.batch` beside the output: the job's terms, copied CSV files, and
a folder per shard, each published whole. A job that was killed goes on there with the shards that
are missing; what is published is never written again. At the end all shards are linked into one
folder with a manifest, which appears at once:

    <output>/manifest.json          what, from what, by which version, and how many rows
    <output>/part-00000.parquet     the key columns, input, row, model, version, score
    <output>/bad/part-00000.parquet the key columns, input, row, reason; only if there are any
"""

from __future__ import annotations

import fcntl
import glob
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from perennial.errors import Conflict, PerennialError, Permanent
from perennial.records import Manifest
from perennial.spec import ModelSpec
from perennial.store import Store, is_published, publishing, read_manifest, verify, write_atomic
from serving.batch.rows import SUFFIXES, Shard, copy_csv, key_columns

logger = logging.getLogger(__name__)

SHARD_ROWS: Final = 20_000
"""Rows that are in memory at a time, and that a killed job may have to predict again."""
COPY: Final = "rows.parquet"


@dataclass(frozen=True)
class BatchResult:
    """What a job has published.

    Attributes:
        rows: of all inputs; `scored` of them have a score, `bad` have a reason.
        resumed: shards that an earlier, killed run of the job had published.
    """

    output: Path
    model: str
    version: int
    rows: int
    scored: int
    bad: int
    shards: int
    resumed: int


@dataclass(frozen=True)
class _Terms:
    """What a job was asked to do; one that goes on must have been asked the same."""

    model: str
    version: int
    spec_hash: str
    shard_rows: int
    inputs: list[dict[str, Any]]


def batch_predict(
    spec: ModelSpec,
    store: Store,
    inputs: Sequence[str],
    output: Path,
    *,
    version: int | None,
    champion: int | None = None,
    shard_rows: int = SHARD_ROWS,
) -> BatchResult:
    """Predicts every row of the inputs; returns what is published when it is already there.

    Args:
        inputs: Parquet and CSV files, patterns of them, or folders that hold them.
        version: of the model; None: the one that a killed run began with, else `champion`.
        champion: the version that serves now.

    Raises:
        Permanent: `batch.input`, `batch.columns`, `batch.output`, `batch.terms`, `batch.version`,
            `batch.signature`, or from `verify`.
        Conflict: `batch.running`, while another process works on the same output.
    """
    output = output.absolute()
    work = output.with_name(f".{output.name}.batch")
    files = find_inputs(inputs)
    if output.exists() and not is_published(output) and (output.is_file() or any(output.iterdir())):
        raise Permanent(
            "batch.output",
            f"{output} exists and was not published by a batch job",
            hint="name a folder that does not exist yet",
        )
    with _alone(work):
        before = _published(output) or _begun(work)
        version = version or (before.version if before else None) or champion
        if version is None:
            raise Permanent(
                "batch.version",
                f"{spec.name} has no champion",
                hint="name a version: --version N",
            )
        terms = _Terms(spec.name, version, spec.spec_hash, shard_rows, _stamps(files))
        _check_same(before, terms, output)
        if is_published(output):
            shutil.rmtree(work, ignore_errors=True)
            return _result(output, resumed=read_manifest(output).facts["shards"])
        _sweep(output)
        write_atomic(work / "terms.json", json.dumps(asdict(terms), indent=1).encode())
        try:
            _check_version(store, spec.name, version)
            shards = list(_shards(spec, files, work, shard_rows))
            missing = [s for s in shards if not is_published(work / "shards" / f"{s.index:05d}")]
            logger.info("%s: %d of %d shards to predict", output, len(missing), len(shards))
            if missing:
                folder = store.version(spec.name, version)
                _predict(spec, version, folder, missing, work / "shards")
        except Permanent:
            # What can't begin shall not bind the next attempt to its terms.
            if not (work / "shards").exists():
                shutil.rmtree(work)
            raise
        _publish(output, terms, shards, work)
        shutil.rmtree(work, ignore_errors=True)
    return _result(output, resumed=len(shards) - len(missing))


def find_inputs(inputs: Sequence[str]) -> list[Path]:
    """The files that paths, patterns and folders name, each once, in order of their names.

    Raises:
        Permanent: `batch.input`, for one that names nothing, or a file of another kind.
    """
    found: dict[Path, None] = {}
    for given in inputs:
        path = Path(given)
        if path.is_dir():
            paths = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
        else:
            # Path.glob takes no absolute pattern.
            paths = [path] if path.exists() else [Path(p) for p in sorted(glob.glob(given))]  # noqa: PTH207
        if not paths:
            raise Permanent("batch.input", f"{given}: no such file, and no pattern of one")
        for one in paths:
            if one.suffix not in SUFFIXES:
                raise Permanent("batch.input", f"{one}: neither .parquet nor .csv")
            found[one.absolute()] = None
    return list(found)


@contextmanager
def _alone(work: Path) -> Iterator[None]:
    """Holds the job's folder; it is let go with the process."""
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Conflict(
            "batch.running", f"another process works on {work}", hint="wait until it has ended"
        ) from None
    else:
        yield
    finally:
        os.close(descriptor)
        # An empty folder is no job.
        if work.exists() and not any(work.iterdir()):
            work.rmdir()


def _sweep(output: Path) -> None:
    """Removes what a run that was killed while it published has left beside the output."""
    form = re.compile(rf"tmp-{re.escape(output.name)}-[0-9a-f]{{12}}")
    for path in output.parent.iterdir():
        if form.fullmatch(path.name):
            shutil.rmtree(path)


def _published(output: Path) -> _Terms | None:
    if not is_published(output):
        return None
    manifest = read_manifest(output)
    if manifest.kind != "batch":
        raise Permanent(
            "batch.output",
            f"{output} is a published {manifest.kind}",
            hint="name a folder that does not exist yet",
        )
    return _Terms(**manifest.facts["terms"])


def _begun(work: Path) -> _Terms | None:
    path = work / "terms.json"
    return _Terms(**json.loads(path.read_text())) if path.exists() else None


def _check_same(before: _Terms | None, now: _Terms, output: Path) -> None:
    if before is None or before == now:
        return
    was, wanted = asdict(before), asdict(now)
    different = [name for name in was if was[name] != wanted[name]]
    raise Permanent(
        "batch.terms",
        f"{output} belongs to another job: {', '.join(different)} "
        f"{'differs' if len(different) == 1 else 'differ'}",
        hint="name another output; or, to begin anew, remove it and "
        f"{output.with_name(f'.{output.name}.batch')}",
        was={name: was[name] for name in different},
        wanted={name: wanted[name] for name in different},
    )


def _check_version(store: Store, model: str, version: int) -> None:
    """The version's files are there and are those that were published."""
    folder = store.version(model, version)
    if not folder.is_dir():
        there = sorted(int(p.name) for p in store.versions(model).glob("[0-9]*"))
        raise Permanent(
            "batch.version",
            f"{model} has no version {version} in {store.versions(model)}",
            hint=f"versions there: {', '.join(map(str, there)) or 'none'}",
        )
    if is_published(folder):
        verify(folder)


def _stamps(files: list[Path]) -> list[dict[str, Any]]:
    stamps = []
    for path in files:
        found = path.stat()
        stamps.append(
            {"path": str(path), "size_bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
        )
    return stamps


def _shards(spec: ModelSpec, files: list[Path], work: Path, shard_rows: int) -> Iterator[Shard]:
    index = 0
    for number, source in enumerate(files):
        path = source
        if source.suffix == ".csv":
            path = _copied(spec, source, work / "copies" / f"{number:05d}") / COPY
        try:
            schema, rows = pq.read_schema(path), pq.read_metadata(path).num_rows
        except (OSError, pa.ArrowException) as error:
            reason = " ".join(str(error).split())
            raise Permanent("batch.input", f"{source}: {reason}") from error
        keys = key_columns(spec, schema.names, str(source))
        for start in range(0, rows, shard_rows):
            stop = min(start + shard_rows, rows)
            yield Shard(index, str(path), str(source), start, stop, keys)
            index += 1


def _copied(spec: ModelSpec, source: Path, target: Path) -> Path:
    if not is_published(target):
        with publishing(target, kind="batch_copy", model=spec.name, id=target.name) as (
            folder,
            facts,
        ):
            facts.update(source=str(source), rows=copy_csv(source, folder / COPY))
    return target


def _predict(
    spec: ModelSpec, version: int, folder: Path, shards: list[Shard], target: Path
) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        with _quiet_beam():
            from serving.batch import pipeline

            pipeline.run(pipeline.Model(spec, version, folder), shards, target)
    except Exception as error:
        # Beam wraps what a step raises.
        if (own := _own_error(error)) is None:
            raise
        raise own from error


@contextmanager
def _quiet_beam() -> Iterator[None]:
    """Keeps Beam's warnings on the root logger apart: libraries of clouds that nobody asked for."""

    def is_wanted(record: logging.LogRecord) -> bool:
        return "apache_beam" not in record.pathname or record.levelno > logging.WARNING

    root = logging.getLogger()
    root.addFilter(is_wanted)
    try:
        yield
    finally:
        root.removeFilter(is_wanted)


def _own_error(error: BaseException | None) -> PerennialError | None:
    while error is not None:
        if isinstance(error, PerennialError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _publish(output: Path, terms: _Terms, shards: list[Shard], work: Path) -> None:
    with publishing(
        output,
        kind="batch",
        model=terms.model,
        id=output.name,
        parents={"version": str(terms.version)},
    ) as (folder, facts):
        counts = {"rows": 0, "scored": 0, "bad": 0}
        for shard in shards:
            done = work / "shards" / f"{shard.index:05d}"
            own = verify(done).facts
            counts = {name: count + own[name] for name, count in counts.items()}
            name = f"part-{shard.index:05d}.parquet"
            os.link(done / "scores.parquet", folder / name)
            if own["bad"]:
                (folder / "bad").mkdir(exist_ok=True)
                os.link(done / "bad.parquet", folder / "bad" / name)
        facts.update(counts, version=terms.version, shards=len(shards), terms=asdict(terms))


def _result(output: Path, *, resumed: int) -> BatchResult:
    manifest: Manifest = read_manifest(output)
    facts = manifest.facts
    return BatchResult(
        output=output,
        model=manifest.model,
        version=facts["version"],
        rows=facts["rows"],
        scored=facts["scored"],
        bad=facts["bad"],
        shards=facts["shards"],
        resumed=resumed,
    )
