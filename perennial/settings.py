"""Settings from the environment: where things are, on which ports, never what a model wants.

Every setting is one variable `PERENNIAL_<NAME>`; `Settings.from_environment()` reads them all and
refuses a value it cannot use by name. What a model wants stands in its `model.yaml`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from perennial.errors import Permanent

PREFIX = "PERENNIAL_"


class Settings(BaseModel):
    """One installation's settings. Immutable; each field is the variable `PERENNIAL_<FIELD>`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    home: Path = Field(Path("var"), description="Folder for everything that is written locally.")
    models_dir: Path = Field(Path("models"), description="Folder with one folder per model.")
    profile: str = Field("", description="Overlay: model.<profile>.yaml is merged over model.yaml.")
    store_url: str = Field("", description="fsspec URL of the store; default file://<home>/store.")
    database_url: str = Field("", description="PostgreSQL URL; empty: the embedded one in <home>.")
    bind: str = Field("127.0.0.1", description="Address that every local server listens on.")
    tfs_command: str = Field(
        "", description="Command of a real tensorflow_model_server; empty: the embedded one."
    )
    prometheus_command: str = Field("", description="Path of prometheus; empty: PATH, then .local.")
    router_port: int = Field(9000, ge=1, le=65535, description="Envoy: gRPC and REST clients.")
    router_bind: str = Field(
        "", description="Address that clients reach the router at; empty: bind."
    )
    router_open: bool = Field(
        False, description="A router beyond loopback that answers anybody is meant."
    )
    router_tls_dir: str = Field(
        "", description="Folder of server.crt, server.key and, for mTLS, clients.crt."
    )
    router_api_keys: str = Field("", description="File of lines `client key`; mode 0600.")
    router_jwks: str = Field("", description="File of the JWT issuer's keys (JWKS); mode 0600.")
    router_jwt_issuer: str = Field("", description="What `iss` must be; empty: anything.")
    router_jwt_audience: str = Field("", description="What `aud` must hold; empty: anything.")
    router_rate_per_s: int = Field(0, ge=0, description="Calls per client and second; 0: any.")
    router_max_bytes: int = Field(
        8 << 20, ge=1024, le=64 << 20, description="Largest request that the router takes."
    )
    router_try_s: float = Field(
        10.0,
        gt=0,
        le=60,
        description="Longest attempt of a call while a canary has a share; then stable answers.",
    )
    router_tester_token: str = Field(
        "", description="File of the token that lets testers name the arm; mode 0600."
    )
    router_drain_s: int = Field(
        5, ge=1, description="How long the router finishes calls when it ends or is replaced."
    )
    router_admin_port: int = Field(9901, ge=1, le=65535, description="Envoy's admin interface.")
    stable_port: int = Field(8500, ge=1, le=65535, description="gRPC of the stable pool.")
    stable_rest_port: int = Field(8501, ge=1, le=65535)
    canary_port: int = Field(8510, ge=1, le=65535, description="gRPC of the canary pool.")
    canary_rest_port: int = Field(8511, ge=1, le=65535)
    labels_port: int = Field(9010, ge=1, le=65535, description="gRPC intake of labels.")
    recorder_metrics_port: int = Field(9011, ge=1, le=65535)
    labels_metrics_port: int = Field(9012, ge=1, le=65535)
    exporter_port: int = Field(9013, ge=1, le=65535, description="Quality and ledger metrics.")
    prometheus_port: int = Field(9090, ge=1, le=65535)
    airflow_port: int = Field(8080, ge=1, le=65535, description="Airflow's UI and API.")
    airflow_scheduler_log_port: int = Field(8793, ge=1, le=65535)
    airflow_triggerer_log_port: int = Field(8794, ge=1, le=65535)
    airflow_url: str = Field("", description="Airflow elsewhere; empty: the local one.")
    airflow_user: str = Field("admin", description="With PERENNIAL_AIRFLOW_PASSWORD, for the CLI.")
    capture_percent: int = Field(100, ge=0, le=100, description="Share of calls captured.")
    poll_s: float = Field(15.0, gt=0, description="How often a release looks at its evidence.")
    watch_interval_s: int = Field(300, ge=5, description="How often `<model>.watch` runs.")
    scrape_interval_s: int = Field(15, ge=1, description="Prometheus' scrape and rule interval.")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Reads `PERENNIAL_*`.

        Raises:
            Permanent: `settings.invalid`, naming the variable and its value.
        """
        environ = os.environ if environ is None else environ
        given = {
            name: environ[PREFIX + name.upper()]
            for name in cls.model_fields
            if environ.get(PREFIX + name.upper(), "") != ""
        }
        try:
            settings = cls(**given)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            name = PREFIX + str(first["loc"][0]).upper()
            raise Permanent(
                "settings.invalid",
                f"{name}={first['input']!r}: {first['msg']}",
                hint=f"set {name} to a usable value, or unset it for the default",
                variable=name,
            ) from error
        return settings.model_copy(
            update={"home": settings.home.absolute(), "models_dir": settings.models_dir.absolute()}
        )

    def as_environment(self) -> dict[str, str]:
        """The variables that rebuild these settings in another process."""
        return {
            PREFIX + name.upper(): str(value)
            for name, value in self.model_dump(mode="json").items()
            if value != ""
        }

    @property
    def store(self) -> str:
        """The store's fsspec URL, without a trailing slash."""
        return (self.store_url or f"file://{self.home / 'store'}").rstrip("/")

    @property
    def router_admin_host(self) -> str:
        """Where Envoy's admin interface listens: it can end the router, so on loopback only."""
        local = self.bind == "localhost" or self.bind.startswith("127.") or self.bind == "::1"
        return self.bind if local else "127.0.0.1"

    @property
    def spool_dir(self) -> Path:
        """Short-lived folder for what the router captured, unmasked: mode 0700, on tmpfs if any."""
        shm = Path("/dev/shm")
        if shm.is_dir() and os.access(shm, os.W_OK):
            return shm / f"perennial-{os.getuid()}-{_digest(str(self.home))}"
        return self.home / "spool"

    @property
    def run_dir(self) -> Path:
        """Configuration files, logs and process ids of the local stack."""
        return self.home / "run"

    def key_secret(self) -> bytes:
        """The secret that routing keys are hashed with; made once, mode 0600, never logged."""
        if given := os.environ.get(PREFIX + "KEY_SECRET"):
            return given.encode()
        path = self.home / "key_secret"
        try:
            return path.read_bytes()
        except FileNotFoundError:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".key_secret.{os.getpid()}.{secrets.token_hex(4)}")
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_hex(32).encode())
                file.flush()
                os.fsync(file.fileno())
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            finally:
                temporary.unlink()
            return path.read_bytes()


@cache
def _digest(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()[:12]
