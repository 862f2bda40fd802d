"""The private TensorFlow calls of the embedded server: fails loudly when one of them moves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2

from serving.embedded import session as tf_session
from serving.embedded.servable import LoadOptions, Servable
from serving.embedded.status import Code, StatusError
from serving.embedded.tensors import fill, to_array
from serving.embedded.warmup import FILE, warm_up

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex64", "bool"),
    *("int8", "uint8", "int32", "int64", "uint64"),
)


def load(folder: Path) -> tf_session.Session:
    return tf_session.load(folder)


def test_the_fast_path_is_where_it_was() -> None:
    assert tf.__version__.startswith("2.21."), "look at serving/embedded/session.py again"
    assert callable(tf.compat.v1.Session._make_callable_from_options)


def test_a_callable_runs_in_the_callers_thread_and_keeps_the_runtimes_errors(
    exports: Path,
) -> None:
    session = load(exports / "mixed" / "1")
    signature = session.signatures["serving_default"]
    feeds = tuple(signature.inputs[alias].name for alias in ("x", "k", "s"))
    fetches = tuple(signature.outputs[alias].name for alias in ("total", "echo"))
    run = session.callable(feeds, fetches)

    total, echo = run(np.float32([1, 2]), np.int64([3, 4]), np.array([b"a", b"b"], object))

    np.testing.assert_array_equal(total, np.float32([5, 8]))
    assert list(echo) == [b"a!", b"b!"]
    with pytest.raises(tf.errors.InvalidArgumentError, match="Incompatible shapes"):
        run(np.float32([1, 2, 3]), np.int64([3, 4]), np.array([b"a"], object))
    session.close()


@pytest.mark.parametrize(
    ("folder", "tags", "code", "message"),
    [
        ("nowhere", ("serve",), Code.NOT_FOUND, "does not appear to contain a SavedModel bundle"),
        ("affine/1", ("gpu",), Code.NOT_FOUND, "Could not find meta graph def matching"),
        ("corrupt", ("serve",), Code.OUT_OF_RANGE, "Read less bytes than requested"),
    ],
)
def test_load_failures_have_the_real_servers_code_and_words(
    exports: Path, folder: str, tags: tuple[str, ...], code: Code, message: str
) -> None:
    with pytest.raises(StatusError, match=message) as caught:
        tf_session.load(exports / folder, tags=tags)

    assert caught.value.code == code


def test_garbage_is_no_savedmodel(tmp_path: Path) -> None:
    (tmp_path / "saved_model.pb").write_bytes(b"\xff" * 100)

    with pytest.raises(StatusError, match=str(tmp_path)) as caught:
        load(tmp_path)

    assert caught.value.code == Code.DATA_LOSS


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("as_content", [False, True])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)])
def test_tensors_survive_the_wire(dtype: str, as_content: bool, shape: tuple[int, ...]) -> None:
    kind = tf.dtypes.as_dtype(dtype)
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind.as_numpy_dtype)
    tensor = tensor_pb2.TensorProto()

    fill(tensor, array, kind.as_datatype_enum, as_content=as_content)
    again = tensor_pb2.TensorProto.FromString(tensor.SerializeToString())

    np.testing.assert_array_equal(to_array(again), array)
    np.testing.assert_array_equal(tf.make_ndarray(again), array)


def test_strings_in_tensor_content() -> None:
    tensor = tensor_pb2.TensorProto(dtype=7, tensor_content=b"\x02\x00\x81\x01ab" + b"c" * 129)
    tensor.tensor_shape.dim.add().size = 3

    assert list(to_array(tensor)) == [b"ab", b"", b"c" * 129]

    tensor.tensor_content = tensor.tensor_content[:-1]
    with pytest.raises(ValueError, match="do not add up"):
        to_array(tensor)


def record(x: float, *, alias: str = "x") -> bytes:
    from tensorflow_serving.apis import prediction_log_pb2

    log = prediction_log_pb2.PredictionLog()
    log.predict_log.request.model_spec.name = "whatever"
    log.predict_log.request.inputs[alias].CopyFrom(tf.make_tensor_proto([x]))
    return bytes(log.SerializeToString())


def test_warm_up_replays_records_and_a_failing_one_fails_the_load(
    exports: Path, tmp_path: Path
) -> None:
    servable = Servable.load("affine", 1, exports / "affine" / "1", LoadOptions())
    assert warm_up(servable, tmp_path) == 0
    (tmp_path / FILE).parent.mkdir()

    with tf.io.TFRecordWriter(str(tmp_path / FILE)) as writer:
        writer.write(record(1.0))
        writer.write(record(2.0))
    assert warm_up(servable, tmp_path, iterations=3) == 2

    with tf.io.TFRecordWriter(str(tmp_path / FILE)) as writer:
        writer.write(record(1.0, alias="unknown"))
    with pytest.raises(StatusError, match="Signature input alias"):
        warm_up(servable, tmp_path)

    (tmp_path / FILE).write_bytes(b"not a TFRecord file at all")
    with pytest.raises(StatusError, match="in TFRecord format") as caught:
        warm_up(servable, tmp_path)
    assert caught.value.code == Code.DATA_LOSS
    servable.retire()


def test_a_retired_version_refuses_and_waits_for_none(exports: Path) -> None:
    servable = Servable.load("affine", 1, exports / "affine" / "1", LoadOptions())
    servable.retire()

    with pytest.raises(StatusError, match=r"Specific\(affine, 1\)"):
        servable.__enter__()
