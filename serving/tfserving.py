"""The actuator: the only writer of a model-server pool's configuration.

A pool is a set of replicas that serve the same models, from the same configuration file. The file
is the truth after a restart; a reload makes it true now. A change is a walk that no client sees:

    1. load: old and new versions, labels where they were      → wait until all are AVAILABLE
    2. move: the new labels, the new versions only             → wait until the rest is unloaded

since a label may only name a version that is AVAILABLE, and labels move before versions unload.
Works the same on tensorflow_model_server and on the embedded server. Imports no TensorFlow.
"""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format

from perennial.errors import Permanent, Retryable
from perennial.store import write_atomic
from serving.protos import tfserving_pb2 as pb
from serving.replica import (
    CALL_S,
    ModelAssignment,
    Replica,
    ReplicaClient,
    ServedVersions,
    server_config,
)

__all__ = ["Actuator", "ModelAssignment", "Pool", "Replica", "ServedVersions"]

log = logging.getLogger(__name__)

POLL_S = 0.1
# A version that failed earlier still shows its old failure until the server has looked again.
STALE_FAILURE_S = 4.0
# How a server ends a reload whose new model has no version that loads.
_NOT_LOADED = "did not become available"


@dataclass(frozen=True)
class Pool:
    """Replicas that serve the same models, and the file that says which."""

    name: str
    replicas: tuple[Replica, ...]
    config_file: Path


class Actuator:
    """Declares what a pool serves, and makes it so."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool

    def declared(self) -> dict[str, ModelAssignment]:
        """What the configuration file says, by model; empty without a file.

        Raises:
            Permanent: `pool.config`, for a file that cannot be read or that this class did not
                write (a policy other than `specific`).
        """
        return _parse(self.pool.config_file)

    def apply(
        self, model: str, assignment: ModelAssignment | None, *, deadline_s: float
    ) -> tuple[ServedVersions, ...]:
        """Makes every replica serve `assignment` of `model`, and reads it back.

        All other models stay as declared. Safe to repeat: when it raised Retryable, the same call
        goes on. When a version cannot be loaded, file and replicas go back to what they were.

        Args:
            assignment: None: the model is no longer served.

        Returns:
            What each replica serves now, in the order of the pool's replicas.

        Raises:
            Retryable: `pool.unreachable`, `pool.not_available` at the deadline, or `pool.busy`.
            Permanent: `pool.load_failed`, with the server's own error, or `pool.refused`.
        """
        deadline = time.monotonic() + deadline_s
        with self._locked(deadline), self._clients() as clients:
            before = self.declared()
            wanted = {name: given for name, given in before.items() if name != model}
            if assignment is not None:
                wanted[model] = assignment
            write_atomic(self.pool.config_file, _text(wanted))
            try:
                _converge(clients, wanted, {model}, deadline)
            except Permanent:
                write_atomic(self.pool.config_file, _text(before))
                for client in clients:
                    _restore(client, before)
                raise
            served = tuple(client.served(model, assignment) for client in clients)
        log.info("pool %s serves %s of %s", self.pool.name, assignment, model)
        return served

    def served(self, model: str) -> tuple[ServedVersions, ...]:
        """What each replica serves of the model, in the order of the pool's replicas.

        Raises:
            Retryable: `pool.unreachable`.
        """
        assignment = self.declared().get(model)
        with self._clients() as clients:
            return tuple(client.served(model, assignment) for client in clients)

    def reconcile(self, *, deadline_s: float) -> tuple[str, ...]:
        """Makes every replica serve what is declared; returns the models that differed.

        Raises:
            Retryable, Permanent: as `apply`.
        """
        deadline = time.monotonic() + deadline_s
        with self._locked(deadline), self._clients() as clients:
            declared = self.declared()
            drifted = {
                name
                for name, assignment in declared.items()
                for client in clients
                if not client.served(name, assignment).is_exactly(assignment)
            }
            if drifted:
                _converge(clients, declared, drifted, deadline)
        return tuple(sorted(drifted))

    @contextmanager
    def _clients(self) -> Iterator[list[ReplicaClient]]:
        with ExitStack() as stack:
            yield [stack.enter_context(ReplicaClient(replica)) for replica in self.pool.replicas]

    @contextmanager
    def _locked(self, deadline: float) -> Iterator[None]:
        """One change of a pool at a time, over all processes."""
        path = self.pool.config_file.with_name(f".{self.pool.config_file.name}.lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise Retryable(
                            "pool.busy", f"pool {self.pool.name} is being changed by someone else"
                        ) from None
                    time.sleep(POLL_S)
            yield


def _converge(
    clients: list[ReplicaClient],
    wanted: Mapping[str, ModelAssignment],
    models: set[str],
    deadline: float,
) -> None:
    """The walk: every replica loads before any moves. Waits for `models` only."""
    for client in clients:
        served = {name: client.served(name, None) for name in sorted(models & set(wanted))}
        if any(set(wanted[name].versions) - set(now.available) for name, now in served.items()):
            refusal = client.reload(_with_served(client, wanted), deadline)
            failed_before = {name: now.failed for name, now in served.items()}
            _await_loaded(client, wanted, models, failed_before, refusal, deadline)
    for client in clients:
        others = _with_served(client, {n: a for n, a in wanted.items() if n not in models})
        if refusal := client.reload({**wanted, **others}, deadline):
            raise _refused(client, refusal)
    for client in clients:
        _await_exact(client, wanted, models, deadline)


def _with_served(
    client: ReplicaClient, wanted: Mapping[str, ModelAssignment]
) -> dict[str, ModelAssignment]:
    """What is wanted beside what is served, each label on the wanted version once that is ready.

    A label that no version can carry now is left out: with it the whole reload would be refused.
    """
    assignments = {}
    for name, assignment in wanted.items():
        served = client.served(name, assignment)
        labels = dict(served.labels)
        for label, version in assignment.labels.items():
            if version in served.available:
                labels[label] = version
        versions = (*assignment.versions, *served.available, *labels.values())
        assignments[name] = ModelAssignment(assignment.base_path, versions, labels)
    return assignments


def _await_loaded(
    client: ReplicaClient,
    wanted: Mapping[str, ModelAssignment],
    models: set[str],
    failed_before: Mapping[str, Mapping[int, str]],
    refusal: str,
    deadline: float,
) -> None:
    """Waits until all wanted versions answer.

    Raises:
        Permanent: `pool.load_failed` or `pool.refused`.
        Retryable: `pool.not_available`.
    """
    started = time.monotonic()
    while True:
        waiting = None
        for name in sorted(models & set(wanted)):
            served = client.served(name, None)
            is_fresh = time.monotonic() - started > STALE_FAILURE_S or bool(refusal)
            for version in wanted[name].versions:
                error = served.failed.get(version)
                if error and (is_fresh or version not in failed_before[name]):
                    raise _load_failed(client, f"{name} version {version}", error)
            if not set(wanted[name].versions) <= set(served.available):
                waiting = name, served
        if waiting is None:
            return
        if _NOT_LOADED in refusal:
            raise _load_failed(client, ", ".join(sorted(models)), refusal)
        if refusal:
            raise _refused(client, refusal)
        _check_deadline(client, waiting[1], waiting[0], deadline)
        time.sleep(POLL_S)


def _await_exact(
    client: ReplicaClient, wanted: Mapping[str, ModelAssignment], models: set[str], deadline: float
) -> None:
    """Waits until the models are served as wanted and in no other version."""
    for name in sorted(models):
        while not (served := client.served(name, wanted.get(name))).is_exactly(wanted.get(name)):
            _check_deadline(client, served, name, deadline)
            time.sleep(POLL_S)


def _restore(client: ReplicaClient, before: Mapping[str, ModelAssignment]) -> None:
    """Goes back after a failure, as far as the replica lets; the failure itself is what counts."""
    settable = {}
    for name, assignment in before.items():
        available = client.served(name, None).available
        labels = {label: v for label, v in assignment.labels.items() if v in available}
        settable[name] = ModelAssignment(assignment.base_path, assignment.versions, labels)
    if refusal := client.reload(settable, time.monotonic() + CALL_S):
        log.error("%s: going back to the previous configuration: %s", client.name, refusal)


def _check_deadline(
    client: ReplicaClient, served: ServedVersions, model: str, deadline: float
) -> None:
    if time.monotonic() >= deadline:
        raise Retryable(
            "pool.not_available",
            f"{client.name}: {model} is not as declared at the deadline: available "
            f"{list(served.available)}, pending {list(served.pending)}",
            hint="call again to go on, with a longer deadline if loading takes long",
            replica=client.name,
            model=model,
        )


def _load_failed(client: ReplicaClient, what: str, error: str) -> Permanent:
    return Permanent(
        "pool.load_failed",
        f"{client.name}: {what} cannot be loaded: {error}",
        hint="its files are missing or unusable; export and publish the version again",
        replica=client.name,
        error=error,
    )


def _refused(client: ReplicaClient, refusal: str) -> Permanent:
    return Permanent(
        "pool.refused",
        f"{client.name} refused the configuration: {refusal}",
        replica=client.name,
        error=refusal,
    )


def _parse(path: Path) -> dict[str, ModelAssignment]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return {}
    try:
        config = text_format.Parse(text, pb.ModelServerConfig())
    except text_format.ParseError as error:
        raise Permanent("pool.config", f"{path}: {error}") from error
    assignments = {}
    for model in config.model_config_list.config:
        policy = model.model_version_policy
        if policy.WhichOneof("policy_choice") != "specific":
            raise Permanent(
                "pool.config",
                f"{path}: model {model.name}: its version policy is not `specific`",
                hint="the pool's file is written by Perennial only; remove the model from it",
            )
        assignments[model.name] = ModelAssignment(
            model.base_path, tuple(policy.specific.versions), dict(model.version_labels)
        )
    return assignments


def _text(assignments: Mapping[str, ModelAssignment]) -> bytes:
    return text_format.MessageToString(server_config(assignments)).encode()
