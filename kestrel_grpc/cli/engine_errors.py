"""The engine's errors as errors of a command."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager

from kestrel_client.commands.parser import CommandError
from kestrel_engine import ConfigError, KestrelError

from ..settings.model import config_error


@contextmanager
def command_errors(args: argparse.Namespace, *failures: type[Exception]) -> Iterator[None]:
    """Raises ConfigError as SettingsError, which names flag, variable or key, and ``failures`` (else: all errors of the
    engine) as CommandError."""
    known = failures or (KestrelError,)
    try:
        yield
    except ConfigError as error:
        raise config_error(error, args) from None
    except known as error:
        raise CommandError(str(error)) from None
