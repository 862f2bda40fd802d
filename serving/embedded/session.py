"""Every private call into TensorFlow, in one place.

TensorFlow 2.21 offers no public way to run a SavedModel as the C++ server does: `Session.run` and
`signatures[...]` cost 10 to 20 times more per call on a small model and make other checks. A
callable made from `CallableOptions` with `inter_op_thread_pool = -1` runs in the caller's thread,
releases the GIL and raises the C++ error. tests/serving/test_session.py fails when that moves.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import graph_pb2
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow.python.client import pywrap_tf_session as tf_session

from serving.embedded.status import Code, StatusError

logging.getLogger("tensorflow").setLevel(logging.ERROR)

_LOOPS = frozenset({"While", "StatelessWhile", "For", "NextIteration"})

Run = Callable[..., list[np.ndarray]]


class Session:
    """One loaded SavedModel.

    Attributes:
        signatures: the SavedModel's SignatureDefs by name.
        has_loops: whether a run's duration may depend on the values that are fed.
    """

    def __init__(
        self, session: tf.compat.v1.Session, meta_graph: meta_graph_pb2.MetaGraphDef
    ) -> None:
        self._session = session
        self.signatures: Mapping[str, meta_graph_pb2.SignatureDef] = dict(meta_graph.signature_def)
        self.has_loops = _has_loops(meta_graph.graph_def)

    def callable(self, feeds: tuple[str, ...], fetches: tuple[str, ...]) -> Run:
        """A new function from arrays, in the order of `feeds`, to arrays in that of `fetches`.

        It raises `tf.errors.OpError` with the runtime's own code and message, and so does this.
        """
        options = config_pb2.CallableOptions(feed=feeds, fetch=fetches)
        options.run_options.inter_op_thread_pool = -1
        return self._session._make_callable_from_options(options)

    def run_within(
        self,
        feeds: tuple[str, ...],
        fetches: tuple[str, ...],
        arrays: Sequence[np.ndarray],
        timeout_s: float,
    ) -> list[np.ndarray]:
        """As the callable, but ended by the runtime after `timeout_s` with DEADLINE_EXCEEDED.

        It runs in TensorFlow's threads: a run in the caller's thread cannot be ended.
        """
        options = config_pb2.RunOptions(timeout_in_ms=max(1, math.ceil(timeout_s * 1000)))
        buffer = tf_session.TF_NewBufferFromString(options.SerializeToString())
        try:
            return self._session._call_tf_sessionrun(
                buffer,
                {self._tf_output(name): array for name, array in zip(feeds, arrays, strict=True)},
                [self._tf_output(name) for name in fetches],
                [],
                None,
            )
        finally:
            tf_session.TF_DeleteBuffer(buffer)

    def _tf_output(self, name: str) -> Any:
        return self._session.graph.get_tensor_by_name(name)._as_tf_output()

    def close(self) -> None:
        self._session.close()


def load(
    folder: Path, *, tags: Sequence[str] = ("serve",), config: config_pb2.ConfigProto | None = None
) -> Session:
    """Loads a SavedModel into its own graph.

    Args:
        config: threads and the rest of how sessions run; None: TensorFlow's defaults.

    Raises:
        StatusError: with the code and the words of the C++ server where it has its own.
    """
    if (folder / "export.meta").is_file():
        raise StatusError(Code.UNIMPLEMENTED, "Session Bundle is deprecated and removed.")
    if not any((folder / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
        raise StatusError(
            Code.NOT_FOUND,
            "Specified file path does not appear to contain a SavedModel bundle (should have a "
            f"file called `saved_model.pb`)\nSpecified file path: {folder}",
        )
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph, config=config)
    try:
        with graph.as_default():
            meta_graph = tf.compat.v1.saved_model.load(session, list(tags), str(folder))
        graph.finalize()
    except tf.errors.OpError as error:
        session.close()
        raise status_of(error) from error
    except RuntimeError as error:
        session.close()
        if "MetaGraphDef associated with tags" not in str(error):
            raise StatusError(Code.INTERNAL, f"{folder}: {error}") from error
        raise StatusError(
            Code.NOT_FOUND,
            f"Could not find meta graph def matching supplied tags: {{ {' '.join(tags)} }}. "
            f"{error}",
        ) from error
    except (OSError, ValueError, TypeError, KeyError) as error:
        session.close()
        raise StatusError(Code.DATA_LOSS, f"{folder}: {error}") from error
    return Session(session, meta_graph)


def _has_loops(graph: graph_pb2.GraphDef) -> bool:
    functions = (function.node_def for function in graph.library.function)
    return any(node.op in _LOOPS for node in chain(graph.node, *functions))


def status_of(error: tf.errors.OpError) -> StatusError:
    """The runtime's error as the client sees it."""
    return StatusError(Code(error.error_code), error.message)


@lru_cache(maxsize=256)
def numpy_type(dtype: int) -> Any:
    """The numpy type of a `tensorflow.DataType`; strings are `object`.

    Raises:
        TypeError: a type that numpy has no form of.
    """
    return tf.dtypes.as_dtype(dtype).as_numpy_dtype


def type_name(dtype: int) -> str:
    """`float`, `string`, ... as the C++ runtime writes it."""
    try:
        name = str(tf.dtypes.as_dtype(dtype).name)
    except TypeError:
        return f"unknown dtype enum ({dtype})"
    return {"float32": "float", "float64": "double", "float16": "half"}.get(name, name)
