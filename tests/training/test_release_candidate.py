"""Evaluation, export and publishing, through the path that serves."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from perennial.errors import Conflict, Permanent
from perennial.store import MANIFEST, Store, is_published, read_manifest, verify
from tests.support.training import wait_for_process, wait_until_gone, write_model
from tests.training.conftest import World
from training import export as exporting
from training.evaluate import EvaluationResult, evaluate
from training.export import ExportResult, evaluate_and_export, export, publish
from training.job import Answer
from training.process import child_environment, dump_spec
from training.supervisor import train

Released = tuple[EvaluationResult, ExportResult]
EVALUATE = """
import json, sys
from perennial.store import Store
from training.process import restore_spec
from training.evaluate import evaluate
content = json.loads(sys.argv[1])
evaluate(restore_spec(content), Store(content["store"]), "first", champion_version=1)
"""


def test_a_first_model_is_judged_by_its_bounds(world: World, released: Released) -> None:
    evaluation, _ = released
    assert evaluation.passed
    assert evaluation.champion is None
    assert evaluation.rows == 450
    assert [gate.metric for gate in evaluation.gates] == ["log_loss", "auc"]
    candidate, baseline = evaluation.candidate, evaluation.baseline
    assert candidate["log_loss"] < baseline["log_loss"] - 0.05
    assert candidate["auc"] > 0.75
    assert {s.level for s in evaluation.slices} == {"Aarhus", "Bern", "Cork", "Düsseldorf"}
    assert sum(s.rows for s in evaluation.slices) == 450
    assert evaluate(world.spec, world.store, "first", champion_version=None) == evaluation


def test_the_export_serves_what_was_trained_from_int8(world: World, released: Released) -> None:
    _, exported = released
    assert (exported.compression, exported.kept_float32_because) == ("int8", "")
    assert exported.size_ratio < 1
    assert 0 < exported.max_abs_error < 0.02
    assert exported.accuracy_loss <= 0.005
    manifest = verify(exported.path)
    assert manifest.facts["inputs"] == ["amount", "city", "email", "hour", "member"]
    assert manifest.facts["warm_up_records"] == 4
    assert manifest.facts["output"] == "click"
    assert (exported.path / "assets.extra" / "tf_serving_warmup_requests").stat().st_size > 0
    assert export(world.spec, world.store, "first") == exported


def test_int8_that_fails_a_gate_is_not_kept_and_it_says_so(
    world: World, released: Released, tmp_path: Path
) -> None:
    _, exported = released
    spec = write_model(tmp_path / "models", export={"max_size_ratio": 0.01})
    store = Store(f"file://{tmp_path / 'store'}")
    for episode in ("first", "second"):
        shutil.copytree(world.store.snapshot("clicks", "first"), store.snapshot("clicks", episode))
    trained = np.linspace(0.1, 0.9, 450, dtype=np.float32)
    answer = Answer(
        folder=tmp_path,
        predictions={"trained": trained, "none": trained, "int8": trained + 0.001},
        savedmodels={"int8": exported.path, "none": exported.path},
        facts={n: {"latency_ms": {}, "warm_up_records": 4, "inputs": []} for n in ("int8", "none")},
    )
    result = exporting.conclude(spec, store, "first", answer)
    assert result.compression == "none"
    assert result.kept_float32_because == (
        "its size is 1.00 of float32, export.max_size_ratio is 0.01"
    )

    answer.predictions["none"] = trained + 0.01
    with pytest.raises(Permanent, match=r"differs from the trained one by 0\.01") as caught:
        exporting.conclude(spec, store, "second", answer)
    assert caught.value.code == "export.skew"


def test_publishing_takes_a_version_once(world: World, released: Released) -> None:
    _, exported = released
    path = publish(world.spec, world.store, "first", 1)
    assert path == world.store.version("clicks", 1)
    manifest = verify(path)
    assert manifest.parents["episode"] == "first"
    assert manifest.facts["compression"] == "int8"
    assert manifest.facts["version"] == 1
    assert publish(world.spec, world.store, "first", 1) == path
    names = {p.name for p in world.store.versions("clicks").iterdir()}
    assert names == {"1"}

    shutil.copytree(exported.path, world.store.export("clicks", "copy"))
    with pytest.raises(Conflict, match="published by episode first") as caught:
        publish(world.spec, world.store, "copy", 1)
    assert caught.value.code == "publish.version_taken"
    with pytest.raises(ValueError, match="version 0"):
        publish(world.spec, world.store, "first", 0)


def test_a_corrupt_export_is_not_published(world: World, released: Released) -> None:
    _, exported = released
    corrupt = world.store.export("clicks", "corrupt")
    shutil.copytree(exported.path, corrupt)
    weights = next((corrupt / "variables").glob("variables.data*"))
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    with pytest.raises(Permanent, match=r"variables\.data") as caught:
        publish(world.spec, world.store, "corrupt", 2)
    assert caught.value.code == "store.checksum"
    assert not world.store.version("clicks", 2).exists()

    (corrupt / MANIFEST).unlink()
    with pytest.raises(Permanent) as caught:
        publish(world.spec, world.store, "corrupt", 2)
    assert caught.value.code == "store.unpublished"


def test_a_candidate_of_shuffled_labels_does_not_pass_against_the_champion(
    world: World, released: Released, tmp_path: Path
) -> None:
    publish(world.spec, world.store, "first", 1)
    spec = write_model(
        tmp_path, training={"strategy": "one_device"}, evaluation={"slice_max_regression": 0.05}
    )
    world.prepare("drill", spec, shuffle_labels=True)
    train(spec, world.store, "drill")
    evaluation, exported = evaluate_and_export(spec, world.store, "drill", champion_version=1)
    assert exported is None
    assert not evaluation.passed
    assert evaluation.champion_version == 1
    assert evaluation.champion is not None
    assert any("auc" in reason for reason in evaluation.reasons)
    assert read_manifest(evaluation.path).parents["version"] == "1"
    # An override finds its export; no version was published.
    assert is_published(world.store.export("clicks", "drill"))
    assert not world.store.version("clicks", 2).exists()


def test_a_job_dies_with_its_caller(world: World, released: Released) -> None:
    publish(world.spec, world.store, "first", 1)
    content = {**dump_spec(world.spec), "store": f"file://{world.store.root}"}
    with subprocess.Popen(
        [sys.executable, "-c", EVALUATE, json.dumps(content)], env=child_environment()
    ) as caller:
        job = wait_for_process("training.job", str(world.store.root))
        caller.kill()
    wait_until_gone([job])
