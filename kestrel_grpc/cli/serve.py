"""``serve``: runs the server, with one process or several workers.

This module imports gRPC and torch only if this process itself serves.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
from collections.abc import Sequence

from kestrel_client.commands.parser import CommandError, temporary_folder_problem
from kestrel_engine import RuntimeConfig, SkillRegistry, maintenance

from .. import __version__
from ..logs.records import flush_log, set_up_logging
from ..process.event_loop import run as run_loop
from ..process.interpreter import set_up_interpreter
from ..process.open_files import complaint, raise_limit
from ..process.skill_plugins import skill_registry
from ..settings.addresses import AddressError
from ..settings.configuration import (
    add_flags,
    configuration,
    print_configuration,
    refuse_removed,
    without_effect,
)
from ..settings.flags import Parser
from ..settings.server import ServerConfig
from ..settings.sources import SettingsError, name_of
from ..workers.front.front import check_installed
from ..workers.plan import plan_workers, shared_addresses
from ..workers.restarts import WorkersError
from ..workers.supervisor import supervise
from .engine_errors import command_errors

logger = logging.getLogger(__name__)

ESSENTIAL = """
    --config --print-config --model --weights --device --precision --skill --adapters-dir --offline
    --max-batch-size --max-queue --kv-cache-gib --listen --http-listen --metrics-listen --workers
    --devices --grace --access-log --log-level --tls-cert --tls-key --tls-client-ca --auth-tokens --rate
""".split()
"""The flags that the short help shows."""


REMOVED = {"--tls-client-crl": "; the file of --auth-tokens names the certificates that count"}
"""What to give in place of flags that were removed."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "A setting's value comes from its flag, else from its environment variable, else from the file of --config,\n"
        "else it is the default. In the file, its key has the flag's name, in the section of its group.\n"
        "After the first SIGTERM or Ctrl-C, running requests may end; a second one ends them. Ctrl-C skips\n"
        "--drain-delay."
    )
    add_flags(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="check the settings, print them as TOML with their sources and without secrets, and exit",
    )
    assert isinstance(parser, Parser)
    parser.set_defaults(settings=parser.sources.settings)
    parser.add_argument("--version", action="version", version=f"kestrel-grpc {__version__}")


def run(args: argparse.Namespace) -> int:
    settled = configuration(args)
    config, runtimes = settled.server, settled.runtimes
    if len(runtimes) > 1 and config.workers.count > 1:
        workers, models = name_of(args, "--workers"), name_of(args, "--model")
        raise SettingsError(f"{workers} and several values of {models}: give only one of the two")
    refuse_removed(REMOVED, os.environ)
    if args.print_config:
        _check(config, runtimes, args)
        print(print_configuration(args.settings, args, os.environ))
        return 0
    problem = temporary_folder_problem()
    if problem is not None:
        raise CommandError(problem)
    with command_errors(args):  # A misspelt name is known before the server listens.
        for runtime in runtimes:
            maintenance.served_name(runtime)
    # Only processes that serve import plug-ins. The supervisor does not.
    skills = (
        None
        if config.workers.count > 1
        else skill_registry(config.skills, name_of(args, "--skill"))
    )
    set_up_logging(config.log_level, config.log_format, buffer_bytes=config.log_buffer_bytes)
    for line in without_effect(args.settings, os.environ):
        logger.warning("%s", line)
    raise_limit()
    if settled.runtime.confine != "off":
        maintenance.hide_memory()
    problem = complaint(config)
    if problem is not None:
        logger.warning("%s", problem)
    try:
        with command_errors(args, AddressError, WorkersError):
            if skills is None:
                return asyncio.run(supervise(config, settled.runtime))
            return _serve_alone(config, runtimes, skills, args)
    finally:
        flush_log()  # The command prints the error as the last line.


def _check(
    config: ServerConfig, runtimes: Sequence[RuntimeConfig], args: argparse.Namespace
) -> None:
    """Checks everything that serving checks before it reads the model's files or opens a port. Raises SettingsError,
    CommandError."""
    from ..images.shared.shared_images import SharedImages
    from ..monitoring.audit import AuditLog
    from ..process.serving import FAILURES
    from ..security.listening import check_files_and_addresses

    with command_errors(args, *FAILURES):
        skill_registry(config.skills, name_of(args, "--skill"))
        if config.workers.count > 1:
            plan_workers(config, runtimes[0], shared_addresses(config), os.environ)
            if config.workers.spread == "calls":
                check_installed()
        addresses = (*config.listen, *config.workers.own_addresses)
        check_files_and_addresses(config.security, addresses, config.telemetry.prometheus)
        SharedImages.open(config.shared_images, lambda event: None)
        if config.audit_log is not None:
            AuditLog(config.audit_log)
        for runtime in runtimes:
            maintenance.check_names(runtime)


def _serve_alone(
    config: ServerConfig,
    runtimes: Sequence[RuntimeConfig],
    skills: SkillRegistry,
    args: argparse.Namespace,
) -> int:
    """Raises SettingsError, CommandError."""
    # Imported here, because a supervisor must not import gRPC.
    from ..process.serving import FAILURES, serve_alone

    own = config.workers.own_address(0)
    if own is not None:
        config = dataclasses.replace(config, listen=(*config.listen, own))
    if config.workers.devices:
        device = config.workers.devices[0]
        runtimes = [dataclasses.replace(runtime, device=device) for runtime in runtimes]
    set_up_interpreter()
    for runtime in runtimes:
        for finding in maintenance.check_slow_device(runtime):
            logger.warning("%s: %s: %s", runtime.model, finding.check, finding.message)
    with command_errors(args, *FAILURES):
        run_loop(serve_alone(config, runtimes, skills))
    return 0
