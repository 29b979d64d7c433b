"""The argument MODEL of the commands about one model, and the configuration that it and the flags give."""

from __future__ import annotations

import argparse
from typing import Any

from kestrel_engine import RuntimeConfig

from ..engine_errors import command_errors


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", metavar="MODEL", help="like --model [the configured model]"
    )


def source_config(args: argparse.Namespace, **others: Any) -> RuntimeConfig:
    """The configuration of the model and its files, with ``others``. MODEL overrides all. Raises SettingsError."""
    named = getattr(args, "name", None)
    with command_errors(args):
        return RuntimeConfig(
            model=args.model if named is None else named,
            model_path=args.weights if named is None else None,
            tokenizer_path=args.tokenizer,
            cache_dir=args.cache_dir,
            weights_cache_gib=args.weights_cache_gib,
            offline=args.offline == "on",
            **others,
        )


def computing_config(args: argparse.Namespace, **others: Any) -> RuntimeConfig:
    """``source_config`` with the device, its precision and its threads. Raises SettingsError."""
    device = {"device": args.device, "precision": args.precision, "cpu_threads": args.threads}
    return source_config(args, **device, **others)
