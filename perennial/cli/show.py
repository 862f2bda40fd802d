"""Verbs that look: check, status, explain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import click

from perennial.cli import answer, json_option, open_ledger, settings
from perennial.errors import Permanent
from perennial.ledger import Episode, Event, Ledger
from perennial.spec import ModelSpec, json_schema, load_spec, load_specs


@click.command()
@click.argument("model", required=False)
@click.option("--schema", is_flag=True, help="Print the JSON schema of model.yaml.")
@json_option
def check(model: str | None, schema: bool, as_json: bool) -> None:
    """Validate model.yaml of MODEL, or of all models under care."""
    if schema:
        click.echo(json.dumps(json_schema(), indent=1))
        return
    found = _specs(model)
    lines = [
        f"{spec.name}: ok ({len(spec.data.features)} features, "
        f"{len(spec.thresholds)} thresholds, spec {spec.spec_hash[:12]})"
        for spec in found.values()
    ]
    answer(as_json, {name: spec.spec_hash for name, spec in found.items()}, lines)


def _specs(model: str | None) -> dict[str, ModelSpec]:
    here = settings()
    if model is not None:
        return {model: load_spec(here.models_dir / model, here.profile)}
    found = load_specs(here.models_dir, here.profile)
    if not found:
        raise Permanent(
            "model.none",
            f"no models/<name>/model.yaml in {here.models_dir}",
            hint="set PERENNIAL_MODELS_DIR to the folder that holds them",
        )
    return found


@click.command()
@click.argument("model", required=False)
@click.option("--limit", default=10, show_default=True, help="Episodes shown per model.")
@json_option
def status(model: str | None, limit: int, as_json: bool) -> None:
    """Who serves, what is open, and the latest episodes."""
    document: dict[str, Any] = {}
    lines: list[str] = []
    with open_ledger(settings()) as ledger:
        for name in _specs(model):
            document[name] = _status(ledger, name, limit)
            lines += _status_lines(name, document[name])
    answer(as_json, document, lines)


def _status(ledger: Ledger, model: str, limit: int) -> dict[str, Any]:
    champion = ledger.champion(model)
    open_ = ledger.open_episode_of(model)
    return {
        "champion": {
            "version": champion.version,
            "episode": champion.episode_id,
            "since": champion.since.isoformat(),
            "previous_version": champion.previous_version,
            "baseline": dict(champion.baseline),
        }
        if champion
        else None,
        "open_episode": _row(open_) if open_ else None,
        "episodes": [_row(episode) for episode in ledger.episodes(model, limit)],
        "fences": {str(v): reason for v, reason in ledger.fences(model).items()},
    }


def _row(episode: Episode) -> dict[str, Any]:
    return {
        "episode": episode.id,
        "state": str(episode.state),
        "since": episode.state_since.isoformat(timespec="seconds"),
        "version": episode.version,
        "trigger": dict(episode.trigger),
    }


def _status_lines(name: str, found: dict[str, Any]) -> list[str]:
    champion = found["champion"]
    lines = [
        f"{name}: version {champion['version']} serves since {champion['since'][:19]}"
        if champion
        else f"{name}: nothing serves yet"
    ]
    lines += [
        f"  {row['episode']:42} {row['state']:18} "
        f"{'v' + str(row['version']) if row['version'] else '-':>5}  "
        f"{'; '.join(map(str, row['trigger'].get('reasons', [])))[:60]}"
        for row in found["episodes"]
    ]
    lines += [f"  fenced: v{version}: {why}" for version, why in found["fences"].items()]
    return lines


@click.command()
@click.argument("episode_id", metavar="EPISODE")
@json_option
def explain(episode_id: str, as_json: bool) -> None:
    """Why an episode began and how it came to its end: every step, with its evidence."""
    with open_ledger(settings()) as ledger:
        episode = ledger.episode(episode_id)
        events = ledger.events(episode_id)
        verified = ledger.verify_history(episode_id)
    answer(as_json, story(episode, events), story_lines(episode, events, verified))


def story(episode: Episode, events: list[Event]) -> dict[str, Any]:
    """An episode as one JSON document."""
    return {
        **_row(episode),
        "model": episode.model,
        "champion_at_start": episode.champion_at_start,
        "spec_hash": episode.spec_hash,
        "code_revision": episode.code_revision,
        "params": dict(episode.params),
        "events": [
            {
                "time": event.time.isoformat(),
                "actor": event.actor,
                "from": str(event.from_state),
                "to": str(event.to_state),
                "evidence": dict(event.evidence),
            }
            for event in events
        ],
    }


def story_lines(episode: Episode, events: list[Event], verified: int) -> list[str]:
    """An episode's timeline for people."""
    lines = [
        f"episode {episode.id}: {episode.state}"
        + (f", version {episode.version}" if episode.version else ""),
        f"  champion at start: {episode.champion_at_start or 'none'}; spec "
        f"{episode.spec_hash[:12]}; code {episode.code_revision[:12]}",
    ]
    previous: datetime | None = None
    for event in events:
        waited = f"+{(event.time - previous).total_seconds():.1f} s" if previous else ""
        previous = event.time
        step = str(event.to_state)
        if event.from_state is event.to_state and event.seq > 1:
            step += " (next stage)"
        lines.append(f"  {event.time:%H:%M:%S} {waited:>10}  {step}  [{event.actor}]")
        lines += [f"      {text}" for text in _flat(event.evidence)]
    lines.append(f"  history verified: {verified} events, hash chain intact")
    return lines


def _flat(value: Mapping[str, Any], prefix: str = "", limit: int = 14) -> list[str]:
    lines: list[str] = []
    for key, inner in value.items():
        name = f"{prefix}{key}"
        if isinstance(inner, Mapping):
            lines += _flat(inner, f"{name}.", limit)
        elif isinstance(inner, list) and inner and isinstance(inner[0], Mapping):
            for index, item in enumerate(inner):
                lines += _flat(item, f"{name}[{index}].", limit)
        else:
            shown = f"{inner:.5g}" if isinstance(inner, float) else str(inner)
            lines.append(f"{name}: {shown[:160]}")
    if len(lines) > limit and not prefix:
        return [*lines[:limit], f"… {len(lines) - limit} more: --json"]
    return lines


COMMANDS = (check, status, explain)
