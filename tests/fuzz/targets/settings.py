"""The configuration file of ``serve``, and the file of tokens: the first line of an input names which."""

import contextlib
import io
import tempfile

from kestrel_engine.errors import ConfigError
from kestrel_grpc.security.identity.tokens import TokenFileError, read_credentials
from kestrel_grpc.settings.configuration import add_flags, configuration
from kestrel_grpc.settings.flags import Parser, SettingsError

_PARSER = Parser("serve")
add_flags(_PARSER, {})


def take(data: bytes) -> None:
    kind, _, content = data.partition(b"\n")
    with tempfile.NamedTemporaryFile(suffix=".toml") as file:
        file.write(content)
        file.flush()
        if kind == b"tokens":
            with contextlib.suppress(TokenFileError):
                read_credentials(file.name)
            return
        with contextlib.suppress(SettingsError, ConfigError), _quiet():
            configuration(_PARSER.parse_args(["--config", file.name]))


@contextlib.contextmanager
def _quiet():
    """Usage errors end a program with status 2 and a line."""
    told = io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            yield
    except SystemExit as ended:
        assert ended.code == 2 and told.getvalue().strip(), told.getvalue()
