"""``serve``: the server as a process, or as several. Owns its flags, and what its failures become.

Loads gRPC and torch only where this process itself serves."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import os

from kestrel_engine import ConfigError, RuntimeConfig, SkillRegistry, maintenance

from .. import __version__
from ..logs.records import flush_log, set_up_logging
from ..process.interpreter import set_up_interpreter
from ..process.skill_plugins import skill_registry
from ..settings.addresses import AddressError
from ..settings.configuration import add_flags, configuration, print_configuration
from ..settings.flags import Parser
from ..settings.model import config_error
from ..settings.server import ServerConfig
from ..settings.sources import name_of
from ..workers.plan import plan_workers, shared_addresses
from ..workers.supervisor import WorkersError, supervise
from .parser import CommandError, CommandParser

_ESSENTIAL = (
    "--model",
    "--weights",
    "--device",
    "--dtype",
    "--listen",
    "--max-batch-size",
    "--kv-cache-gib",
    "--workers",
    "--auth-tokens",
    "--tls-cert",
    "--tls-key",
    "--metrics-listen",
    "--log-level",
    "--config",
    "--print-config",
)
"""What a short help shows."""


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    parser.epilog = (
        "Each setting is taken from its flag, else from the environment variable named with it, else from the file of\n"
        "--config (a key named like the flag, in the section named with its group), else it has its default.\n"
        "The first SIGTERM or Ctrl-C lets running requests end, the second does not. Ctrl-C leaves out --drain-delay."
    )
    add_flags(parser)
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="check the settings as serving does, print them as TOML with their sources, without secrets, and exit",
    )
    assert isinstance(parser, Parser)
    if isinstance(parser, CommandParser):  # The docs' table of flags is made from a plain one.
        parser.essential = _ESSENTIAL
    parser.set_defaults(settings=parser.sources.settings)
    parser.add_argument("--version", action="version", version=f"kestrel-grpc {__version__}")


def run(args: argparse.Namespace) -> int:
    settled = configuration(args)
    config, runtime = settled.server, settled.runtime
    if args.print_config:
        _check(config, runtime, args)
        print(print_configuration(args.settings, args, os.environ))
        return 0
    # What a plug-in loads, and does, is for the processes that serve.
    skills = (
        None
        if config.workers.count > 1
        else skill_registry(config.skills, name_of(args, "--skill"))
    )
    set_up_logging(config.log_level, config.log_format, buffer_bytes=config.log_buffer_bytes)
    try:
        if skills is None:
            return asyncio.run(supervise(config, runtime))
        return _serve_alone(config, runtime, skills)
    except (AddressError, WorkersError) as error:
        raise CommandError(str(error)) from None
    except ConfigError as error:
        raise config_error(error, args) from None
    finally:
        flush_log()  # What failed is told in the last line.


def _check(config: ServerConfig, runtime: RuntimeConfig, args: argparse.Namespace) -> None:
    """Refuses what serving would refuse before it reads the model's files or opens a port. Raises SettingsError,
    CommandError."""
    from ..process.serving import FAILURES
    from ..security.start_check import check_files_and_addresses

    try:
        skill_registry(config.skills, name_of(args, "--skill"))
        if config.workers.count > 1:
            plan_workers(config, runtime, shared_addresses(config), os.environ)
        addresses = (*config.listen, *config.workers.own_addresses)
        check_files_and_addresses(config.security, addresses, config.telemetry.prometheus)
        maintenance.check_names(runtime)
    except ConfigError as error:
        raise config_error(error, args) from None
    except FAILURES as error:
        raise CommandError(str(error)) from None


def _serve_alone(config: ServerConfig, runtime: RuntimeConfig, skills: SkillRegistry) -> int:
    """Raises ConfigError, CommandError."""
    from ..process.serving import (  # Not before: a supervisor is to load no gRPC.
        FAILURES,
        serve_alone,
    )

    own = config.workers.own_address(0)
    if own is not None:
        config = dataclasses.replace(config, listen=(*config.listen, own))
    if config.workers.devices:
        runtime = dataclasses.replace(runtime, device=config.workers.devices[0])
    set_up_interpreter()
    try:
        asyncio.run(serve_alone(config, runtime, skills))
    except ConfigError:
        raise
    except FAILURES as error:
        raise CommandError(str(error)) from None
    return 0
