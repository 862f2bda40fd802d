"""The REST interface: predict, classify, regress, status, metadata, and the metrics page."""

from __future__ import annotations

import json
import logging
import re
import time
from typing import Any
from urllib.parse import unquote

from google.protobuf.json_format import MessageToDict
from tensorflow_serving.apis import get_model_status_pb2, model_pb2

from serving.embedded import examples, jsonexamples, jsontensors
from serving.embedded.http import Request, Response
from serving.embedded.inference import LARGE_BYTES, Asked, Core, version_status
from serving.embedded.servable import DEFAULT_SIGNATURE, Call, Servable
from serving.embedded.signature import Output
from serving.embedded.status import HTTP_CODE, StatusError, invalid

log = logging.getLogger(__name__)

_WHICH = r"(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
_POST = re.compile(
    rf"/v1/models/(?P<model>[^/:]+){_WHICH}:(?P<method>classify|regress|predict)", re.I
)
_GET = re.compile(rf"/v1/models(?:/(?P<model>[^/:]+))?{_WHICH}(?P<metadata>/metadata)?", re.I)


class Handler:
    """Answers requests.

    Args:
        metrics_path: where the metrics are; "": nowhere.
        cors: whether to send CORS headers.
        timeout_s: after which a request is answered with 504.
    """

    def __init__(
        self, core: Core, *, metrics_path: str, cors: bool, timeout_s: float = 30.0
    ) -> None:
        self._core = core
        self._timeout_s = timeout_s
        self._metrics_path = metrics_path
        self._cors = cors

    async def __call__(self, request: Request) -> Response:
        """Never raises: whatever goes wrong is a response."""
        if request.method == "GET" and request.path == self._metrics_path:
            return Response(200, self._core.metrics.text().encode(), "text/plain")
        if not request.path.lower().startswith("/v1/"):
            return Response(404, b"<html><body>Not Found</body></html>", "text/html")
        headers: tuple[tuple[str, str], ...] = ()
        if self._cors:
            headers = (
                ("Access-Control-Allow-Origin", "*"),
                ("Access-Control-Allow-Methods", "POST, GET"),
                ("Access-Control-Allow-Headers", "Content-Type"),
            )
        try:
            body = await self._answer(request)
            return Response(200, body.encode(), headers=headers)
        except StatusError as error:
            text = json.dumps({"error": error.message}, ensure_ascii=False)
            return Response(HTTP_CODE[error.code], text.encode(), headers=headers)
        except Exception:
            log.exception("%s %s", request.method, request.path)
            return Response(500, b'{"error": "internal error"}', headers=headers)

    async def _answer(self, request: Request) -> str:
        if request.method == "OPTIONS" and self._cors:
            if not request.headers.get(b"origin", b"").startswith((b"http://", b"https://")):
                raise invalid("OPTIONS needs an Origin header that is http:// or https://")
            return ""
        if request.method == "POST" and (match := _POST.fullmatch(request.path)):
            return await self._post(request, match)
        if request.method == "GET" and (match := _GET.fullmatch(request.path)):
            return self._get(match)
        raise self._counted(None, invalid(f"Malformed request: {request.method} {request.path}"))

    async def _post(self, request: Request, match: re.Match[str]) -> str:
        asked = self._asked(match)
        method = match["method"]
        if method not in ("predict", "classify", "regress"):
            raise self._counted(asked, invalid(f"Malformed request: POST {request.path}"))
        size_bytes = len(request.raw_body)
        try:
            if size_bytes > LARGE_BYTES:
                document = await self._core.in_thread("REST", _document, request)
            else:
                document = _document(request)
            name = jsontensors.signature_name(document)
        except StatusError as error:
            raise self._counted(asked, error) from None

        def prepare(servable: Servable) -> Call:
            if method == "predict":
                return _predict_call(servable, name, document)
            spec = model_pb2.ModelSpec(signature_name=name)
            check = examples.classify if method == "classify" else examples.regress
            return check(servable, spec, jsonexamples.to_input(document))

        answer = await self._core.answer(
            asked,
            prepare,
            api=method.capitalize(),
            entrypoint="REST",
            timeout_s=self._timeout_s,
            size_bytes=size_bytes,
        )
        if method == "classify":
            return jsonexamples.classifications(answer.result)
        if method == "regress":
            return jsonexamples.regressions(answer.result)
        row_form = jsontensors.is_row_form(document)
        if sum(output.array.nbytes for output in answer.result) > LARGE_BYTES:
            return str(await self._core.in_thread("REST", _predictions, answer.result, row_form))
        return _predictions(answer.result, row_form)

    def _get(self, match: re.Match[str]) -> str:
        started = time.perf_counter()
        asked = None
        try:
            if match["model"] is None:
                raise invalid("Missing model name in request.")
            asked = self._asked(match)
            text = self._metadata(asked) if match["metadata"] else self._status(asked)
        except StatusError as error:
            raise self._counted(asked, error) from None
        self._core.metrics.request_count.add(asked.model, "OK")
        self._core.metrics.request_latency.observe(
            asked.model, "", "REST", value=(time.perf_counter() - started) * 1e6
        )
        return text

    def _status(self, asked: Asked) -> str:
        versions = self._core.manager.status(asked.model, asked.version)
        message = get_model_status_pb2.GetModelStatusResponse(
            model_version_status=[version_status(version) for version in versions]
        )
        return json.dumps(_as_dict(message), indent=1)

    def _metadata(self, asked: Asked) -> str:
        servable, signatures = self._core.metadata(asked)
        return json.dumps(
            {
                "model_spec": {
                    "name": servable.model,
                    "signature_name": "",
                    "version": str(servable.version),
                },
                "metadata": {"signature_def": _as_dict(signatures)},
            },
            indent=1,
        )

    def _asked(self, match: re.Match[str]) -> Asked:
        version = match["version"]
        if version is not None and int(version) >= 2**63:
            raise self._counted(None, invalid(f"Failed to convert version: {version} to numeric."))
        return Asked(
            unquote(match["model"]),
            None if version is None else int(version),
            None if match["label"] is None else unquote(match["label"]),
        )

    def _counted(self, asked: Asked | None, error: StatusError) -> StatusError:
        self._core.failed(asked, None, error)
        return error


def _document(request: Request) -> dict[str, Any]:
    return jsontensors.parse_body(request.body())


def _predict_call(servable: Servable, name: str, document: dict[str, Any]) -> Call:
    try:
        signature = servable.signature(name)
    except KeyError:
        raise invalid(
            f'Serving signature name: "{name or DEFAULT_SIGNATURE}" not found in signature def'
        ) from None
    arrays = jsontensors.to_arrays(document, signature)
    return servable.predict(signature, arrays, lambda _, array: array)


def _predictions(outputs: list[Output], row_form: bool) -> str:
    return jsontensors.to_json(outputs, row_form=row_form)


def _as_dict(message) -> dict:  # type: ignore[no-untyped-def, type-arg]
    return MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
