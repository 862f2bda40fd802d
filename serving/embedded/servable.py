"""One loaded version of one model: its signatures, its checks, its requests in flight."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import meta_graph_pb2

from perennial import store
from perennial.errors import PerennialError
from serving.embedded import session as tf_session
from serving.embedded.status import Code, StatusError, invalid

log = logging.getLogger(__name__)

DEFAULT_SIGNATURE = "serving_default"
METHOD_NAMES = frozenset(
    f"tensorflow/serving/{kind}" for kind in ("predict", "classify", "regress")
)


@dataclass(frozen=True)
class Output:
    """One output tensor of an answer."""

    alias: str
    dtype: int
    array: np.ndarray


@dataclass(frozen=True)
class LoadOptions:
    """How versions are loaded."""

    tags: tuple[str, ...] = ("serve",)
    intra_op: int = 0
    inter_op: int = 0
    check_method_name: bool = False


class Servable:
    """A version that can answer. Thread-safe; `use()` keeps it open while a request runs."""

    def __init__(
        self, model: str, version: int, session: tf_session.Session, *, check_method_name: bool
    ) -> None:
        self.model = model
        self.version = version
        self.typical_run_s = 0.0
        self._session = session
        self._check_method_name = check_method_name
        self._condition = threading.Condition()
        self._in_flight = 0
        self._retired = False

    @classmethod
    def load(cls, model: str, version: int, folder: Path, options: LoadOptions) -> Servable:
        """Loads one version; a folder with a manifest must match it byte for byte.

        Raises:
            StatusError: DATA_LOSS naming the file that differs, or what TensorFlow says.
        """
        if store.is_published(folder):
            try:
                store.verify(folder)
            except PerennialError as error:
                raise StatusError(Code.DATA_LOSS, error.message) from error
        session = tf_session.load(
            folder, tags=options.tags, intra_op=options.intra_op, inter_op=options.inter_op
        )
        return cls(model, version, session, check_method_name=options.check_method_name)

    @property
    def signatures(self) -> Mapping[str, meta_graph_pb2.SignatureDef]:
        return self._session.signatures

    def __enter__(self) -> Servable:
        """Holds the version open.

        Raises:
            StatusError: NOT_FOUND, when it was retired between look-up and use.
        """
        with self._condition:
            if self._retired:
                raise not_found(self.model, self.version)
            self._in_flight += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._in_flight -= 1
            if self._retired and not self._in_flight:
                self._condition.notify_all()

    def retire(self) -> None:
        """Refuses new requests, waits for those in flight, frees the session."""
        with self._condition:
            self._retired = True
            self._condition.wait_for(lambda: not self._in_flight)
        self._session.close()

    def signature(self, name: str) -> tuple[str, meta_graph_pb2.SignatureDef]:
        """The signature's actual name and definition; KeyError if there is none."""
        name = name or DEFAULT_SIGNATURE
        return name, self._session.signatures[name]

    def predict(
        self,
        signature: meta_graph_pb2.SignatureDef,
        inputs: Mapping[str, np.ndarray],
        output_filter: Sequence[str] = (),
    ) -> list[Output]:
        """Runs one signature in the caller's thread.

        Args:
            inputs: one array per input alias; absent ones are filled from the signature's defaults.
            output_filter: aliases to return, in this order; empty: all.

        Raises:
            StatusError: what the client did wrong, or what the graph says.
        """
        if self._check_method_name and signature.method_name not in METHOD_NAMES:
            raise StatusError(
                Code.INTERNAL,
                f"Expected prediction signature method_name to be one of {sorted(METHOD_NAMES)}. "
                f"Was: {signature.method_name}",
            )
        feeds = _feeds(signature, inputs)
        outputs = _outputs(signature, output_filter)
        names = tuple(dict.fromkeys(signature.outputs[alias].name for alias in outputs))
        run = self._session.callable(tuple(feeds), names)
        started = time.perf_counter()
        try:
            values = dict(zip(names, run(*feeds.values()), strict=True))
        except tf.errors.OpError as error:
            raise tf_session.status_of(error) from error
        elapsed_s = time.perf_counter() - started
        self.typical_run_s += 0.1 * (elapsed_s - self.typical_run_s)
        return [
            Output(alias, signature.outputs[alias].dtype, values[signature.outputs[alias].name])
            for alias in outputs
        ]


def not_found(model: str, version: int | None) -> StatusError:
    asked = f"Latest({model})" if version is None else f"Specific({model}, {version})"
    return StatusError(Code.NOT_FOUND, f"Servable not found for request: {asked}")


def _feeds(
    signature: meta_graph_pb2.SignatureDef, inputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Tensor name → array for every input of the signature."""
    expected = signature.inputs
    defaults = signature.defaults
    sent, wanted = set(inputs), set(expected)
    if len(sent) > len(wanted) or len(sent) < len(wanted - set(defaults)):
        raise invalid(
            f"input size does not match signature: {len(sent)}!={len(wanted)} "
            f"len({_set(sent)}) != len({_set(wanted)}). Sent extra: {_set(sent - wanted)}. "
            f"Missing but required: {_set(wanted - sent - set(defaults))}."
        )
    feeds = {}
    for position, alias in enumerate(sorted(expected)):
        info = expected[alias]
        if alias in inputs:
            array = inputs[alias]
            if (given := _data_type(array)) != info.dtype:
                raise invalid(
                    f"Expects arg[{position}] to be {tf_session.type_name(info.dtype)} but "
                    f"{tf_session.type_name(given)} is provided"
                )
        elif alias in defaults:
            array = tf.make_ndarray(defaults[alias])
        else:
            raise invalid(
                f"Signature input alias: {alias}(feed name: {info.name}) not found in request and "
                f"no default value provided. Inputs expected to be in the request {_set(sent)}, or "
                f"default input alias set: {','.join(sorted(defaults))}"
            )
        feeds[info.name] = array
    if extra := sent - wanted:
        raise invalid(
            f"Inputs contains invalid name. Used request inputs: {_set(sent & wanted)}, request "
            f"input: {_set(sent)}, not in the signature: {_set(extra)}"
        )
    return feeds


def _outputs(signature: meta_graph_pb2.SignatureDef, output_filter: Sequence[str]) -> Sequence[str]:
    if not output_filter:
        return sorted(signature.outputs)
    seen = set()
    for alias in output_filter:
        if alias not in signature.outputs:
            raise invalid(
                f"output tensor alias not found in signature: {alias} Outputs expected to be in "
                f"the set {_set(signature.outputs)}."
            )
        if alias in seen:
            raise invalid(f"duplicate output tensor alias: {alias}")
        seen.add(alias)
    return output_filter


def _data_type(array: np.ndarray) -> int:
    if array.dtype == object:
        return types_pb2.DT_STRING
    return int(tf.dtypes.as_dtype(array.dtype).as_datatype_enum)


def _set(names: Iterable[str]) -> str:
    return f"{{{','.join(sorted(names))}}}"
