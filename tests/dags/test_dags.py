"""The DAG files parse, quickly and without heavy imports, into what the design says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent.parent
PROGRAM = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
bag = DagBag(dag_folder=sys.argv[1])
heavy = ["tensorflow", "keras", "great_expectations", "mlflow", "ibis", "duckdb", "scipy",
         "apache_beam"]
print("ANSWER" + json.dumps({
    "errors": bag.import_errors,
    "heavy": [name for name in heavy if name in sys.modules],
    "dags": {d: {t.task_id: sorted(t.downstream_task_ids) for t in dag.tasks}
             for d, dag in bag.dags.items()},
    "params": {d: sorted(dag.params) for d, dag in bag.dags.items()},
    "max_active_runs": {d: dag.max_active_runs for d, dag in bag.dags.items()},
}))
"""


def parse(tmp_path, models_dir):
    environment = {
        **os.environ,
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
        "PERENNIAL_HOME": str(tmp_path),
        "PERENNIAL_MODELS_DIR": str(models_dir),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONWARNINGS": "ignore",
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(REPOSITORY / "dags")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "ANSWER" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.rpartition("ANSWER")[2])


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """The DAGs of two models: the second is a new folder, and nothing else was touched."""
    tmp_path = tmp_path_factory.mktemp("dags")
    models = tmp_path / "models"
    for name in ("flights", "second"):
        (models / name).mkdir(parents=True)
        text = (REPOSITORY / "models" / "flights" / "model.yaml").read_text()
        (models / name / "model.yaml").write_text(text.replace("name: flights", f"name: {name}"))
    return parse(tmp_path, models)


def test_no_import_error_and_nothing_heavy(parsed):
    assert parsed["errors"] == {}
    assert parsed["heavy"] == []


def test_a_new_folder_gives_new_dags(parsed):
    kinds = ("watch", "retrain", "release", "batch_predict")
    assert set(parsed["dags"]) == {
        *(f"{model}.{kind}" for model in ("flights", "second") for kind in kinds),
        "perennial.housekeeping",
    }


def test_the_retrain_walks_the_states_in_order(parsed):
    tasks = parsed["dags"]["flights.retrain"]
    walk = ["open"]
    while tasks[walk[-1]]:
        following = [t for t in tasks[walk[-1]] if t != "hand_over"] or tasks[walk[-1]]
        walk += following
    assert walk == [
        *("open", "collecting", "validating", "training", "evaluating", "exporting"),
        "hand_over",
    ]


def test_the_release_always_concludes(parsed):
    tasks = parsed["dags"]["flights.release"]
    assert tasks["probation"] == ["conclude"]
    assert tasks["conclude"] == []


def test_one_run_at_a_time_per_model(parsed):
    assert set(parsed["max_active_runs"].values()) == {1}


def test_a_bad_model_yaml_is_an_import_error_that_carries_the_fix(tmp_path):
    folder = tmp_path / "models" / "flights"
    folder.mkdir(parents=True)
    text = (REPOSITORY / "models" / "flights" / "model.yaml").read_text()
    (folder / "model.yaml").write_text(text.replace("owner:", "ownr:"))
    errors = parse(tmp_path, tmp_path / "models")["errors"]
    assert len(errors) == 4
    assert all("did you mean 'owner'?" in text for text in errors.values())


def test_the_batch_asks_for_its_files(parsed):
    assert parsed["dags"]["flights.batch_predict"] == {"predict": []}
    assert parsed["params"]["flights.batch_predict"] == ["input", "output", "version"]
