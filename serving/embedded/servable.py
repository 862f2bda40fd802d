"""One loaded version of one model: its signatures and its requests in flight."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2
from tensorflow_serving.apis import model_pb2

from perennial import store
from perennial.errors import PerennialError
from serving.embedded import session as tf_session
from serving.embedded.metrics import Meter
from serving.embedded.program import Program, Programs
from serving.embedded.signature import Input, Signature
from serving.embedded.status import Code, StatusError
from serving.embedded.tensors import field_bytes

log = logging.getLogger(__name__)

DEFAULT_SIGNATURE = "serving_default"


@dataclass(frozen=True)
class LoadOptions:
    """How versions are loaded.

    Attributes:
        on_run: told how long each run of a graph took, in seconds.
    """

    tags: tuple[str, ...] = ("serve",)
    session: config_pb2.ConfigProto = field(default_factory=config_pb2.ConfigProto)
    check_method_name: bool = False
    on_run: Callable[[float], None] = lambda run_s: None


class Call(NamedTuple):
    """A checked request: what to run, and what its values mean.

    Attributes:
        signature: the name of the signature that is used.
        finish: turns the program's values into the answer; raises StatusError.
        examples: how many examples it holds, where that is counted.
    """

    signature: str
    program: Program
    arrays: Sequence[np.ndarray]
    finish: Callable[[Sequence[np.ndarray]], Any]
    examples: int = 0


class Servable:
    """A version that can answer. Thread-safe; as a context it stays open while a request runs.

    Attributes:
        signatures: SignatureDefs by name, as the SavedModel holds them.
        served: the same, ready to be asked.
        meters: what counts its answers, by interface and method.
        declared: the programs of its signatures.
    """

    def __init__(
        self, model: str, version: int, session: tf_session.Session, options: LoadOptions
    ) -> None:
        self.model = model
        self.version = version
        self.meters: dict[tuple[str, str], Meter] = {}
        self.programs = Programs(session, options.on_run)
        self.check_method_name = options.check_method_name
        self.served = {
            name: Signature(name, definition, self.programs)
            for name, definition in session.signatures.items()
        }
        for signature in self.served.values():
            self._select(signature)
        self.declared = self.programs.keep()
        self._described: dict[str, bytes] = {}
        self._session = session
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
        session = tf_session.load(folder, tags=options.tags, config=options.session)
        return cls(model, version, session, options)

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

    def signature(self, name: str) -> Signature:
        """The signature of this name, or the default one; KeyError if there is none."""
        return self.served[name or DEFAULT_SIGNATURE]

    def _select(self, signature: Signature) -> None:
        """Prepares a signature, so that its first request need not. An init op is no program."""
        if not signature.is_about_tensors:
            return
        try:
            signature.select()
        except StatusError as error:
            log.warning(
                "%s version %d: signature %s cannot run: %s",
                self.model,
                self.version,
                signature.name,
                error,
            )

    def described(self, signature: str) -> bytes:
        """What answered, as the serialised field `model_spec = 2` of a response."""
        described = self._described.get(signature)
        if described is None:
            spec = model_pb2.ModelSpec(name=self.model, signature_name=signature)
            spec.version.value = self.version
            described = field_bytes(b"\x12", spec.SerializeToString())
            self._described[signature] = described
        return described

    def predict(
        self,
        signature: Signature,
        given: Mapping[str, Any],
        read: Callable[[Input, Any], np.ndarray],
        output_filter: Sequence[str] = (),
    ) -> Call:
        """A Predict, checked.

        Args:
            given: one value per input alias; absent ones are filled from the signature's defaults.
            read: one value as an array; raises StatusError.
            output_filter: aliases to return, in this order; empty: all.

        Raises:
            StatusError: what the client did wrong.
        """
        if self.check_method_name:
            signature.check_method_name()
        arrays = signature.arrange(given, read)
        selection = signature.select(output_filter)
        return Call(signature.name, selection.program, arrays, selection.read)


def not_found(model: str, version: int | None) -> StatusError:
    asked = f"Latest({model})" if version is None else f"Specific({model}, {version})"
    return StatusError(Code.NOT_FOUND, f"Servable not found for request: {asked}")
