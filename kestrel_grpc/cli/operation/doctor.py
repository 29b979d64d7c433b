"""``doctor``: checks whether this machine can serve as configured, without loading the model."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kestrel_client.commands.parser import CommandError, temporary_folder_problem

from ...settings.sources import CONFIG_VARIABLE

if TYPE_CHECKING:
    from kestrel_engine import RuntimeConfig, maintenance

    from ...settings.configuration import Configuration

ESSENTIAL = """
    --json --config --model --weights --device --precision --listen --http-listen --workers
    --auth-tokens --tls-cert --tls-key
""".split()


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Give it the flags, variables and file that 'kestrel-grpc serve' will get. Checks torch, driver and GPU,\n"
        "Triton (by compiling a small kernel), FlashInfer, libvips, and whether the model's files fit into memory.\n"
        "Checks packages, addresses, TLS and tokens, plug-in skills, telemetry, and the\n"
        "store of shared images (it writes, reads and deletes a value). Warns about misspelt variables. It loads no\n"
        "model and calls no hub; 'verify' checks the weights.\n"
        "Exits with 1 if a check fails. A warning is about something that works, but could work better."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    try:
        from ...settings.configuration import add_flags
    except (ImportError, OSError, RuntimeError) as error:
        # libvips or another library is broken, and no check can run without it.
        why = str(error).strip().partition("\n")[0]
        raise CommandError(
            f"a package cannot be imported: {why}; pip install -c constraints.txt ./clients/python ."
        ) from None
    add_flags(parser)


def run(args: argparse.Namespace) -> int:
    from ...settings.configuration import configuration
    from ..findings import print_findings

    logging.disable(logging.WARNING)  # The findings hold everything that the checks would log.
    return print_findings(_findings(configuration(args), args), as_json=args.json)


def _runtimes(settled: Configuration) -> list[RuntimeConfig]:
    """One configuration for each device that the server would use."""
    from ...settings.sources import SettingsError
    from ...workers.plan import worker_devices

    workers = settled.server.workers
    if workers.count == 1 and not workers.devices:
        return [*settled.runtimes]
    try:
        devices = worker_devices(workers, settled.runtime.device)
    except SettingsError:  # check_workers reports it.
        return [*settled.runtimes]
    return [
        dataclasses.replace(settled.runtime, device=device) for device in dict.fromkeys(devices)
    ]


def _findings(settled: Configuration, args: argparse.Namespace) -> Iterator[maintenance.Finding]:
    from kestrel_engine import maintenance

    from ...settings.configuration import known_settings
    from .doctor_checks import check_server, check_workers, unreadable

    source = args.config or f"no file (--config, {CONFIG_VARIABLE})"
    count = sum(origin.kind != "default" for origin in args.sources.values())
    yield maintenance.Finding("settings", "ok", f"{count} of {len(args.sources)} are set; {source}")
    yield check_workers(settled.server, settled.runtime)
    problem = temporary_folder_problem()
    if problem is not None:
        yield maintenance.Finding("temporary files", "fail", problem)
        return  # The other checks import torch.
    reported: list[maintenance.Finding] = []
    for runtime in _runtimes(settled):
        for finding in maintenance.diagnose(runtime):
            if finding not in reported:  # A finding that all devices share is reported once.
                reported.append(finding)
                yield _as_typed(finding, args)
        yield from _choices(runtime, args)
        if unread := unreadable("--adapter-api-key-file", runtime.adapter_sources.api_key_file):
            yield unread
    yield from check_server(settled.server, known_settings(), os.environ)


def _as_typed(finding: maintenance.Finding, args: argparse.Namespace) -> maintenance.Finding:
    """A finding that begins with a setting, with the flag, variable or key that gave it."""
    from kestrel_engine import RuntimeConfig, settings_of

    from ...settings.sources import name_of

    field, equals, rest = finding.message.partition("=")
    setting = settings_of(RuntimeConfig).get(field) if equals else None
    if setting is None:
        return finding
    return dataclasses.replace(finding, message=f"{name_of(args, setting.flag)}={rest}")


def _choices(runtime: RuntimeConfig, args: argparse.Namespace) -> Iterator[maintenance.Finding]:
    """Checks the folders, the precision and the kernels that the settings choose."""
    from kestrel_engine import ConfigError, maintenance

    from ...settings.model import config_error

    try:
        maintenance.check_choices(runtime)
    except ConfigError as error:
        if error.field != "device":  # diagnose reports that.
            problem = str(config_error(error, args))
            yield maintenance.Finding("choices", "fail", problem, "docs/run/settings.md")
