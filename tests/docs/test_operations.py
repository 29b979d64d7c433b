"""docs/run/operations.md names every flag, metric, status and alert, and no others."""

import re

import yaml

from kestrel_grpc.edge.failures import statuses as errors
from kestrel_grpc.settings.configuration import known_settings
from kestrel_grpc.telemetry.names import METRICS
from tests.docs.flag_table import BEGIN, END, PAGE, page_with, table

ROOT = PAGE.parents[2]
TEXT = PAGE.read_text()
WRITTEN = TEXT.partition(BEGIN)[0] + TEXT.partition(END)[2]
"""By hand."""


def test_the_page_begins_with_what_to_do():
    assert re.findall(r"^## (.*)$", TEXT, re.MULTILINE)[0] == "What to do"


def test_the_table_of_flags_is_the_parsers():
    assert page_with(table()) == TEXT, "make docs writes it anew"


def test_every_flag_that_is_named_exists():
    known = {flag for setting in known_settings() for flag in setting.flags}
    ours = {
        *("--config", "--print-config", "--append", "--scopes", "--wait", "--seconds"),
        *("--python-functions", "--requests", "--images", "--in-process", "--image"),
    }
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", WRITTEN))
    assert named - ours <= known, named - ours - known


def test_every_metric_has_its_line_and_no_other():
    rows = re.findall(r"^\| (`[a-z_`, ]+`) \|", WRITTEN, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted(metric.prometheus_name for metric in METRICS)


def test_every_status_has_a_remedy():
    section = WRITTEN.partition("## Statuses")[2].partition("\n## ")[0]
    for row in errors.TABLE.values():
        line = rf"^\| {row.code.name}: [^|]*\b{row.reason}\b[^|]*\|[^|]*\| \S"
        assert re.search(line, section, re.MULTILINE), f"{row.code.name} {row.reason}"
    reasons = {row.reason for row in errors.TABLE.values()}
    cells = re.findall(r"^\| [A-Z_]+: ([^|]*)\|", section, re.MULTILINE)
    assert set(re.findall(r"[A-Z_]{6,}", " ".join(cells))) == reasons


def test_every_alert_has_an_entry_and_every_link_leads_somewhere():
    rules = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    section = WRITTEN.partition("## When an alert fires")[2].partition("\n## ")[0]
    assert set(re.findall(r"^### (\w+)$", section, re.MULTILINE)) == alerts
    anchors = {
        re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")
        for title in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    for rule in (rule for group in rules["groups"] for rule in group["rules"]):
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (ROOT / page, anchor) == (PAGE, rule["alert"].lower()) and anchor in anchors
    links = re.findall(r"\]\(([^)\s]+)\)", TEXT)
    assert {link[1:] for link in links if link.startswith("#")} <= anchors
    for link in links:
        if not link.startswith(("#", "http")):
            assert (PAGE.parent / link).exists(), link
