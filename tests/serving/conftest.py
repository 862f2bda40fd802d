from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.serving import Server, export_model, start_server

# One attempt per load: a corrupt version must fail now, not after five minutes.
FLAGS = ("--max_num_load_retries=0", "--file_system_poll_wait_seconds=1")


@pytest.fixture(scope="session")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SavedModels made once: affine/{1,2,3} scale by 2, 3, 4; mixed/1; corrupt (cut variables)."""
    root = tmp_path_factory.mktemp("exports")
    for version, scale in ((1, 2.0), (2, 3.0), (3, 4.0)):
        export_model(root / "affine" / str(version), "affine", scale=scale)
    export_model(root / "mixed" / "1", "mixed")
    corrupt = shutil.copytree(root / "affine" / "1", root / "corrupt")
    data = corrupt / "variables" / "variables.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:2])
    return root


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests; whoever uses it configures it first."""
    with start_server(tmp_path_factory.mktemp("server"), flags=FLAGS) as started:
        yield started


@pytest.fixture(scope="session")
def second_server(exports: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that starts from a configuration with a label, as after a restart."""
    config = f"""model_config_list {{ config {{
        name: "affine" base_path: "{exports}/affine" model_platform: "tensorflow"
        model_version_policy {{ specific {{ versions: 1 }} }}
        version_labels {{ key: "stable" value: 1 }} }} }}"""
    flags = (*FLAGS, "--allow_version_labels_for_unavailable_models")
    with start_server(tmp_path_factory.mktemp("second"), config=config, flags=flags) as started:
        yield started
