"""Doctor's checks other than the model's: packages, addresses, TLS, tokens, the store of shared images, variables."""

from __future__ import annotations

import asyncio
import os
import platform
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

from kestrel_engine import ConfigError, RuntimeConfig, maintenance, read_small_file

from ... import __version__
from ...batches.database import open_database
from ...images.shared.trial import TrialError, try_store
from ...monitoring.audit import AuditLog
from ...process.skill_plugins import skill_registry
from ...security.budget_ledger import BudgetLedger
from ...security.files import exposures
from ...security.identity.callers import Callers
from ...security.identity.tls import server_credentials
from ...security.identity.tls_files import TlsError
from ...security.identity.tokens import TokenFileError
from ...security.listening import check_exposure
from ...security.metrics_door import MetricsDoor
from ...settings.addresses import AddressError, check_free
from ...settings.budgets import token_budget
from ...settings.configuration import without_effect
from ...settings.flags import SettingsError
from ...settings.security import SecurityConfig
from ...settings.server import ServerConfig
from ...settings.shared_images import SharedImagesConfig
from ...settings.sources import FlagSetting
from ...settings.telemetry import missing_packages
from ...settings.workers import address_of
from ...workers.plan import plan_workers, shared_addresses

Finding = maintenance.Finding

_PACKAGES = ("kestrel-grpc", "kestrel-client")
_SHOWN = ("grpcio", "protobuf", "torch", "pyvips", "tokenizers", "huggingface-hub")


def check_server(
    config: ServerConfig, settings: Sequence[FlagSetting], environ: Mapping[str, str]
) -> Iterator[Finding]:
    """Runs all checks of this module. ``settings``: all known settings, to find misspelt variables."""
    yield from check_packages()
    yield from check_addresses(config)
    yield from check_security(config.security)
    yield check_skills(config.skills)
    yield check_telemetry(config)
    yield check_shared_images(config.shared_images)
    if config.audit_log is not None:
        yield check_audit_log(config.audit_log)
    yield from check_files(config)
    yield check_variables(settings, environ)


def check_packages() -> Iterator[Finding]:
    """Checks that the installed packages have the required versions."""
    wrong: list[str] = []
    optional: list[str] = []
    for package in _PACKAGES:
        try:
            required = metadata.requires(package) or []
        except metadata.PackageNotFoundError:
            optional.append(f"{package} is not installed (does it run from its sources?)")
            continue
        for line in required:
            requirement = Requirement(line)
            extra = "extra ==" in str(requirement.marker or "")
            problem = version_problem(requirement, extra)
            if problem is not None:
                (optional if extra else wrong).append(problem)
    versions = ", ".join(f"{name} {found}" for name in _SHOWN if (found := _version(name)))
    installed = f"kestrel-grpc {__version__}, Python {platform.python_version()}, {versions}"
    if wrong or optional:
        problems = "; ".join(dict.fromkeys([*wrong, *optional]))
        remedy = "pip install -c constraints.txt ./clients/python ."
        yield Finding("packages", "fail" if wrong else "warn", f"{installed}: {problems}", remedy)
    else:
        yield Finding("packages", "ok", installed)


def version_problem(requirement: Requirement, extra: bool) -> str | None:
    """The problem with a required package, or None. A missing package of an ``extra`` is no problem."""
    if requirement.marker is not None and not extra and not requirement.marker.evaluate():
        return None
    found = _version(requirement.name)
    if found is None:
        return None if extra else f"{requirement.name} is not installed"
    if requirement.specifier.contains(found, prereleases=True):
        return None
    return f"{requirement.name} is {found}, not {requirement.specifier}"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_addresses(config: ServerConfig) -> Iterator[Finding]:
    """Checks that the server can and may listen. Removes the socket file of a dead server, as serve does."""
    if config.telemetry.prometheus is not None:
        with suppress(TokenFileError):  # check_security reports it.
            try:
                MetricsDoor(config.telemetry.prometheus, config.security)
            except (AddressError, TlsError) as error:
                yield Finding("metrics", "fail", str(error), "docs/run/telemetry.md, Metrics")
    workers = range(config.workers.count)
    own = config.workers.own_addresses
    try:
        check_exposure((*config.listen, *own), config.security)
    except AddressError as error:
        yield Finding("exposure", "fail", str(error), "docs/run/security.md describes the risks")
    wanted = [(address, "--listen") for address in config.listen]
    wanted += [(address, "--worker-listen") for address in own]
    wanted += [(address, "--http-listen") for address in config.http.http_listen]
    if config.telemetry.prometheus is not None:
        scraped = config.telemetry.prometheus
        wanted += [(address_of(scraped, index), "--metrics-listen") for index in workers]
    for address, flag in wanted:
        remedy = f"stop the program that listens there, or choose another address ({flag})"
        yield _tried("address", partial(check_free, address), f"{address} is free", remedy)


def _tried(check: str, work: Callable[[], object], fine: str, remedy: str) -> Finding:
    """What a check finds that fails if ``work`` raises an error of the settings."""
    try:
        work()
    except (AddressError, SettingsError, TlsError, TokenFileError) as error:
        return Finding(check, "fail", str(error), remedy)
    return Finding(check, "ok", fine)


def check_workers(config: ServerConfig, runtime: RuntimeConfig) -> Finding:
    """Checks that workers can share the addresses, and that there is a device for each."""
    count = config.workers.count
    if count == 1:
        return Finding("workers", "ok", "one process serves")
    try:
        shared = shared_addresses(config)
        tasks = plan_workers(config, runtime, shared, os.environ)
    except SettingsError as error:
        return Finding("workers", "fail", str(error), "docs/run/service.md, Several processes")
    devices = ", ".join(task.device for task in tasks)
    return Finding("workers", "ok", f"{count} processes share {', '.join(shared)}, on {devices}")


def check_security(security: SecurityConfig) -> Iterator[Finding]:
    """Checks that certificates, key and tokens are valid."""
    if (tls := security.tls) is not None:
        fine = f"{tls.certificate} matches its key"
        yield _tried("tls", lambda: server_credentials(tls), fine, "docs/run/service.md, TLS")
    if not security.knows_callers:
        yield Finding("callers", "ok", "callers need no credentials")
        return
    yield _tried(
        *("callers", lambda: Callers(security, security.client_ca)),
        *("callers need a token or a certificate", "'kestrel-grpc token' writes lines of the file"),
    )
    for exposure in exposures(security):
        yield Finding("file modes", "warn", exposure, "docs/run/security.md, Files")


def check_skills(names: Sequence[str]) -> Finding:
    """Checks that plug-in skills can be loaded. Imports their modules, as serve does."""
    remedy = "docs/develop/skills.md describes what a skill needs"
    fine = ", ".join(names) or "the model's own"
    return _tried("skills", lambda: skill_registry(names), fine, remedy)


def check_telemetry(config: ServerConfig) -> Finding:
    """Checks that the packages for the configured telemetry are installed."""
    missing = missing_packages(config.telemetry)
    if missing:
        problem = f"telemetry is off: {', '.join(missing)} is not installed"
        return Finding("telemetry", "warn", problem, "pip install ./clients/python '.[telemetry]'")
    exported = {"traces": config.telemetry.traces, "metrics": config.telemetry.metrics}
    on = [f"{signal} by {' and '.join(how)}" for signal, how in exported.items() if how]
    if config.telemetry.prometheus is not None:
        on.append("metrics for Prometheus")
    return Finding("telemetry", "ok", ", ".join(on) or "off")


def check_shared_images(config: SharedImagesConfig) -> Finding:
    """Checks that the store of shared images answers and has the rights: a small value is written, read and deleted."""
    if config.url is None:
        return Finding("shared images", "ok", "off: each server has its own")
    read = {
        "--shared-images-key-file": config.key_file,
        "--shared-images-password-file": config.password_file,
        "--shared-images-ca": config.ca_file,
    }
    for flag, path in read.items():
        if unread := unreadable(flag, path):
            return unread
    try:
        took_ms = asyncio.run(try_store(config))
    except ConfigError as error:
        return Finding(
            "shared images", "fail", str(error), "docs/run/scaling.md, Images that all servers know"
        )
    except TrialError as error:
        # Servers start and serve without the store.
        return Finding("shared images", "warn", f"{config.url} {error}", error.remedy)
    sealed = "encrypted" if config.key_file is not None else "not encrypted"
    return Finding(
        "shared images", "ok", f"{config.url}: written and read in {took_ms:.0f} ms, {sealed}"
    )


def check_audit_log(path: str) -> Finding:
    """Opens the file, as serve does. Leaves no new file, which the server's user could perhaps not write."""
    is_new = path != "-" and not os.path.lexists(path)
    try:
        AuditLog(path)
    except ConfigError as error:
        return Finding("audit log", "fail", f"--audit-log={path}: {error.limit}")
    if is_new:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return Finding("audit log", "ok", f"{path} can be written")


def check_files(config: ServerConfig) -> Iterator[Finding]:
    """Opens the files that the server keeps, and looks for what it reads later."""
    if budget := token_budget(config.security.calls.token_budget).file:
        flag = f"--token-budget=file={budget}"
        yield _database(flag, budget, lambda: BudgetLedger(budget).close())
    if (path := config.batches.path) is not None:
        yield _database(f"--batches={path}", path, lambda: open_database(path).close())
    for folder in config.model_folders:
        if not folder.startswith("s3://") and not os.path.isdir(os.path.expanduser(folder)):
            yield Finding("files", "warn", f"--model-folders={folder}: there is no such folder")


def _database(named: str, path: str, opened: Callable[[], object]) -> Finding:
    """Opens a file of SQLite, if it exists. ``named``: its setting."""
    folder = os.path.dirname(os.path.abspath(path))
    try:
        if os.path.lexists(path):
            opened()
        elif not os.access(folder, os.W_OK | os.X_OK):
            why = "can't be written" if os.path.isdir(folder) else "does not exist"
            return Finding("files", "fail", f"{named}: the folder {folder} {why}")
    except ConfigError as error:
        return Finding("files", "fail", f"{named}: {error.limit}")
    except (OSError, sqlite3.Error) as error:
        return Finding("files", "fail", f"{named}: cannot be used: {error}")
    return Finding("files", "ok", f"{path} can be used")


def unreadable(flag: str, path: str | Path | None) -> Finding | None:
    """What is wrong with a file that the server reads, or None."""
    try:
        if path is not None:
            read_small_file(os.path.expanduser(path))
    except OSError as error:
        return Finding("files", "fail", f"{flag}={path}: can't be read: {error.strerror}")
    return None


def check_variables(settings: Sequence[FlagSetting], environ: Mapping[str, str]) -> Finding:
    if unknown := without_effect(settings, environ):
        remedy = "kestrel-grpc serve --help names all variables"
        return Finding("variables", "warn", "; ".join(unknown), remedy)
    return Finding("variables", "ok", "no variable that begins with KESTREL_ is unknown")
