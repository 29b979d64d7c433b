"""CallRecords: what the server keeps of its calls: its load, statistics, captures, profiles and the access log."""

from __future__ import annotations

from collections.abc import Callable

from ..edge.call_life import CallWatcher, CallWatchers
from ..edge.calls.call import Call
from ..served_model import ServedModels
from ..settings.server import ServerConfig
from .access_log import AccessLog
from .audit import AuditLog
from .call_statistics import CallStatistics
from .capture import Capture
from .load import LoadMeter
from .orca import LoadReports
from .profiles import Profiles
from .usage_log import UsageLog


class CallRecords:
    """The parts, each of which owns its record."""

    def __init__(
        self, config: ServerConfig, served: ServedModels, audit: AuditLog | None = None
    ) -> None:
        """``audit``: None if administrative calls are not recorded."""
        self._config = config
        self.audit = audit
        self.usage = None
        """The usage log; None without one."""
        if config.usage_log is not None:
            limit, worker = config.usage_log_bytes, config.telemetry.worker
            self.usage = UsageLog(config.usage_log, limit, worker)
        self.load_meter = LoadMeter(served)
        self.load_reports = LoadReports(self.load_meter.read)
        self.statistics = CallStatistics()
        self.capture = Capture(config.debug, served)
        self.profiles = Profiles(config.debug)

    def watchers(self, telemetry: CallWatcher | None) -> CallWatchers:
        """What the edge tells of each call."""
        records: list[Callable[[Call], None]] = []
        if self._config.access_log != "off":
            records.append(AccessLog(is_json=self._config.access_log == "json"))
        if self.audit is not None:
            records.append(self.audit)
        records += [self.load_meter.on_call, self.statistics.on_call]
        if self._config.debug.capture_dir is not None:
            records.append(self.capture.on_call)
        if telemetry is not None and not self._config.telemetry.traces:
            records.append(telemetry.end)  # Metrics count calls that have ended.
            telemetry = None
        return CallWatchers(records, telemetry)
