"""The parts that need no TensorFlow: record format, checkpoints, metrics, gates, health."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from perennial.errors import Permanent
from perennial.spec import Evaluation
from training import checkpoint, gate
from training.health import Patience, find_hung
from training.metrics import metric, metrics_of
from training.tfrecord import masked_crc32c, write_records


def test_crc32c_gives_the_published_check_value() -> None:
    masked = int(masked_crc32c(np.frombuffer(b"123456789", np.uint8)[None])[0])
    rotated = (masked - 0xA282EAD8) & 0xFFFFFFFF
    assert (rotated >> 17 | rotated << 15) & 0xFFFFFFFF == 0xE3069283


def test_records_are_framed(tmp_path: Path) -> None:
    write_records(tmp_path / "r", np.frombuffer(b"abcdef", np.uint8).reshape(2, 3))
    content = (tmp_path / "r").read_bytes()
    assert len(content) == 2 * (8 + 4 + 3 + 4)
    assert content[:8] == (3).to_bytes(8, "little")
    assert content[12:15] == b"abc"
    assert content[31:34] == b"def"


def test_checkpoints_are_kept_few_and_a_broken_one_is_passed_over(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint.save(tmp_path, step, {"dense/kernel": np.full((2, 2), step, "f4")}, keep=2)
    assert [p.name for p in checkpoint.saved(tmp_path)] == [
        "step-000000020.npz",
        "step-000000030.npz",
    ]
    newest = checkpoint.saved(tmp_path)[-1]
    newest.write_bytes(newest.read_bytes()[:100])
    found = checkpoint.latest(tmp_path)
    assert found is not None
    step, values = checkpoint.load(found)
    assert step == 20
    assert values["dense/kernel"].tolist() == [[20, 20], [20, 20]]


def test_a_weight_hash_sees_one_bit_and_ignores_the_optimizer() -> None:
    weights = {"a": np.ones(3, "f4"), "optimizer/first_moment": np.ones(3, "f4")}
    same = checkpoint.weights_sha256({**weights, "optimizer/first_moment": np.zeros(3, "f4")})
    assert checkpoint.weights_sha256(weights) == same
    nudged = {"a": np.nextafter(np.ones(3, "f4"), np.float32(2))}
    assert checkpoint.weights_sha256(nudged) != same


def test_shapes_that_differ_are_named() -> None:
    own = {"a": np.zeros((2, 3)), "b": np.zeros(1)}
    with pytest.raises(Permanent, match=r"b is missing; c is not in the model; a has shape \[9\]"):
        checkpoint.check_shapes(
            own, {"a": np.zeros(9), "c": np.zeros(1)}, code="x.y", what="the parent"
        )


def test_metrics_against_values_worked_out_by_hand() -> None:
    labels, predicted = np.array([0.0, 0, 1, 1]), np.array([0.1, 0.4, 0.4, 0.8])
    found = metrics_of("binary", labels, predicted)
    assert found["auc"] == pytest.approx(0.875)
    assert found["brier"] == pytest.approx((0.01 + 0.16 + 0.36 + 0.04) / 4)
    assert found["accuracy"] == pytest.approx(0.75)
    expected = -(math.log(0.9) + math.log(0.6) + math.log(0.4) + math.log(0.8)) / 4
    assert found["log_loss"] == pytest.approx(expected)
    assert metrics_of("regression", labels, labels + 2) == {"mae": 2.0, "rmse": 2.0}


def test_undefined_metrics_are_nan_and_never_an_error() -> None:
    assert math.isnan(metric("auc", np.ones(3), np.array([0.1, 0.2, 0.3])))
    assert math.isnan(metric("log_loss", np.ones(2), np.array([0.1, math.nan])))
    assert math.isnan(metric("mae", np.empty(0), np.empty(0)))
    assert metric("log_loss", np.array([1.0]), np.array([0.0])) < 20


GATES = Evaluation.model_validate(
    {
        "gates": [
            {"metric": "log_loss", "max_regression": 0.01, "bound": 0.6},
            {"metric": "auc", "max_regression": 0.01},
        ]
    }
)


@pytest.mark.parametrize(
    ("candidate", "champion", "passed"),
    [
        ((0.50, 0.70), None, (True, True)),
        ((0.61, 0.70), None, (False, True)),
        ((0.50, 0.70), (0.50, 0.70), (True, True)),
        ((0.65, 0.70), (0.66, 0.70), (False, True)),
        ((0.505, 0.695), (0.50, 0.70), (True, True)),
        ((0.52, 0.70), (0.50, 0.70), (False, True)),
        ((0.50, 0.68), (0.50, 0.70), (True, False)),
        ((math.nan, 0.70), (0.50, 0.70), (False, True)),
        ((0.50, 0.70), (math.nan, 0.70), (False, True)),
        ((math.inf, math.nan), None, (False, False)),
    ],
)
def test_the_gate(
    candidate: tuple[float, float],
    champion: tuple[float, float] | None,
    passed: tuple[bool, bool],
) -> None:
    names = ("log_loss", "auc")
    results = gate.judge(
        GATES,
        dict(zip(names, candidate, strict=True)),
        dict(zip(names, champion, strict=True)) if champion else None,
    )
    assert tuple(result.passed for result in results) == passed
    assert all(result.says for result in results)


def test_a_gate_on_a_metric_of_another_kind_of_label_fails_with_a_reason() -> None:
    evaluation = Evaluation.model_validate({"gates": [{"metric": "mae"}]})
    (result,) = gate.judge(evaluation, {"auc": 0.7}, None)
    assert not result.passed
    assert "not a metric of this kind of label" in result.says


def test_silence_is_borne_for_a_while() -> None:
    patience = Patience(start_s=100, beat_s=10)
    assert find_hung({}, 0, 99, 2, patience) is None
    assert "worker 0 gave no sign" in (find_hung({}, 0, 101, 2, patience) or "")
    assert find_hung({0: 95, 1: 95}, 0, 104, 2, patience) is None
    assert "worker 1 has been silent" in (find_hung({0: 104, 1: 95}, 0, 106, 2, patience) or "")
