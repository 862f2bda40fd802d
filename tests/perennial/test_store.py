"""The store: whole or not at all, and every byte accounted for."""

import json
from threading import Barrier, Thread

import pytest

from perennial.errors import Conflict, Permanent
from perennial.store import (
    MANIFEST,
    Store,
    is_published,
    publishing,
    read_manifest,
    verify,
    write_atomic,
)


def publish(target, content=b"weights", **facts):
    with publishing(target, kind="export", model="m", id="e", parents={"run": "r"}) as (tmp, told):
        (tmp / "variables").mkdir()
        (tmp / "variables" / "data").write_bytes(content)
        (tmp / "saved_model.pb").write_bytes(b"graph")
        told.update(facts)


def test_a_published_artifact_says_what_it_is(tmp_path):
    target = tmp_path / "exports" / "e"
    publish(target, rows=3)
    manifest = verify(target)
    assert manifest.facts == {"rows": 3}
    assert manifest.parents == {"run": "r"}
    assert [f.path for f in manifest.files] == ["saved_model.pb", "variables/data"]
    assert [p.name for p in target.parent.iterdir()] == ["e"]


def test_nothing_remains_of_a_publication_that_failed(tmp_path):
    target = tmp_path / "e"

    def crash():
        with publishing(target, kind="export", model="m", id="e") as (tmp, _):
            (tmp / "half").write_bytes(b"x")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        crash()
    assert list(tmp_path.iterdir()) == []
    assert not is_published(target)


def test_an_unfinished_folder_is_no_artifact_and_is_replaced(tmp_path):
    target = tmp_path / "e"
    target.mkdir()
    (target / "half").write_bytes(b"x")
    with pytest.raises(Permanent, match="never published whole"):
        read_manifest(target)
    publish(target)
    assert not (target / "half").exists()
    verify(target)


def test_publishing_twice_is_a_conflict(tmp_path):
    publish(tmp_path / "e")
    with pytest.raises(Conflict, match="already published"):
        publish(tmp_path / "e", b"other")
    assert (tmp_path / "e" / "variables" / "data").read_bytes() == b"weights"


def test_one_of_two_racing_publications_wins(tmp_path):
    barrier, won, lost = Barrier(2), [], []

    def race(content):
        try:
            with publishing(tmp_path / "e", kind="export", model="m", id="e") as (tmp, _):
                (tmp / "data").write_bytes(content)
                barrier.wait()
            won.append(content)
        except Conflict:
            lost.append(content)

    threads = [Thread(target=race, args=(c,)) for c in (b"one", b"two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == len(lost) == 1
    assert (tmp_path / "e" / "data").read_bytes() == won[0]
    verify(tmp_path / "e")
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda t: (t / "variables" / "data").write_bytes(b"weightz"), "was changed after"),
        (lambda t: (t / "variables" / "data").write_bytes(b"w"), "has 1 bytes"),
        (lambda t: (t / "variables" / "data").unlink(), "is missing"),
        (lambda t: (t / "extra").write_bytes(b""), "not in the artifact's manifest"),
        (lambda t: (t / MANIFEST).write_text("{"), "cannot be read"),
        (lambda t: (t / MANIFEST).write_text(json.dumps({"kind": "x"})), "cannot be read"),
    ],
)
def test_damage_is_named(tmp_path, damage, says):
    publish(tmp_path / "e")
    damage(tmp_path / "e")
    with pytest.raises(Permanent, match=says):
        verify(tmp_path / "e")


def test_atomic_write_replaces_whole(tmp_path):
    write_atomic(tmp_path / "a" / "f", b"1")
    write_atomic(tmp_path / "a" / "f", b"22")
    assert (tmp_path / "a" / "f").read_bytes() == b"22"
    assert [p.name for p in (tmp_path / "a").iterdir()] == ["f"]


@pytest.mark.parametrize("url", ["s3://bucket/x", "relative/path"])
def test_a_store_that_cannot_be_used_is_refused(url):
    with pytest.raises(Permanent, match="store"):
        Store(url)
