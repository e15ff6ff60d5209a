"""What deploy/ offers fits the program."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from jubako.entrypoints.cli import build_parser
from jubako.frontend.metrics import PrometheusStatLogger
from tests.serving.fake_engine import FakeAsyncLLM

DEPLOY = Path(__file__).parent.parent / "deploy"


def test_every_panel_of_the_dashboard_shows_metrics_that_exist() -> None:
    engine = FakeAsyncLLM()
    registry = CollectorRegistry()
    PrometheusStatLogger(engine.config, engine.ready, "model", registry)
    offered = set(re.findall(r"^(jubako:\w+)", generate_latest(registry).decode(), re.MULTILINE))
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"]) >= 10
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            named = set(re.findall(r"jubako:\w+", target["expr"]))
            assert named, panel["title"]
            assert named <= offered, panel["title"]


def test_the_unit_starts_a_command_that_exists() -> None:
    unit = (DEPLOY / "jubako.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, name, option, _ = command.split()
    assert program.endswith("/jubako")
    assert (name, option) == ("serve", "--config")
    build_parser().parse_args([name, "--drain-timeout", "30"])
    (seconds,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(seconds) > 30
