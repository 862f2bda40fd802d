"""Verbs that act on an episode: retrain, promote, approve, rollback, abort, reconcile."""

from __future__ import annotations

import click

from perennial.airflow_api import AirflowApi
from perennial.cli import actor, answer, json_option, open_ledger, reason_option, settings
from perennial.episode import end, override
from perennial.errors import Permanent
from perennial.ledger import Episode
from perennial.spec import load_spec
from perennial.states import State


@click.command()
@click.argument("model")
@reason_option
@click.option("--shuffle-labels", is_flag=True, help="Drill: train a deliberately bad candidate.")
@json_option
def retrain(model: str, reason: str, shuffle_labels: bool, as_json: bool) -> None:
    """Ask for a retrain of MODEL now: a manual run of <model>.retrain in Airflow."""
    here = settings()
    load_spec(here.models_dir / model, here.profile)
    run = AirflowApi(here).trigger(
        f"{model}.retrain",
        conf={"reason": reason, "actor": actor(), "shuffle_labels": shuffle_labels},
    )
    answer(as_json, {"model": model, "run": run}, [f"{model}.retrain: run {run}"])


@click.command()
@click.argument("episode_id", metavar="EPISODE")
@click.option(
    "--override", "overriding", is_flag=True, help="Take a rejected candidate past the gate."
)
@reason_option
@json_option
def promote(episode_id: str, overriding: bool, reason: str, as_json: bool) -> None:
    """Take an episode on: approve one that waits, or --override a rejection by the gate.

    An override exports and releases the candidate like any other: the canary's evidence still
    judges it.
    """
    here = settings()
    with open_ledger(here) as ledger:
        episode = ledger.episode(episode_id)
        if episode.state is State.AWAITING_APPROVAL:
            moved = ledger.transition(
                episode, State.PROMOTING, actor=actor(), evidence={"approved": reason}
            )
            answer(as_json, _document(moved), [f"{moved.id}: approved, now {moved.state}"])
            return
        if not overriding:
            raise Permanent(
                "episode.not_waiting",
                f"episode {episode_id} is {episode.state}: nobody is asked",
                hint="a rejected episode can be taken past the gate with --override",
            )
        api = AirflowApi(here)
        moved = override(ledger, episode_id, actor=actor(), reason=reason)
    run = api.trigger(f"{moved.model}.retrain", conf={}, partition_key=moved.id)
    answer(
        as_json,
        {**_document(moved), "run": run},
        [f"{moved.id}: overridden, now {moved.state}; {moved.model}.retrain: run {run}"],
    )


@click.command()
@click.argument("model")
@reason_option
@json_option
def rollback(model: str, reason: str, as_json: bool) -> None:
    """Withdraw MODEL's candidate, or its newest champion, and fence it. Works without Airflow."""
    from serving.flow import roll_back

    here = settings()
    spec = load_spec(here.models_dir / model, here.profile)
    with open_ledger(here) as ledger:
        done = roll_back(here, spec, ledger, actor=actor(), reason=reason)
    answer(as_json, done, [done["summary"]])


@click.command()
@click.argument("episode_id", metavar="EPISODE")
@reason_option
@json_option
def abort(episode_id: str, reason: str, as_json: bool) -> None:
    """Stop an open episode. Its candidate is taken out of serving. Works without Airflow."""
    from serving.flow import ReleaseFlow

    here = settings()
    with open_ledger(here) as ledger:
        model = ledger.episode(episode_id).model
        spec = load_spec(here.models_dir / model, here.profile)
        flow = ReleaseFlow(here, spec, ledger)
        ended = end(
            ledger,
            episode_id,
            State.ABORTED,
            actor=actor(),
            reason=reason,
            cleanup=flow.cleanup,
        )
    answer(as_json, _document(ended), [f"{ended.id}: {ended.state}"])


@click.command()
@click.argument("model")
@json_option
def reconcile(model: str, as_json: bool) -> None:
    """Make the pools and the router what the ledger says. Works without Airflow."""
    from serving.reconcile import Serving

    here = settings()
    load_spec(here.models_dir / model, here.profile)
    with open_ledger(here) as ledger:
        want = Serving(here, ledger).reconcile(model)
    answer(
        as_json,
        {"model": model, "stable": want.stable, "canary": want.canary, "share": want.share},
        [
            f"{model}: stable {list(want.stable)}, canary {list(want.canary)}, "
            f"canary share {want.share:g}"
        ],
    )


@click.group()
def registry() -> None:
    """MLflow's view of the ledger."""


@registry.command("sync")
@click.argument("model")
@json_option
def registry_sync(model: str, as_json: bool) -> None:
    """Rebuild MODEL's runs, versions and aliases in MLflow from the ledger."""
    from perennial.registry import sync

    here = settings()
    load_spec(here.models_dir / model, here.profile)
    with open_ledger(here) as ledger:
        count = sync(here, ledger, model)
    answer(as_json, {"model": model, "episodes": count}, [f"{model}: {count} episodes shown"])


def _document(episode: Episode) -> dict[str, object]:
    return {
        "episode": episode.id,
        "model": episode.model,
        "state": str(episode.state),
        "version": episode.version,
    }


COMMANDS = (retrain, promote, rollback, abort, reconcile, registry)
