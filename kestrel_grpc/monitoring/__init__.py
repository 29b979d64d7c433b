"""Records of calls and load that need no telemetry: access log, statistics, load reports, captures and profiles."""
