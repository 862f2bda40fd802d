"""What is loaded: the versions of every model, their labels, and how they change.

One thread looks for versions and makes transitions; loads and unloads run beside it, so that a slow
one delays nothing else. Look-ups read maps that are replaced, never changed, so they take no lock.
"""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from perennial import store
from serving.embedded import config as configs
from serving.embedded.servable import Servable, not_found
from serving.embedded.status import Code, StatusError, invalid
from serving.embedded.versions import Load, Model, State, Unload, Version, next_step

log = logging.getLogger(__name__)

# How long a reload waits for a new model of which no version can be found.
MISSING_MODEL_S = 5.0
# Models that the configuration no longer names, kept for GetModelStatus.
KEPT_REMOVED = 100
TICK_S = 0.1
# Versions that load, or unload, at once unless a flag says otherwise.
LOADS = 16

Loader = Callable[[str, int, Path], Servable]


@dataclass(frozen=True)
class Options:
    """The flags that rule the manager.

    Attributes:
        poll_s: seconds between two looks at the base paths; 0: only after a configuration;
            negative: the same (the real server never looks then, which helps nobody).
        load_threads, unload_threads: versions that load and unload at once; 0: LOADS, so that one
            model's slow load holds up no other model.
    """

    poll_s: float = 1.0
    max_retries: int = 5
    retry_interval_s: float = 60.0
    early_labels: bool = False
    load_threads: int = 0
    unload_threads: int = 0


class Manager:
    """Owns every servable. All methods are thread-safe.

    Args:
        loader: loads and warms up one version, or raises StatusError.
    """

    def __init__(self, loader: Loader, options: Options) -> None:
        self._loader = loader
        self._options = options
        self._reloading = threading.Lock()
        self._changed = threading.Condition()
        self._models: dict[str, Model] = {}
        self._ready: dict[str, dict[int, Servable]] = {}
        self._labels: dict[str, dict[str, int]] = {}
        self._look_now = False
        self._stopping = False
        self._loads = ThreadPoolExecutor(options.load_threads or LOADS, "load")
        self._unloads = ThreadPoolExecutor(options.unload_threads or LOADS, "unload")
        self._thread = threading.Thread(target=self._run, name="manager", daemon=True)
        self._thread.start()

    def find(self, model: str, version: int | None = None, label: str | None = None) -> Servable:
        """The servable that a request means: by label, by number, or the highest number.

        Raises:
            StatusError: INVALID_ARGUMENT for an unknown label, NOT_FOUND otherwise.
        """
        if label is not None:
            version = self._labels.get(model, {}).get(label)
            if version is None:
                raise invalid(f"Unrecognized servable version label: {label}")
        ready = self._ready.get(model)
        if not ready:
            raise not_found(model, version)
        servable = ready.get(max(ready) if version is None else version)
        if servable is None:
            raise not_found(model, version)
        return servable

    def knows(self, model: str) -> bool:
        """Whether the configuration names the model, or did."""
        return model in self._models

    def status(self, model: str, version: int | None = None) -> list[Version]:
        """The known versions, ascending; one when `version` is given.

        Raises:
            StatusError: NOT_FOUND.
        """
        with self._changed:
            known = self._models.get(model, Model()).versions
            if version is not None:
                if version not in known:
                    raise StatusError(
                        Code.NOT_FOUND, f"Could not find version {version} of model {model}"
                    )
                return [known[version]]
            if not known:
                raise StatusError(Code.NOT_FOUND, f"Could not find any versions of model {model}")
            return [known[number] for number in sorted(known)]

    def available(self) -> dict[str, tuple[int, ...]]:
        """Versions that answer, by model."""
        return {model: tuple(sorted(ready)) for model, ready in self._ready.items()}

    def reload(
        self, config: configs.ModelServerConfig, *, missing_model_s: float | None = MISSING_MODEL_S
    ) -> None:
        """Replaces the configuration; omitted models are unloaded. Concurrent reloads queue up.

        It waits for models that were not configured before, not for new versions of others.

        Args:
            missing_model_s: how long to wait for a new model without any version; None: for ever.

        Raises:
            StatusError: the configuration is refused, or a new model did not become available.
        """
        kind = config.WhichOneof("config")
        if kind is None:
            return
        if kind != "model_config_list":
            raise StatusError(
                Code.FAILED_PRECONDITION,
                "Cannot transition to requested config. It is only legal to transition from one "
                "ModelConfigList to another.",
            )
        with self._reloading:
            with self._changed:
                previous = {n: m.config for n, m in self._models.items() if m.config is not None}
                models = configs.checked_models(config, previous)
                self._set_labels(models)
                configs.check_platforms(models)
                self._configure(models)
            self._await([name for name in models if name not in previous], missing_model_s)
            configs.check_logging(models)

    def stop(self) -> None:
        """Stops all transitions; what is loaded stays until the process ends."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._unloads.shutdown(wait=False, cancel_futures=True)

    # Reload

    def _set_labels(self, models: Mapping[str, configs.ModelConfig]) -> None:
        """Checks the whole new label map, then swaps it, before any version changes."""
        for name, model in models.items():
            ready = self._ready.get(name, {})
            now = self._labels.get(name, {})
            for label, version in model.version_labels.items():
                is_early = self._options.early_labels and now.get(label, version) == version
                if version not in ready and not is_early:
                    raise StatusError(
                        Code.FAILED_PRECONDITION,
                        f"Request to assign label to version {version} of model {name}, which is "
                        "not currently available for inference",
                    )
        self._labels = {name: dict(model.version_labels) for name, model in models.items()}

    def _configure(self, models: Mapping[str, configs.ModelConfig]) -> None:
        for name, model in self._models.items():
            if name not in models:
                model.config, model.problem = None, None
                model.want({})
        for name, model_config in models.items():
            # A name that comes back goes to the end: the oldest removed ones are forgotten first.
            model = self._models[name] = self._models.pop(name, Model())
            model.config, model.looked = model_config, False
        removed = [n for n, m in self._models.items() if m.config is None and n not in self._ready]
        for name in removed[:-KEPT_REMOVED]:
            del self._models[name]
        self._look_now = True
        self._changed.notify_all()

    def _await(self, names: list[str], missing_model_s: float | None) -> None:
        """Waits until each new model has a version that answers, or has failed."""
        started = time.monotonic()
        failures: dict[str, str] = {}
        waiting = sorted(names)
        with self._changed:
            while waiting and not self._stopping:
                for name in list(waiting):
                    model = self._models[name]
                    settled = model.first_settled() if model.looked else None
                    if settled is not None:
                        waiting.remove(name)
                        if settled.state == State.END:
                            failures[name] = f"{settled.number} due to error: <{settled.error}>"
                    elif (
                        missing_model_s is not None
                        and not model.wanted
                        and model.problem is not None
                        and time.monotonic() - started > missing_model_s
                    ):
                        waiting.remove(name)
                        failures[name] = f"(none) due to error: <{model.problem}>"
                if waiting:
                    self._changed.wait(TICK_S)
        if failures:
            raise StatusError(
                Code.UNKNOWN,
                f"{len(failures)} model(s) did not become available: {{"
                + "".join(f"{{name: {n} version: {text}}}, " for n, text in failures.items())
                + "}",
            )

    # The manager's thread

    def _run(self) -> None:
        next_look = 0.0
        while True:
            with self._changed:
                if self._stopping:
                    return
                poll_s = self._options.poll_s
                due = self._look_now or (poll_s > 0 and time.monotonic() >= next_look)
                self._look_now = False
                targets = (
                    {n: m.config for n, m in self._models.items() if m.config is not None}
                    if due
                    else {}
                )
            if due:
                next_look = time.monotonic() + max(poll_s, 0.0)
            for name, model_config in targets.items():
                self._look(name, model_config)
            with self._changed:
                stepped = [self._step(name, model) for name, model in self._models.items()]
                if not any(stepped) and not self._look_now and not self._stopping:
                    self._changed.wait(TICK_S)

    def _look(self, name: str, model_config: configs.ModelConfig) -> None:
        """Looks at one base path. A missing one changes nothing, and for its own model only."""
        base_path = Path(model_config.base_path)
        problem: StatusError | None = None
        found: dict[int, Path] | None = None
        try:
            found = configs.found_versions(base_path)
        except OSError as error:
            problem = _missing(
                f"Could not find base path {base_path} for servable {name} with error {error}"
            )
        else:
            wanted, missing = configs.wanted_versions(model_config, found)
            if missing:
                problem = _missing(
                    f"Version(s) {sorted(missing)} of servable {name}, requested to be served as "
                    f"specific, not found under base path {base_path}"
                )
            elif not wanted:
                problem = _missing(
                    f"No versions of servable {name} found under base path {base_path}"
                )
        with self._changed:
            model = self._models[name]
            if model.config is not model_config:
                return
            if problem is not None and str(problem) != str(model.problem):
                log.warning("%s", problem.message)
            model.problem, model.looked = problem, True
            if found is not None:
                model.want({number: found[number] for number in wanted})

    def _step(self, name: str, model: Model) -> bool:
        """Starts at most one transition of one model; whether it did."""
        for version in model.versions.values():
            if version.retry_at is not None and version.number not in model.wanted:
                version.state, version.retry_at = State.END, None
                return True
            if version.retry_at is not None and time.monotonic() >= version.retry_at:
                version.retry_at = None
                self._loads.submit(self._load, name, version)
                return True
        match next_step(model.wanted, model.states()):
            case Load(number):
                version = Version(number, model.wanted[number])
                model.versions[number] = version
                self._loads.submit(self._load, name, version)
            case Unload(number):
                version = model.versions[number]
                version.state = State.UNLOADING
                self._replace_ready(name, number, None)
                self._unloads.submit(self._unload, name, version)
            case None:
                return False
        return True

    def _load(self, name: str, version: Version) -> None:
        with self._changed:
            version.state = State.LOADING
            version.attempts += 1
        servable: Servable | None = None
        try:
            servable = self._loader(name, version.number, version.folder)
            failure = None
        except StatusError as error:
            failure = error
        except Exception as error:
            log.exception("loading %s version %d", name, version.number)
            failure = StatusError(Code.INTERNAL, f"{type(error).__name__}: {error}")
        with self._changed:
            if servable is not None:
                version.servable = servable
                self._replace_ready(name, version.number, servable)
                version.state = State.AVAILABLE
                log.info("%s version %d is available", name, version.number)
            elif failure is not None:
                self._failed(name, version, failure)
            self._changed.notify_all()

    def _failed(self, name: str, version: Version, failure: StatusError) -> None:
        log.error("loading %s version %d: %s", name, version.number, failure)
        # A published folder never changes, so a wrong checksum stays wrong.
        is_wrong = failure.code == Code.DATA_LOSS and store.is_published(version.folder)
        is_final = is_wrong or version.attempts > self._options.max_retries
        if is_final:
            version.error, version.state = failure, State.END
        else:
            version.retry_at = time.monotonic() + self._options.retry_interval_s

    def _unload(self, name: str, version: Version) -> None:
        assert version.servable is not None
        version.servable.retire()
        version.servable = None
        # A graph and its operations refer to each other: only the collector frees them.
        gc.collect()
        with self._changed:
            version.state = State.END
            version.forgiven = True
            log.info("%s version %d is unloaded", name, version.number)
            self._changed.notify_all()

    def _replace_ready(self, name: str, number: int, servable: Servable | None) -> None:
        ready = dict(self._ready.get(name, {}))
        if servable is None:
            del ready[number]
        else:
            ready[number] = servable
        others = {other: versions for other, versions in self._ready.items() if other != name}
        self._ready = {**others, name: ready} if ready else others


def _missing(message: str) -> StatusError:
    return StatusError(Code.NOT_FOUND, message)
