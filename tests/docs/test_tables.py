"""The pages for operators name every flag, metric, status and alert, and no others."""

import re
from pathlib import Path

import pytest
import yaml

from kestrel_grpc.edge.failures import statuses
from kestrel_grpc.settings.configuration import known_settings
from kestrel_grpc.telemetry.names import METRICS
from tests.docs.tables import TABLES, page_with_table, parts

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs/run/operations.md").read_text()
STATUSES = (ROOT / "docs/use/statuses.md").read_text()


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_what_the_code_says(name: str):
    assert page_with_table(name) == TABLES[name][0].read_text(), "make docs writes it anew"


def test_operations_begin_with_what_to_do():
    assert re.findall(r"^## (.*)$", OPERATIONS, re.MULTILINE)[0] == "What to do"


def test_every_flag_that_is_named_exists():
    known = {setting.flag for setting in known_settings()}
    ours = {
        *("--config", "--print-config", "--append", "--scopes", "--wait", "--seconds"),
        *("--python-functions", "--requests", "--images", "--image", "--model"),
        *("--to", "--server"),
    }
    by_hand = "".join((OPERATIONS, *parts("flags"), *parts("metrics"), STATUSES))
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", by_hand))
    assert named - ours <= known, named - ours - known


def test_every_metric_with_a_remedy_exists():
    _, by_hand = parts("metrics")
    named = set(re.findall(r"`((?:kestrel|gen_ai|rpc)_[a-z_]+)`", by_hand))
    assert named <= {metric.prometheus_name for metric in METRICS.values()} and len(named) > 40


def test_every_status_is_explained():
    lines = re.findall(r"^\| [A-Z_]+ \|.*$", STATUSES, re.MULTILINE)
    explained = set()
    for code, reasons, when, caller, operator in (
        [c.strip() for c in line.split("|")[1:-1]] for line in lines
    ):
        if when and (caller or operator):
            explained |= {(code, reason) for reason in re.findall(r"[A-Z_]{6,}", reasons)}
    beside = {("UNAVAILABLE", "WORKER_UNAVAILABLE"), ("UNAVAILABLE", "CONNECTION_LOST")}
    assert explained == beside | {(row.code.name, row.reason) for row in statuses.TABLE.values()}


def test_every_alert_has_a_runbook():
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    alerts = {rule["alert"]: rule for group in rules["groups"] for rule in group["rules"]}
    section = OPERATIONS.partition("## When an alert fires")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", section, re.MULTILINE)) == set(alerts)
    for name, rule in alerts.items():
        assert rule["annotations"]["runbook_url"] == f"docs/run/operations.md#{name.lower()}"
