"""What the command line makes of the server: TLS, the Unix socket, files it reads, start errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import tensorflow as tf

from serving.embedded.__main__ import START_FAILED, main
from serving.embedded.status import StatusError
from serving.embedded.tls import read_credentials
from tests.support.certificates import Authority, Pair
from tests.support.embedded import AVAILABLE, Client, ours_only
from tests.support.serving import START_S, Server, export_model, spawn_server, wait_until

pytestmark = ours_only


@dataclass(frozen=True)
class Secure:
    """A server with TLS, client verification and most other flags, and what a client needs."""

    server: Server
    authority: Authority
    client: Pair
    socket_path: Path
    models: Path

    def channel(self, target: str = "", pair: Pair | None = None) -> grpc.Channel:
        pair = pair or self.client
        credentials = grpc.ssl_channel_credentials(
            self.authority.certificate, pair.key, pair.certificate
        )
        return grpc.secure_channel(
            target or f"localhost:{self.server.port}",
            credentials,
            options=[("grpc.ssl_target_name_override", "localhost")],
        )


def config(models: Path, versions: str) -> str:
    return f"""model_config_list {{ config {{
        name: "affine" base_path: "{models}" model_platform: "tensorflow"
        model_version_policy {{ specific {{ versions: {versions} }} }} }} }}"""


def ssl_config(server: Pair, *, custom_ca: bytes = b"", client_verify: bool = False) -> str:
    def quoted(pem: bytes) -> str:
        return json.dumps(pem.decode())

    return f"""server_key: {quoted(server.key)} server_cert: {quoted(server.certificate)}
        custom_ca: {quoted(custom_ca)} client_verify: {str(client_verify).lower()}"""


@pytest.fixture(scope="module")
def secure(exports: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    folder = tmp_path_factory.mktemp("secure")
    authority = Authority("perennial test")
    ssl_file, batching, session = (folder / name for name in ("ssl", "batching", "session"))
    ssl_file.write_text(
        ssl_config(authority.issue("server"), custom_ca=authority.certificate, client_verify=True)
    )
    batching.write_text("max_batch_size { value: 8 } allowed_batch_sizes: [4, 8]")
    session.write_text("intra_op_parallelism_threads: 1 inter_op_parallelism_threads: 1")
    socket_path = folder / "grpc.sock"
    server = spawn_server(
        folder,
        config=config(exports / "affine", "1"),
        flags=(
            f"--ssl_config_file={ssl_file}",
            f"--grpc_socket_path={socket_path}",
            "--enable_batching",
            f"--batching_parameters_file={batching}",
            f"--tensorflow_session_config_file={session}",
            "--rest_api_enable_cors_support",
            "--enable_serialization_as_tensor_content",
            "--model_config_file_poll_wait_seconds=1",
            "--made_up_flag=1",
        ),
    )
    try:
        wait_until(server.is_open, timeout_s=START_S, what="the server opens its port")
        yield Secure(server, authority, authority.issue("client"), socket_path, exports / "affine")
    finally:
        server.stop()


def test_a_client_with_a_signed_certificate_is_answered(secure: Secure) -> None:
    for target in ("", f"unix:{secure.socket_path}"):
        with secure.channel(target) as channel:
            response = Client(secure.server, channel).predict(x=[1.0, 2.0])
        # --enable_serialization_as_tensor_content
        assert np.frombuffer(response.outputs["y"].tensor_content, np.float32).tolist() == [2, 4]


def test_a_client_without_one_is_not(secure: Secure) -> None:
    stranger = Authority("somebody else").issue("client")
    root = grpc.ssl_channel_credentials(secure.authority.certificate)
    address = f"localhost:{secure.server.port}"
    for channel in (
        secure.channel(pair=stranger),
        secure.channel(f"unix:{secure.socket_path}", pair=stranger),
        grpc.secure_channel(address, root),
        grpc.insecure_channel(address),
    ):
        with channel, pytest.raises(grpc.RpcError) as caught:
            Client(secure.server, channel).predict(x=[1.0])
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_rest_stays_plain_and_allows_other_origins(secure: Secure) -> None:
    with httpx.Client(base_url=secure.server.rest_url, timeout=10, trust_env=False) as http:
        url = "/v1/models/affine:predict"
        answer = http.post(url, json={"instances": [1.0]})
        assert answer.json() == {"predictions": [2.0]}
        assert answer.headers["access-control-allow-origin"] == "*"
        assert answer.headers["access-control-allow-methods"] == "POST, GET"
        assert answer.headers["access-control-allow-headers"] == "Content-Type"
        assert http.options(url, headers={"Origin": "https://a.example"}).status_code == 200
        assert http.options(url, headers={"Origin": "file://"}).status_code == 400
        assert http.options(url).status_code == 400


def test_batched_answers_are_each_ones_own(secure: Secure) -> None:
    with secure.channel() as channel, ThreadPoolExecutor(16) as threads:
        client = Client(secure.server, channel)

        def ask(value: float) -> list[float]:
            output = client.predict(x=[value, -value]).outputs["y"]
            return tf.make_ndarray(output).tolist()

        answers = list(threads.map(ask, map(float, range(100))))

    assert answers == [[2.0 * value, -2.0 * value] for value in range(100)]
    text = httpx.get(f"{secure.server.rest_url}/monitoring/prometheus/metrics").text
    prefix = ":tensorflow:serving:"
    counts = {
        line.partition("{")[0].removeprefix(prefix): float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith(prefix) and "_bucket" not in line
    }
    assert counts["batching_session:queuing_latency_count"] >= 100
    runs = counts["batching_session:wrapped_run_count"]
    # Every batch was padded to 4 or 8 rows.
    assert counts["BatchingSession:processed_batch_size_sum"] >= 4 * runs
    assert counts["BatchingSession:padding_size_sum"] == (
        counts["BatchingSession:processed_batch_size_sum"]
        - counts["BatchingSession:input_batch_size_sum"]
    )


def test_the_config_file_is_read_again(secure: Secure, tmp_path: Path) -> None:
    new = tmp_path / "models.config"
    new.write_text("model_config_list { nonsense: 1 }")
    new.rename(secure.server.config_file)
    wait_until(
        lambda: "Failed to read ModelServerConfig file" in secure.server.log, what="the refusal"
    )
    new.write_text(config(secure.models, "2"))
    new.rename(secure.server.config_file)

    with secure.channel() as channel:
        Client(secure.server, channel).await_states("affine", v2=AVAILABLE)


def test_an_unknown_flag_is_a_warning(secure: Secure) -> None:
    assert "unknown argument: --made_up_flag=1" in secure.server.log


def test_an_ssl_config_that_promises_too_little_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ssl"
    pair = Authority("test").issue("server")

    path.write_text('server_key: "x"')
    with pytest.raises(StatusError, match="server_key and server_cert must hold PEM text"):
        read_credentials(path)
    path.write_text(ssl_config(pair, client_verify=True))
    with pytest.raises(StatusError, match="client_verify needs custom_ca"):
        read_credentials(path)
    with pytest.raises(StatusError, match="No such file"):
        read_credentials(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("file_name", "text", "flags", "message"),
    [
        ("", "", [], "INVALID_ARGUMENT: Both server_options.model_base_path and server_options."),
        ("", "", ["--model_base_path=/m", "--port=0"], "INVALID_ARGUMENT: At least one of "),
        (
            "model_config_file",
            "model_config_list { nonsense: 1 }",
            [],
            "Error parsing text-format tensorflow.serving.ModelServerConfig: ",
        ),
        (
            "model_config_file",
            "model_config_list { config { name: 'm' base_path: 'relative' "
            "model_platform: 'tensorflow' } }",
            [],
            "INVALID_ARGUMENT: Expected model m to have an absolute path or URI; got "
            "base_path()=relative",
        ),
        (
            "batching_parameters_file",
            "max_batch_size { value: 8 } allowed_batch_sizes: 4",
            ["--model_base_path=/m", "--enable_batching"],
            "INVALID_ARGUMENT: Last entry in allowed_batch_sizes must match max_batch_size",
        ),
    ],
)
def test_what_cannot_start_says_why_and_exits_255(
    file_name: str,
    text: str,
    flags: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if file_name:
        path = tmp_path / "file"
        path.write_text(text)
        flags = [*flags, f"--{file_name}={path}"]

    assert main(flags) == START_FAILED

    printed = capsys.readouterr().out
    assert printed.startswith("Failed to start server. Error: ")
    assert message in printed


def test_a_label_in_the_first_configuration_needs_its_flag(
    exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "models.config"
    path.write_text(
        f"""model_config_list {{ config {{ name: "affine" base_path: "{exports}/affine"
        model_platform: "tensorflow" version_labels {{ key: "stable" value: 3 }} }} }}"""
    )

    assert main([f"--model_config_file={path}", "--port=1"]) == START_FAILED
    assert "Request to assign label to version 3 of model affine" in capsys.readouterr().out


def test_a_model_that_does_not_load_ends_the_start(
    exports: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export_model(tmp_path / "m" / "1", "affine")
    (tmp_path / "m" / "1" / "saved_model.pb").unlink()

    flags = ["--model_name=m", f"--model_base_path={tmp_path}/m", "--max_num_load_retries=0"]
    assert main([*flags, "--port=1"]) == START_FAILED

    printed = capsys.readouterr().out
    assert "1 servable(s) did not become available: {{name: m version: 1 due to error: " in printed
    assert "NOT_FOUND: Specified file path does not appear to contain a SavedModel" in printed


def test_sigterm_drains_and_exits_0(secure: Secure) -> None:
    """The last one: nobody has the server after it."""
    assert secure.server.stop() == 0
    assert "draining" in secure.server.log
