"""``serve run kestrel_grpc.ray:app config=FILE``: the cluster's servers as an application of Ray Serve.

``kestrel-grpc cluster`` does the same and more. This is for those who keep all applications in Serve's own files.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .settings.cluster import ClusterConfig
from .settings.configuration import add_flags, configuration
from .settings.flags import Parser, add_settings
from .settings.sources import CONFIG_FLAG

if TYPE_CHECKING:
    from ray import serve


def app(args: dict[str, Any]) -> serve.Application:
    """``args``: ``config``, the file of settings; KESTREL_CONFIG otherwise. Raises SettingsError, ClusterError."""
    from .cluster.on_ray import application
    from .cluster.plan import cluster_plan

    unknown = sorted(args.keys() - {"config"})
    if unknown:
        raise ValueError(f"{unknown[0]}: unknown argument; give config=FILE, and settings in it")
    parser = Parser(prog="serve run")
    add_flags(parser, os.environ)
    add_settings(parser, ClusterConfig, environ=os.environ)
    arguments = [CONFIG_FLAG, str(args["config"])] if args.get("config") else []
    parsed = parser.parse_args(arguments)
    return application(cluster_plan(parsed, configuration(parsed), parser.sources.settings))
