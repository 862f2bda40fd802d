"""Classify, Regress and MultiInference: requests of tf.Example, answers of labels or values.

Every request becomes one string vector [examples] of serialised Examples, which the signature's
graph parses itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    inference_pb2,
    input_pb2,
    model_pb2,
    regression_pb2,
)

from serving.embedded.servable import DEFAULT_SIGNATURE, Call, Servable
from serving.embedded.status import Code, StatusError, invalid

CLASSIFY = "tensorflow/serving/classify"
REGRESS = "tensorflow/serving/regress"
INPUTS, CLASSES, SCORES, OUTPUTS = "inputs", "classes", "scores", "outputs"

Values = Mapping[str, np.ndarray]


def classify(servable: Servable, spec: model_pb2.ModelSpec, given: input_pb2.Input) -> Call:
    """A Classify, checked; it gives a ClassificationResult.

    Raises:
        StatusError: what the client did wrong, or a signature that does not classify.
    """
    name, signature = _signature(servable, spec.signature_name)
    aliases = _check_classify(signature, check_method_name=servable.check_method_name)
    return _call(servable, name, signature, aliases, given, _classifications)


def regress(servable: Servable, spec: model_pb2.ModelSpec, given: input_pb2.Input) -> Call:
    """A Regress, checked; it gives a RegressionResult.

    Raises:
        StatusError: what the client did wrong, or a signature that does not regress.
    """
    name, signature = _signature(servable, spec.signature_name)
    _check_regress(signature, check_method_name=servable.check_method_name)
    return _call(servable, name, signature, (OUTPUTS,), given, _regressions)


def multi_inference(servable: Servable, request: inference_pb2.MultiInferenceRequest) -> Call:
    """A MultiInference, checked; one run gives the MultiInferenceResponse of all its tasks.

    Raises:
        StatusError: what the client did wrong.
    """
    feeds: set[str] = set()
    fetches: set[str] = set()
    seen: set[str] = set()
    tasks = []
    for task in request.tasks:
        if not task.model_spec.name:
            raise invalid("Found ModelSpec with an empty model name.")
        if task.model_spec.name != request.tasks[0].model_spec.name:
            raise invalid(
                "All ModelSpecs in a MultiInferenceRequest must access the same model name."
            )
        name = task.model_spec.signature_name or DEFAULT_SIGNATURE
        if name in seen:
            raise invalid(f"Duplicate evaluation of signature: {name}")
        seen.add(name)
        signature = servable.signatures.get(name)
        if signature is None:
            raise invalid(f"Requested signature not found in model graph: {name}")
        aliases, read, field = _method(task.method_name, signature, servable.check_method_name)
        # TF2 exports have one input tensor per signature, TF1 exports share one.
        feeds.add(signature.inputs[INPUTS].name)
        names = {alias: signature.outputs[alias].name for alias in aliases}
        fetches.update(names.values())
        tasks.append((name, names, read, field))
    examples = _serialised(request.input)
    program = servable.programs.get(tuple(sorted(feeds)), tuple(sorted(fetches)))

    def finish(values: Sequence[np.ndarray]) -> inference_pb2.MultiInferenceResponse:
        by_name = dict(zip(program.fetches, values, strict=True))
        response = inference_pb2.MultiInferenceResponse()
        for name, names, read, field in tasks:
            result = response.results.add()
            describe(result.model_spec, servable, name)
            of_task = {alias: by_name[tensor] for alias, tensor in names.items()}
            getattr(result, field).CopyFrom(read(of_task, len(examples)))
        return response

    return Call("", program, [examples] * len(feeds), finish, examples=len(examples))


def describe(spec: model_pb2.ModelSpec, servable: Servable, signature: str) -> None:
    """Writes into an answer what served it."""
    spec.name = servable.model
    spec.version.value = servable.version
    spec.signature_name = signature


def _signature(servable: Servable, name: str) -> tuple[str, meta_graph_pb2.SignatureDef]:
    name = name or DEFAULT_SIGNATURE
    signature = servable.signatures.get(name)
    if signature is None:
        raise invalid(f"No signature was found with the name: {name}")
    return name, signature


def _call(
    servable: Servable,
    name: str,
    signature: meta_graph_pb2.SignatureDef,
    aliases: Sequence[str],
    given: input_pb2.Input,
    read: Callable[[Values, int], Any],
) -> Call:
    names = {alias: signature.outputs[alias].name for alias in aliases}
    program = servable.programs.get(
        (signature.inputs[INPUTS].name,), tuple(sorted(set(names.values())))
    )
    examples = _serialised(given)

    def finish(values: Sequence[np.ndarray]) -> Any:
        by_name = dict(zip(program.fetches, values, strict=True))
        return read({alias: by_name[tensor] for alias, tensor in names.items()}, len(examples))

    return Call(name, program, [examples], finish, examples=len(examples))


def _serialised(given: input_pb2.Input) -> np.ndarray:
    """The examples as a string vector [examples]; a context is put before each."""
    kind = given.WhichOneof("kind")
    if kind == "example_list_with_context":
        context = given.example_list_with_context.context.SerializeToString()
        found = given.example_list_with_context.examples
        # Concatenated messages parse as their merger.
        raw = [context + example.SerializeToString() for example in found]
    else:
        raw = [example.SerializeToString() for example in given.example_list.examples]
    if not raw:
        raise invalid("Input is empty.")
    array = np.empty(len(raw), object)
    array[:] = raw
    return array


# Signatures


def _method(
    method_name: str, signature: meta_graph_pb2.SignatureDef, check: bool
) -> tuple[Sequence[str], Callable[[Values, int], Any], str]:
    if method_name == CLASSIFY:
        aliases = _check_classify(signature, check_method_name=check)
        return aliases, _classifications, "classification_result"
    if method_name == REGRESS:
        _check_regress(signature, check_method_name=check)
        return (OUTPUTS,), _regressions, "regression_result"
    raise StatusError(Code.UNIMPLEMENTED, f"Unsupported signature method_name: {method_name}")


def _check_classify(
    signature: meta_graph_pb2.SignatureDef, *, check_method_name: bool
) -> tuple[str, ...]:
    """The outputs to fetch: classes, scores or both."""
    if check_method_name and signature.method_name != CLASSIFY:
        raise invalid(
            f"Expected classification signature method_name to be {CLASSIFY}. "
            f"Was: {signature.method_name}"
        )
    if len(signature.inputs) != 1:
        raise invalid("Expected one input Tensor.")
    if len(signature.outputs) not in (1, 2):
        raise invalid(f"Expected one or two output Tensors, found {len(signature.outputs)}")
    if INPUTS not in signature.inputs:
        raise invalid(f"No classification inputs found in SignatureDef: {signature}")
    aliases = tuple(alias for alias in (CLASSES, SCORES) if alias in signature.outputs)
    if len(aliases) != len(signature.outputs):
        raise invalid(
            "Expected classification signature outputs to contain at least one of "
            f'"{CLASSES}" or "{SCORES}" and nothing else. Signature was: {signature}'
        )
    return aliases


def _check_regress(signature: meta_graph_pb2.SignatureDef, *, check_method_name: bool) -> None:
    if check_method_name and signature.method_name != REGRESS:
        raise invalid(
            f"Expected regression signature method_name to be {REGRESS}. "
            f"Was: {signature.method_name}"
        )
    if len(signature.inputs) != 1:
        raise invalid("Expected one input Tensor.")
    if len(signature.outputs) != 1:
        raise invalid("Expected one output Tensor.")
    if INPUTS not in signature.inputs:
        raise invalid(f"No regression inputs found in SignatureDef: {signature}")
    if OUTPUTS not in signature.outputs:
        raise invalid(f"No regression outputs found in SignatureDef: {signature}")


# Answers


def _classifications(values: Values, examples: int) -> classification_pb2.ClassificationResult:
    """`classes` are strings and `scores` floats, each [examples, classes]."""
    classes, scores = values.get(CLASSES), values.get(SCORES)
    for alias, array, dtype, name in (
        (CLASSES, classes, np.dtype(object), "DT_STRING"),
        (SCORES, scores, np.dtype(np.float32), "DT_FLOAT"),
    ):
        if array is None:
            continue
        if array.dtype != dtype:
            raise invalid(f"Expected {alias} Tensor of {name}. Got: {_type(array)}")
        if array.ndim != 2:
            raise invalid(
                f"Expected Tensor shape: [batch_size num_classes] but got {_shape(array)}"
            )
        if array.shape[0] != examples:
            raise invalid(
                f"Expected {alias} output batch size of {examples}. Got: {array.shape[0]}"
            )
    if classes is not None and scores is not None and classes.shape != scores.shape:
        raise invalid(
            f"Tensors class and score should match in size. Got {_shape(classes)} vs. "
            f"{_shape(scores)}"
        )
    result = classification_pb2.ClassificationResult()
    for row in range(examples):
        kinds = result.classifications.add()
        labels = [] if classes is None else classes[row].tolist()
        numbers = [] if scores is None else scores[row].tolist()
        for column in range(max(len(labels), len(numbers))):
            kind = kinds.classes.add()
            if labels:
                kind.label = labels[column].decode("utf-8", "replace")
            if numbers:
                kind.score = numbers[column]
    return result


def _regressions(values: Values, examples: int) -> regression_pb2.RegressionResult:
    """`outputs` are floats, [examples] or [examples, 1]."""
    array = values[OUTPUTS]
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != 1):
        raise invalid(
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got "
            f"{_shape(array)}"
        )
    if array.shape[0] != examples:
        raise invalid(
            f"Input batch size did not match output batch size: {examples} vs. {array.shape[0]}"
        )
    if array.dtype != np.float32:
        raise invalid(f"Expected output Tensor of DT_FLOAT. Got: {_type(array)}")
    return regression_pb2.RegressionResult(
        regressions=[regression_pb2.Regression(value=value) for value in array.ravel().tolist()]
    )


def _type(array: np.ndarray) -> str:
    if array.dtype == object:
        return "DT_STRING"
    return str(types_pb2.DataType.Name(tf.dtypes.as_dtype(array.dtype).as_datatype_enum))


def _shape(array: np.ndarray) -> str:
    return f"[{','.join(map(str, array.shape))}]"
