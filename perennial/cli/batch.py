"""Verbs over many rows: batch-predict."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from perennial.cli import answer, json_option, open_ledger, settings
from perennial.spec import load_spec


@click.command("batch-predict")
@click.argument("model")
@click.option(
    "--input",
    "inputs",
    multiple=True,
    required=True,
    help="Parquet or CSV file, a quoted pattern, or a folder; may be given again.",
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder to publish; must not exist yet.",
)
@click.option("--version", type=click.IntRange(min=1), help="Default: the champion.")
@json_option
def batch_predict(
    model: str, inputs: tuple[str, ...], output: Path, version: int | None, as_json: bool
) -> None:
    """Predict all rows of the inputs with MODEL's champion.

    The output appears whole. Killed, and called again in the same way, it goes on where it was.
    """
    from perennial.store import Store
    from serving.batch.job import batch_predict as predict

    here = settings()
    spec = load_spec(here.models_dir / model, here.profile)
    done = predict(
        spec,
        Store(here.store),
        inputs,
        output,
        version=version,
        champion=None if version else _champion(model),
    )
    answer(
        as_json,
        asdict(done),
        [
            f"{done.output}: {done.scored} of {done.rows} rows scored by {model} version "
            f"{done.version}",
            *(
                [f"{done.bad} bad rows, each with its reason: {done.output / 'bad'}"]
                * (done.bad > 0)
            ),
        ],
    )


def _champion(model: str) -> int | None:
    with open_ledger(settings()) as ledger:
        champion = ledger.champion(model)
    return champion.version if champion else None


COMMANDS = (batch_predict,)
