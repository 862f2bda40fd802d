"""Batch prediction: the same scores as online, bad rows apart, nothing done twice."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from google.protobuf import text_format

from perennial.cli import batch as cli
from perennial.errors import Conflict, Permanent
from perennial.spec import ModelSpec
from perennial.store import Store, read_manifest, verify
from serving.batch.job import BatchResult, batch_predict
from tests.support.batch import REFUSED, publish_version
from tests.support.serving import Server
from tests.support.traffic import Process, eventually
from tests.support.training import clicks, write_model

FEATURES = ("city", "hour", "amount", "member", "email")


@dataclass(frozen=True)
class World:
    """A model with two versions: 1 and 2."""

    spec: ModelSpec
    store: Store
    models_dir: Path

    def run(self, inputs: Path | str, output: Path, **given: Any) -> BatchResult:
        settings: dict[str, Any] = {"version": 2, "shard_rows": 100, **given}
        return batch_predict(self.spec, self.store, [str(inputs)], output, **settings)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("batch")
    store = Store(f"file://{folder / 'home' / 'store'}")
    for version in (1, 2):
        publish_version(store, version, seed=version)
    return World(write_model(folder / "models"), store, folder / "models")


def parts(output: Path, folder: str = "") -> pa.Table:
    files = sorted((output / folder).glob("part-*.parquet"))
    return pa.concat_tables(pq.read_table(file) for file in files)


def online(server: Server, store: Store, table: pa.Table) -> np.ndarray:
    """The scores that the embedded server gives for the rows, in calls of 1, 7 and the rest."""
    import tensorflow as tf
    from tensorflow_serving.apis import (
        model_management_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_service_pb2_grpc,
    )

    with grpc.insecure_channel(server.target) as channel:
        reload = model_management_pb2.ReloadConfigRequest()
        text = f"""config {{ name: "clicks" base_path: "{store.versions("clicks")}"
            model_platform: "tensorflow" model_version_policy {{ specific {{ versions: 2 }} }} }}"""
        text_format.Parse(text, reload.config.model_config_list)
        model_service_pb2_grpc.ModelServiceStub(channel).HandleReloadConfigRequest(
            reload, timeout=60
        )
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        kinds = {"city": tf.string, "hour": tf.int64, "amount": tf.float32, "member": tf.bool}
        scores = []
        for start, stop in ((0, 1), (1, 8), (8, table.num_rows)):
            request = predict_pb2.PredictRequest()
            request.model_spec.name = "clicks"
            for name in FEATURES:
                values = table[name].slice(start, stop - start).to_pylist()
                kind = kinds.get(name, tf.string)
                request.inputs[name].CopyFrom(tf.make_tensor_proto(values, dtype=kind))
            reply = stub.Predict(request, timeout=60)
            assert reply.model_spec.version.value == 2
            scores.append(tf.make_ndarray(reply.outputs["click"]).reshape(-1))
    return np.concatenate(scores)


def test_batch_and_online_agree_to_1e_6(world: World, server: Server, tmp_path: Path) -> None:
    """Parquet and CSV of the same rows, against a running server."""
    table = clicks(500)
    pq.write_table(table, tmp_path / "rows.parquet", row_group_size=70)
    lines = [",".join(FEATURES)]
    lines += [",".join(str(row[n]) for n in FEATURES) for row in table.to_pylist()]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    wanted = online(server, world.store, table)
    assert wanted.std() > 0.05
    for name in ("rows.parquet", "rows.csv"):
        done = world.run(tmp_path / name, tmp_path / f"out-{name}")
        assert (done.rows, done.scored, done.bad, done.shards) == (500, 500, 0, 5)
        found = parts(done.output)
        assert found["row"].to_pylist() == list(range(500))
        assert np.abs(found["score"].to_numpy() - wanted).max() <= 1e-6


def test_each_row_says_who_predicted_it_and_which_row_it_is(world: World, tmp_path: Path) -> None:
    pq.write_table(clicks(250), tmp_path / "rows.parquet")
    done = world.run(tmp_path / "rows.parquet", tmp_path / "out", version=None, champion=1)
    assert done.version == 1
    assert [p.name for p in sorted(done.output.iterdir())] == [
        "manifest.json",
        *(f"part-{n:05d}.parquet" for n in range(3)),
    ]
    rows = parts(done.output)
    assert rows.column_names == [
        *("user", "clicked", "scheduled", "known"),
        *("input", "row", "model", "version", "score"),
    ]
    assert rows["user"].to_pylist() == clicks(250)["user"].to_pylist()
    assert set(rows["model"].to_pylist()) == {"clicks"}
    assert set(rows["version"].to_pylist()) == {1}
    assert set(rows["input"].to_pylist()) == {str(tmp_path / "rows.parquet")}
    facts = verify(done.output).facts
    assert (facts["rows"], facts["scored"], facts["version"]) == (250, 250, 1)
    assert read_manifest(done.output).parents == {"version": "1"}
    assert not (tmp_path / ".out.batch").exists()


BAD_LINES: Mapping[str, str | None] = {
    "Bern,1,2.5,true": None,
    "Bern,1,,false": None,
    "Bern,noon,2.5,true": "hour: 'noon' is no int",
    "Bern,1.5,2.5,true": "hour: '1.5' is no int",
    "Bern,1,much,true": "amount: 'much' is no float",
    "Bern,1,2.5,perhaps": "member: 'perhaps' is no bool",
    "Bern,,2.5,true": "hour: missing",
    "Bern,1": "the line has 2 fields, the header 4",
    "B\udce9rn,1,2.5,true": "the line is not UTF-8",
    f"{REFUSED},1,2.5,true": "the model: ",
    "Bern,-1,2.5,true": "the score is nan",
    "Cork,2,1e3,1": None,
}


def test_bad_rows_are_apart_with_their_reason(world: World, tmp_path: Path) -> None:
    """`email` is masked by the recorder and read by no model: its column may be absent."""
    text = "\n".join(["city,hour,amount,member", *BAD_LINES])
    (tmp_path / "rows.csv").write_bytes(text.encode(errors="surrogateescape"))
    done = world.run(tmp_path / "rows.csv", tmp_path / "out", shard_rows=1000)
    bad = {row["row"]: row["reason"] for row in parts(done.output, "bad").to_pylist()}
    wanted = {n: reason for n, reason in enumerate(BAD_LINES.values()) if reason}
    assert sorted(bad) == sorted(wanted)
    for row, reason in wanted.items():
        assert bad[row].startswith(reason)
    good = parts(done.output)
    assert good["row"].to_pylist() == [0, 1, 11]
    assert (done.rows, done.scored, done.bad) == (12, 3, 9)
    assert all(0 < score < 1 for score in good["score"].to_pylist())


def test_typed_columns_that_do_not_fit_are_bad_rows(world: World, tmp_path: Path) -> None:
    table = pa.table(
        {
            "city": ["Bern", None, "Bern", "Bern"],
            "hour": [1.0, 2.0, 2.5, float("nan")],
            "amount": [1, 2, 3, 4],
            "member": [True, False, True, True],
        }
    )
    pq.write_table(table, tmp_path / "rows.parquet")
    done = world.run(tmp_path / "rows.parquet", tmp_path / "out")
    assert [row["reason"] for row in parts(done.output, "bad").to_pylist()] == [
        "city: missing",
        "hour: '2.5' is no int",
        "hour: 'nan' is no int",
    ]


def test_sensitive_values_are_never_written(world: World, tmp_path: Path) -> None:
    pq.write_table(clicks(50), tmp_path / "rows.parquet")
    done = world.run(tmp_path / "rows.parquet", tmp_path / "out")
    assert "email" not in parts(done.output).column_names
    for path in done.output.rglob("*.parquet"):
        assert b"example.org" not in path.read_bytes()


def test_a_killed_job_goes_on_with_the_shards_that_are_missing(
    world: World, tmp_path: Path
) -> None:
    """Killed by SIGKILL; what it had published is linked into the output, not written again."""
    table, copies = clicks(20_000), 30
    total = copies * table.num_rows
    pq.write_table(pa.concat_tables([table] * copies), tmp_path / "rows.parquet")
    output, shards = tmp_path / "out", tmp_path / ".out.batch" / "shards"
    environment = {
        "PERENNIAL_HOME": str(world.store.root.parent),
        "PERENNIAL_MODELS_DIR": str(world.models_dir),
    }
    arguments = ["clicks", "--version", "2", "--json"]
    arguments += ["--input", str(tmp_path / "rows.parquet"), "--output", str(output)]
    command = [sys.executable, "-m", "perennial", "batch-predict", *arguments]

    def published() -> list[Path]:
        return sorted(shards.glob("[0-9]*/scores.parquet"))

    with Process(command, environment, tmp_path / "log") as process:
        eventually(lambda: len(published()) >= 3, "shards", deadline_s=150, every_s=0.01)
        with pytest.raises(Conflict, match="another process works"):
            world.run(tmp_path / "rows.parquet", output, shard_rows=20_000)
        process.kill()
    before = {path.parent.name: path.stat() for path in published()}
    assert 3 <= len(before) < copies
    assert not output.exists()
    left_over, another = tmp_path / f"tmp-out-{'0' * 12}", tmp_path / f"tmp-out-2-{'0' * 12}"
    left_over.mkdir()
    another.mkdir()

    done = CliRunner().invoke(cli.batch_predict, arguments, env=environment)
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert (answer["rows"], answer["scored"], answer["resumed"]) == (total, total, len(before))
    for index, stat in before.items():
        after = (output / f"part-{index}.parquet").stat()
        assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
    rows = parts(output)
    assert rows["row"].to_pylist() == list(range(total))
    scores = rows["score"].to_numpy().reshape(copies, table.num_rows)
    assert np.abs(scores - scores[0]).max() <= 1e-6
    verify(output)
    assert (left_over.exists(), another.exists()) == (False, True)


def test_a_resumed_job_keeps_its_version_and_its_terms(world: World, tmp_path: Path) -> None:
    """The champion moved between the kill and the next run: one output has one version."""
    pq.write_table(clicks(50), tmp_path / "rows.parquet")
    work = tmp_path / ".out.batch"
    world.run(tmp_path / "rows.parquet", tmp_path / "out", version=None, champion=1)
    again = world.run(tmp_path / "rows.parquet", tmp_path / "out", version=None, champion=2)
    assert (again.version, again.resumed, work.exists()) == (1, 1, False)
    with pytest.raises(Permanent, match="another job: version differs") as caught:
        world.run(tmp_path / "rows.parquet", tmp_path / "out", version=2)
    assert caught.value.code == "batch.terms"
    pq.write_table(clicks(51), tmp_path / "rows.parquet")
    with pytest.raises(Permanent, match="another job: inputs differs"):
        world.run(tmp_path / "rows.parquet", tmp_path / "out", version=None)


def test_a_version_that_was_changed_is_not_used(world: World, tmp_path: Path) -> None:
    publish_version(world.store, 7)
    (world.store.version("clicks", 7) / "saved_model.pb").write_bytes(b"")
    pq.write_table(clicks(5), tmp_path / "rows.parquet")
    with pytest.raises(Permanent, match=r"saved_model.pb has 0 bytes") as caught:
        world.run(tmp_path / "rows.parquet", tmp_path / "out", version=7)
    assert caught.value.code == "store.checksum"


def test_what_cannot_be_done_says_why(world: World, tmp_path: Path) -> None:
    rows, taken = tmp_path / "rows.parquet", tmp_path / "taken"
    pq.write_table(clicks(5), rows)
    pq.write_table(clicks(5).drop_columns(["city"]), tmp_path / "narrow.parquet")
    pq.write_table(clicks(5).append_column("score", [[0.0] * 5]), tmp_path / "clash.parquet")
    (tmp_path / "broken.parquet").write_text("no parquet")
    (tmp_path / "twice.csv").write_text("city,city\n1,2\n")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "other.txt").write_text("")
    taken.mkdir()
    (taken / "precious").write_text("not ours")
    out = tmp_path / "out"
    cases: list[tuple[str | Path, Path, dict[str, Any], str, str]] = [
        (tmp_path / "no*.parquet", out, {}, "batch.input", "no such file"),
        (tmp_path / "other.txt", out, {}, "batch.input", "neither .parquet nor .csv"),
        (tmp_path / "broken.parquet", out, {}, "batch.input", "broken.parquet"),
        (tmp_path / "twice.csv", out, {}, "batch.input", "no set of names"),
        (tmp_path / "empty.csv", out, {}, "batch.input", "no set of names"),
        (tmp_path / "narrow.parquet", out, {}, "batch.columns", "lacks city"),
        (tmp_path / "clash.parquet", out, {}, "batch.columns", "uses itself: score"),
        (rows, taken, {}, "batch.output", "was not published by a batch job"),
        (rows, world.store.version("clicks", 1), {}, "batch.output", "is a published version"),
        (rows, out, {"version": 9}, "batch.version", "has no version 9"),
        (rows, out, {"version": None}, "batch.version", "has no champion"),
    ]
    for source, output, given, code, says in cases:
        with pytest.raises(Permanent, match=says) as caught:
            world.run(source, output, **given)
        assert caught.value.code == code
        assert not output.with_name(f".{output.name}.batch").exists()
    assert (taken / "precious").read_text() == "not ours"
    assert not out.exists()


def test_a_model_yaml_of_another_version_is_refused(world: World, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", data={"output": "tap"})
    pq.write_table(clicks(5), tmp_path / "rows.parquet")
    with pytest.raises(Permanent, match=r"model\.yaml says") as caught:
        batch_predict(
            other, world.store, [str(tmp_path / "rows.parquet")], tmp_path / "out", version=1
        )
    assert caught.value.code == "batch.signature"


def test_a_folder_of_files_and_none_of_its_rows(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    pq.write_table(clicks(0), folder / "a.parquet")
    pq.write_table(clicks(30), folder / "b.parquet")
    (folder / "c.csv").write_text("city,hour,amount,member\nBern,1,2,true\n")
    (folder / "README").write_text("not read")
    done = world.run(folder, tmp_path / "out")
    assert (done.rows, done.shards) == (31, 2)
    (folder / "b.parquet").unlink()
    (folder / "c.csv").unlink()
    none = world.run(folder, tmp_path / "none")
    assert (none.rows, none.shards) == (0, 0)
    assert read_manifest(none.output).kind == "batch"
