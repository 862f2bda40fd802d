"""MLflow, the face of the ledger for data scientists: a run per episode, versions with aliases.

A projection: the ledger is the truth, and `sync` rebuilds what MLflow shows as often as it is
called. MLflow is imported where it is used (seconds of CPU).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from perennial.ledger import Champion, Episode, Ledger
from perennial.local.postgres import database_url
from perennial.settings import Settings
from perennial.states import TERMINAL, State
from perennial.store import Store

log = logging.getLogger(__name__)

EPISODE_TAG = "perennial.episode"


def sync(settings: Settings, ledger: Ledger, model: str) -> int:
    """Brings MLflow's runs, versions and aliases of one model up to the ledger.

    Returns:
        The number of episodes shown.
    """
    from mlflow import MlflowClient

    url = database_url(settings, "mlflow")
    client = MlflowClient(tracking_uri=url, registry_uri=url)
    store = Store(settings.store)
    experiment = _experiment(client, f"perennial/{model}", store.model_dir(model).as_uri())
    runs = _runs(client, experiment)
    versions = _versions(client, model)
    champion = ledger.champion(model)
    episodes = ledger.episodes(model, limit=1000)
    for episode in reversed(episodes):
        run_id = _show_run(client, experiment, runs.get(episode.id), episode)
        if episode.version is not None and episode.id not in versions:
            path = store.version(model, episode.version)
            if path.exists():
                made = client.create_model_version(
                    model,
                    source=path.as_uri(),
                    run_id=run_id,
                    tags={EPISODE_TAG: episode.id, "perennial.version": str(episode.version)},
                )
                versions[episode.id] = made.version
    for episode in episodes:
        if episode.id in versions:
            client.set_model_version_tag(
                model, versions[episode.id], "perennial.state", str(episode.state)
            )
    _aliases(client, model, versions, champion, episodes)
    return len(episodes)


def aliases(
    champion: Champion | None, episodes: list[Episode], versions: Mapping[str, str]
) -> dict[str, str]:
    """Which MLflow version each alias names: champion, previous, candidate."""
    wanted = {}
    if champion and champion.episode_id in versions:
        wanted["champion"] = versions[champion.episode_id]
    previous = champion.previous_episode_id if champion else None
    if previous is not None and previous in versions:
        wanted["previous"] = versions[previous]
    for episode in episodes:
        if episode.is_open and episode.id in versions and episode.state is not State.PROBATION:
            wanted["candidate"] = versions[episode.id]
    return wanted


def _experiment(client: Any, name: str, artifacts: str) -> str:
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    return str(client.create_experiment(name, artifact_location=artifacts))


def _runs(client: Any, experiment: str) -> dict[str, Any]:
    runs = client.search_runs([experiment], max_results=1000)
    return {run.data.tags.get(EPISODE_TAG, ""): run for run in runs}


def _versions(client: Any, model: str) -> dict[str, str]:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    found = client.search_model_versions(f"name = '{model}'", max_results=1000)
    return {version.tags.get(EPISODE_TAG, ""): str(version.version) for version in found}


def _show_run(client: Any, experiment: str, run: Any, episode: Episode) -> str:
    if run is None:
        run = client.create_run(
            experiment,
            start_time=int(episode.created.timestamp() * 1000),
            run_name=episode.id,
            tags={EPISODE_TAG: episode.id, "perennial.code_revision": episode.code_revision},
        )
        client.log_param(run.info.run_id, "spec_hash", episode.spec_hash)
    run_id = str(run.info.run_id)
    client.set_tag(run_id, "perennial.state", str(episode.state))
    client.set_tag(run_id, "perennial.trigger", str(episode.trigger.get("kind", "")))
    known = run.data.metrics
    for name, value in _metrics(episode.data):
        if known.get(name) != value:
            client.log_metric(run_id, name, value)
    if episode.state in TERMINAL and run.info.status == "RUNNING":
        client.set_terminated(
            run_id,
            "FAILED" if episode.state is State.FAILED else "FINISHED",
            int(episode.updated.timestamp() * 1000),
        )
    return run_id


def _metrics(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for key, value in data.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            yield f"{prefix}{key}", float(value)
        elif isinstance(value, Mapping):
            yield from _metrics(value, f"{prefix}{key}.")


def _aliases(
    client: Any,
    model: str,
    versions: Mapping[str, str],
    champion: Champion | None,
    episodes: list[Episode],
) -> None:
    wanted = aliases(champion, episodes, versions)
    held = dict(client.get_registered_model(model).aliases)
    for alias in held.keys() & {"champion", "previous", "candidate"} - wanted.keys():
        client.delete_registered_model_alias(model, alias)
    for alias, version in wanted.items():
        if str(held.get(alias)) != version:
            client.set_registered_model_alias(model, alias, version)
