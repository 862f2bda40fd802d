"""model.yaml: what is wrong is said by file, place and nearest known key."""

from datetime import timedelta

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from perennial.durations import format_duration, parse_duration
from perennial.errors import Permanent
from perennial.spec import json_schema, load_spec, load_specs


@pytest.fixture
def folder(tmp_path, flights):
    """A copy of the flights model's YAML that a test may spoil."""
    target = tmp_path / "flights"
    target.mkdir()
    (target / "model.yaml").write_text((flights.folder / "model.yaml").read_text())
    return target


def spoil(folder, change):
    path = folder / "model.yaml"
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content))


def mask(feature, kind, edges=()):
    extra = {"edges": list(edges)} if edges else {}
    return lambda c: c["data"]["features"][feature].update(sensitive=kind, **extra)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        (lambda c: c.update(ownr="x"), "unknown_key", "did you mean 'owner'"),
        (lambda c: c["training"].update(worker=2), "unknown_key", "did you mean 'workers'"),
        (lambda c: c["thresholds"][0].update(windw="1h"), "unknown_key", "did you mean 'window'"),
        (
            lambda c: c["data"]["features"]["dest"].update(sensitiv="drop"),
            "unknown_key",
            "'sensitive'",
        ),
        (mask("dest", "bucket", [1]), "invalid", "bucket is for int and float features"),
        (mask("distance", "redact"), "invalid", "redact is for string features"),
        (mask("distance", "hash"), "invalid", "hash is for string and int features"),
        (mask("distance", "bucket"), "invalid", "bucket and edges belong together"),
        (mask("distance", "drop", [1]), "invalid", "bucket and edges belong together"),
        (mask("distance", "bucket", [2, 1]), "invalid", "finite and increasing"),
        (mask("distance", "bucket", [1, float("inf")]), "invalid", "finite and increasing"),
        (lambda c: c["release"].update(shadow_duration="1d"), "invalid", "shadow_duration"),
        (lambda c: c["release"].update(shadow_percent=101), "invalid", "shadow_percent"),
        (lambda c: c["release"].update(ramp=[]), "invalid", "ramp shares must grow"),
        (lambda c: c["release"]["ramp"][0].update(share=0.9), "invalid", "release.ramp.0.share"),
        (lambda c: c["training"].update(workers=3), "invalid", "not a multiple of workers 3"),
        (lambda c: c["data"].update(label_horizon="soon"), "invalid", "'soon' is not a duration"),
        (lambda c: c["data"].update(label_horizon="-1h"), "invalid", "label_horizon"),
        (lambda c: c["evaluation"].update(slices=["nope"]), "invalid", "'nope' is not a feature"),
        (lambda c: c.pop("owner"), "invalid", "owner: Field required"),
        (lambda c: c.update(name="other"), "invalid", "differs from its folder"),
        (lambda c: c["thresholds"][0].update(above=1.0), "invalid", "exactly one of above"),
        (
            lambda c: c["thresholds"][2].update(action="retrain"),
            "invalid",
            "it never retrains",
        ),
        (lambda c: c["export"].update(compression="int4"), "invalid", "export.compression"),
    ],
)
def test_a_bad_value_is_named_with_its_place(folder, change, code, says):
    spoil(folder, change)
    with pytest.raises(Permanent) as caught:
        load_spec(folder)
    assert caught.value.code == f"spec.{code}"
    assert str(folder) in caught.value.message
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("text", "code"), [("a: [", "syntax"), ("- 1", "syntax"), ("", "syntax"), (None, "missing")]
)
def test_a_file_that_is_no_mapping(tmp_path, text, code):
    if text is not None:
        (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(Permanent) as caught:
        load_spec(tmp_path)
    assert caught.value.code == f"spec.{code}"


def test_a_profile_is_merged_over_the_model(flights):
    demo = load_spec(flights.folder, "demo")
    assert demo.data.label_horizon < flights.data.label_horizon
    assert demo.data.features == flights.data.features
    assert demo.spec_hash != flights.spec_hash
    assert load_spec(flights.folder, "no-such-profile").spec_hash == flights.spec_hash


def test_the_schema_is_published_without_what_users_do_not_write():
    schema = json_schema()
    assert "folder" not in schema["properties"]
    assert "for" in schema["$defs"]["Threshold"]["properties"]


def test_all_models_under_care_are_valid(flights):
    for profile in ("", "demo"):
        assert "flights" in load_specs(flights.folder.parent, profile)


@given(st.integers(0, 10**8))
def test_durations_round_trip(seconds):
    assert parse_duration(format_duration(timedelta(seconds=seconds))) == timedelta(seconds=seconds)


@pytest.mark.parametrize("bad", ["", "5", "5 minutes", "h", True, None, [], -3, "1e3s"])
def test_what_is_no_duration_is_refused(bad):
    with pytest.raises(ValueError, match=r"duration|negative"):
        parse_duration(bad)
