"""One signature of a loaded version: what a Predict for it must look like, and what it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from serving.embedded.program import Program, Programs
from serving.embedded.session import type_name
from serving.embedded.status import Code, StatusError, invalid

METHOD_NAMES = frozenset(
    f"tensorflow/serving/{kind}" for kind in ("predict", "classify", "regress")
)
# Output filters kept per signature; clients choose them.
MAX_FILTERS = 64


@dataclass(frozen=True)
class Input:
    """One input tensor. `default` stands in when a request lacks it."""

    alias: str
    name: str
    dtype: int
    position: int
    default: np.ndarray | None

    def wrong_dtype(self, given: int) -> StatusError:
        return invalid(
            f"Expects arg[{self.position}] to be {type_name(self.dtype)} but "
            f"{type_name(given)} is provided"
        )


class Output(NamedTuple):
    """One output tensor of an answer."""

    alias: str
    dtype: int
    array: np.ndarray


@dataclass(frozen=True)
class Selection:
    """What runs for one output filter.

    Attributes:
        outputs: alias, type and position among the program's values, in the order to answer in.
    """

    program: Program
    outputs: tuple[tuple[str, int, int], ...]

    def read(self, values: Sequence[np.ndarray]) -> list[Output]:
        return [Output(alias, dtype, values[index]) for alias, dtype, index in self.outputs]


class Signature:
    """A signature under its name. Thread-safe."""

    def __init__(
        self, name: str, definition: meta_graph_pb2.SignatureDef, programs: Programs
    ) -> None:
        self.name = name
        self.definition = definition
        self.inputs = tuple(
            Input(
                alias,
                definition.inputs[alias].name,
                definition.inputs[alias].dtype,
                position,
                tf.make_ndarray(definition.defaults[alias])
                if alias in definition.defaults
                else None,
            )
            for position, alias in enumerate(sorted(definition.inputs))
        )
        self.feeds = tuple(one.name for one in self.inputs)
        self._programs = programs
        self._selections: dict[tuple[str, ...], Selection] = {}

    @property
    def is_about_tensors(self) -> bool:
        """False for the signature that names the op which initialises a SavedModel."""
        infos = (*self.definition.inputs.values(), *self.definition.outputs.values())
        return bool(self.definition.outputs) and all(":" in info.name for info in infos)

    def check_method_name(self) -> None:
        """Raises StatusError unless the method is one that Predict serves."""
        if self.definition.method_name not in METHOD_NAMES:
            raise StatusError(
                Code.INTERNAL,
                f"Expected prediction signature method_name to be one of {sorted(METHOD_NAMES)}. "
                f"Was: {self.definition.method_name}",
            )

    def arrange(
        self, given: Mapping[str, Any], read: Callable[[Input, Any], np.ndarray]
    ) -> list[np.ndarray]:
        """The arrays to feed, in the order of `feeds`.

        Args:
            given: one value per input alias; absent ones are filled from the defaults.
            read: one value as an array; raises StatusError.

        Raises:
            StatusError: too few, too many or wrong inputs, or what `read` raises.
        """
        arrays = []
        if len(given) != len(self.inputs):
            self._check_names(given)
        for one in self.inputs:
            value = given.get(one.alias)
            if value is not None:
                arrays.append(read(one, value))
                continue
            self._check_names(given)
            assert one.default is not None
            arrays.append(one.default)
        return arrays

    def select(self, output_filter: Sequence[str] = ()) -> Selection:
        """What runs to answer the outputs asked for, in this order; empty: all.

        Raises:
            StatusError: an unknown or repeated alias.
        """
        key = tuple(output_filter)
        selection = self._selections.get(key)
        if selection is None:
            selection = self._select(key)
            if len(self._selections) >= MAX_FILTERS:
                self._selections.clear()
            self._selections[key] = selection
        return selection

    def _select(self, output_filter: tuple[str, ...]) -> Selection:
        infos = self.definition.outputs
        seen = set()
        for alias in output_filter:
            if alias not in infos:
                raise invalid(
                    f"output tensor alias not found in signature: {alias} Outputs expected to be "
                    f"in the set {_set(infos)}."
                )
            if alias in seen:
                raise invalid(f"duplicate output tensor alias: {alias}")
            seen.add(alias)
        aliases = output_filter or tuple(sorted(infos))
        fetches = tuple(sorted({infos[alias].name for alias in aliases}))
        return Selection(
            self._programs.get(self.feeds, fetches),
            tuple(
                (alias, infos[alias].dtype, fetches.index(infos[alias].name)) for alias in aliases
            ),
        )

    def _check_names(self, given: Mapping[str, Any]) -> None:
        """Raises StatusError unless all without a default are given, and no other is."""
        defaults = self.definition.defaults
        sent, wanted = set(given), set(self.definition.inputs)
        if len(sent) > len(wanted) or len(sent) < len(wanted - set(defaults)):
            raise invalid(
                f"input size does not match signature: {len(sent)}!={len(wanted)} "
                f"len({_set(sent)}) != len({_set(wanted)}). Sent extra: {_set(sent - wanted)}. "
                f"Missing but required: {_set(wanted - sent - set(defaults))}."
            )
        for one in self.inputs:
            if one.alias not in given and one.default is None:
                raise self._absent(one, given)
        if extra := sent - wanted:
            raise invalid(
                f"Inputs contains invalid name. Used request inputs: {_set(sent & wanted)}, "
                f"request input: {_set(sent)}, not in the signature: {_set(extra)}"
            )

    def _absent(self, one: Input, given: Mapping[str, Any]) -> StatusError:
        defaults = ",".join(sorted(self.definition.defaults))
        return invalid(
            f"Signature input alias: {one.alias}(feed name: {one.name}) not found in request and "
            f"no default value provided. Inputs expected to be in the request {_set(given)}, or "
            f"default input alias set: {defaults}"
        )


def _set(names: Iterable[str]) -> str:
    return f"{{{','.join(sorted(names))}}}"
