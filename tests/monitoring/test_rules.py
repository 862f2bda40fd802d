"""The rendered rules, judged by promtool: what they accept, and what they conclude from series."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from monitoring.rules import BREACHED, VALUE, config_path, render, write
from perennial.settings import Settings
from perennial.spec import ModelSpec
from tests.support.monitoring import prometheus_binary, promtool
from tests.support.traffic import ROOT, add_model, make_settings

__all__ = ["prometheus_binary"]

THRESHOLDS = """\
thresholds:
  - {name: quality, metric: log_loss, worse_than_promotion: 0.05, window: 1h, min_count: 100,
     action: retrain}
  - {name: absolute, metric: brier, above: 0.25, window: 1h, action: retrain}
  - {name: coverage, metric: label_coverage, below: 0.8, window: 1h, min_count: 100}
  - {name: stale, metric: staleness_s, above: 3600, action: retrain}
  - {name: errors, metric: error_rate, above: 0.1, window: 5m, for: 2m, min_count: 50}
  - {name: latency, metric: latency_p99_ms, above: 100, window: 5m}
"""

QUALITY = (
    'perennial_quality{{model="trips",version="{version}",metric="{metric}",threshold="{name}"}}'
)
ROWS = 'perennial_quality_{of}_rows{{model="trips",version="{version}",threshold="{name}"}}'
CALLS = (
    'envoy_perennial_requests{{model="trips",route="{route}",assigned="stable",arm="stable",'
    'grpc_status="{grpc}",http_status="{http}"}}'
)
CHAMPION = {'perennial_model_info{model="trips",version="3"}': "1x60"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return make_settings(tmp_path)


@pytest.fixture
def spec(settings: Settings) -> ModelSpec:
    return add_model(settings, more=THRESHOLDS)


class Judge:
    """Runs series through the rules at one minute a step and reads them at minute 30."""

    def __init__(self, settings: Settings, spec: ModelSpec, binary: Path) -> None:
        self.folder = write(settings, {spec.name: spec}).parent
        self.binary = binary

    def expect(self, series: dict[str, str], name: str, **expected: float | None) -> None:
        """`value`, `breached` (None: absent) and `alert` (firing or not) of threshold `name`."""
        tests = []
        for key, recorded in (("value", VALUE), ("breached", BREACHED)):
            if key in expected:
                own = f'{recorded}{{model="trips",threshold="{name}"}}'
                found = expected[key]
                samples = [] if found is None else [{"labels": own, "value": found}]
                tests.append({"expr": own, "eval_time": "30m", "exp_samples": samples})
        if "alert" in expected:
            count = f'count(ALERTS{{alertstate="firing",threshold="{name}"}})'
            samples = [{"labels": "{}", "value": 1}] if expected["alert"] else []
            tests.append({"expr": count, "eval_time": "30m", "exp_samples": samples})
        content: dict[str, Any] = {
            "rule_files": ["rules/trips.yml"],
            "evaluation_interval": "1m",
            "tests": [
                {
                    "interval": "1m",
                    "input_series": [{"series": s, "values": v} for s, v in series.items()],
                    "promql_expr_test": tests,
                }
            ],
        }
        (self.folder / "test.yml").write_text(yaml.safe_dump(content))
        done = promtool(self.binary, "test", "rules", "test.yml", folder=self.folder)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def judge(settings: Settings, spec: ModelSpec, prometheus_binary: Path) -> Judge:
    return Judge(settings, spec, prometheus_binary)


def quality(
    value: str, rows: str = "500x60", *, name: str = "quality", metric: str = "log_loss"
) -> dict[str, str]:
    return {
        QUALITY.format(version=3, metric=metric, name=name): value,
        ROWS.format(version=3, of="labelled", name=name): rows,
    }


BASELINE = {'perennial_baseline{model="trips",metric="log_loss"}': "0.4x60"}


def test_promtool_accepts_what_is_rendered(
    settings: Settings, spec: ModelSpec, prometheus_binary: Path
) -> None:
    path = write(settings, {spec.name: spec})
    done = promtool(prometheus_binary, "check", "config", path.name, folder=path.parent)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("profile", ["", "demo"])
def test_promtool_accepts_the_models_that_are_shipped(
    settings: Settings, prometheus_binary: Path, profile: str
) -> None:
    from perennial.spec import load_specs

    path = write(settings, load_specs(ROOT / "models", profile))
    done = promtool(prometheus_binary, "check", "config", path.name, folder=path.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_worse_than_at_promotion(judge: Judge) -> None:
    judge.expect({**CHAMPION, **BASELINE, **quality("0.44x60")}, "quality", value=0.44, breached=0)
    judge.expect(
        {**CHAMPION, **BASELINE, **quality("0.46x60")}, "quality", value=0.46, breached=1, alert=1
    )


def test_too_few_rows_are_no_data(judge: Judge) -> None:
    series = {**CHAMPION, **BASELINE, **quality("9x60", rows="99x60")}
    judge.expect(series, "quality", value=None, breached=None, alert=0)


def test_without_a_champion_or_its_baseline_there_is_no_verdict(judge: Judge) -> None:
    judge.expect({**BASELINE, **quality("9x60")}, "quality", value=None, breached=None)
    judge.expect({**CHAMPION, **quality("9x60")}, "quality", value=9, breached=None, alert=0)


def test_only_the_champions_quality_counts(judge: Judge) -> None:
    canary = {QUALITY.format(version=4, metric="log_loss", name="quality"): "9x60"}
    rows = {ROWS.format(version=4, of="labelled", name="quality"): "500x60"}
    series = {**CHAMPION, **BASELINE, **quality("0.41x60"), **canary, **rows}
    judge.expect(series, "quality", value=0.41, breached=0)


def test_data_that_stops_is_no_data(judge: Judge) -> None:
    series = {**CHAMPION, **BASELINE, **quality("9x10 stale")}
    judge.expect(series, "quality", value=None, breached=None, alert=0)


def test_an_absolute_bound_without_a_least_count(judge: Judge) -> None:
    series = {**CHAMPION, **quality("0.3x60", "1x60", name="absolute", metric="brier")}
    judge.expect(series, "absolute", value=0.3, breached=1)


def test_coverage_is_of_matured_rows_so_that_none_at_all_is_seen(judge: Judge) -> None:
    series = {
        **CHAMPION,
        **quality("0x60", "0x60", name="coverage", metric="label_coverage"),
        ROWS.format(version=3, of="matured", name="coverage"): "500x60",
    }
    judge.expect(series, "coverage", value=0, breached=1)


def test_staleness(judge: Judge) -> None:
    series = {'perennial_staleness_seconds{model="trips"}': "1800+60x60"}
    judge.expect(series, "stale", value=3600, breached=0)
    series = {'perennial_staleness_seconds{model="trips"}': "1860+60x60"}
    judge.expect(series, "stale", value=3660, breached=1, alert=1)


def calls(grpc: str, per_minute: int, *, http: str = "200", route: str = "split") -> dict[str, str]:
    return {CALLS.format(grpc=grpc, http=http, route=route): f"0+{per_minute}x60"}


def test_errors_are_a_share_of_the_calls(judge: Judge) -> None:
    judge.expect({**calls("0", 180), **calls("14", 60)}, "errors", value=0.25, breached=1, alert=1)
    judge.expect({**calls("0", 95), **calls("13", 5)}, "errors", value=0.05, breached=0, alert=0)


def test_no_error_is_a_rate_of_zero_and_no_call_is_no_data(judge: Judge) -> None:
    judge.expect(calls("0", 80), "errors", value=0, breached=0)
    judge.expect(calls("0", 0), "errors", value=None, breached=None)
    judge.expect({}, "errors", value=None, breached=None)


def test_rest_errors_count_and_testers_and_clients_that_left_do_not(judge: Judge) -> None:
    series = {**calls("", 50), **calls("", 50, http="503")}
    judge.expect(series, "errors", value=0.5, breached=1)
    series = {
        **calls("0", 50),
        **calls("14", 50, route="forced"),
        **calls("", 50, http="0"),
        **calls("1", 50),
    }
    judge.expect(series, "errors", value=0, breached=0)


def test_few_calls_are_no_data(judge: Judge) -> None:
    judge.expect({**calls("0", 4), **calls("14", 4)}, "errors", value=None, breached=None)


def test_a_short_burst_of_errors_does_not_page(judge: Judge) -> None:
    burst = {CALLS.format(grpc="14", http="200", route="split"): "0x28 0 90 90x30"}
    judge.expect({**calls("0", 80), **burst}, "errors", breached=1, alert=0)


def test_the_latency_of_the_slowest_hundredth(judge: Judge) -> None:
    bucket = 'envoy_perennial_latency_ms_bucket{{model="trips",route="split",arm="stable",le="{}"}}'
    fast = {bucket.format(le): "0+100x60" for le in ("50", "100", "250", "+Inf")}
    judge.expect(fast, "latency", value=49.5, breached=0)
    slow = {**fast, bucket.format("50"): "0+0x60", bucket.format("100"): "0+0x60"}
    judge.expect(slow, "latency", value=248.5, breached=1, alert=1)
    idle = {bucket.format(le): "0x60" for le in ("50", "100", "250", "+Inf")}
    judge.expect(idle, "latency", value=None, breached=None, alert=0)


def test_rules_of_models_that_are_gone_are_removed(settings: Settings, spec: ModelSpec) -> None:
    write(settings, {spec.name: spec})
    folder = config_path(settings).parent / "rules"
    assert [path.name for path in folder.iterdir()] == ["trips.yml"]
    write(settings, {})
    assert list(folder.iterdir()) == []


def test_a_model_without_thresholds_has_no_rules(settings: Settings) -> None:
    bare = add_model(settings, "bare")
    assert list(render(settings, {"bare": bare})) == ["prometheus.yml"]


def test_a_window_holds_enough_scrapes_for_a_rate(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, scrape_interval_s=120)
    spec = add_model(settings, more=THRESHOLDS)
    assert "[8m]" in render(settings, {"trips": spec})["rules/trips.yml"]
    assert "[5m]" not in render(settings, {"trips": spec})["rules/trips.yml"]
