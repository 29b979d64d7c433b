"""Flags, variables and one TOML file become one configuration, which can be printed and fed back in."""

import dataclasses
import os
import sys
import tomllib
from pathlib import Path

import pytest

from kestrel_engine import SettingGroup, check_settings
from kestrel_grpc.settings.configuration import (
    add_flags,
    configuration,
    known_settings,
    print_configuration,
    refuse_removed,
    without_effect,
)
from kestrel_grpc.settings.flags import Parser, SettingsError, add_settings, configured
from kestrel_grpc.settings.sources import read_config_file
from tests.forking.process import run_forked
from tests.service.command_line import here

ROOT = Path(__file__).parents[3]


@pytest.fixture
def file(tmp_path):
    def write(text):
        path = tmp_path / "kestrel.toml"
        path.write_text(text)
        return str(path)

    return write


def parsed(*flags, **environ):
    parser = Parser(prog="test")
    add_flags(parser, environ)
    return parser.sources.settings, parser.parse_args(flags)


def whole_configuration(*flags, **environ):
    return configuration(parsed(*flags, **environ)[1])


def printed(*flags, **environ):
    settings, args = parsed(*flags, **environ)
    configuration(args)
    return print_configuration(settings, args, environ)


def refused(text, file, **environ):
    with pytest.raises(SettingsError) as caught:
        whole_configuration("--config", file(text), **environ)
    told = str(caught.value)
    assert "\n" not in told
    return told.removeprefix(str(Path(file(text)).parent) + "/")


def test_the_file_gives_what_flags_and_variables_do_not(file):
    name = file(
        """
        [model]
        model = "moondream2"
        weights = "/models/md2"
        offline = true
        [device]
        no-compile = true
        [requests]
        max-queue = 7
        max-image-bytes = "1MiB"
        [scheduler]
        kv-cache-gib = 1.5
        [server]
        listen = ["127.0.0.1:1", "unix:/run/a"]
        grace = 2
        [telemetry]
        orca = true
        [log]
        log-level = "info,kestrel_engine.steps.loop=debug"
        [security]
        auth-tokens = "/etc/kestrel/tokens"
        open = ["metrics", "reflection"]
        [calls]
        rate = 2.5
        """
    )
    for found in (whole_configuration("--config", name), whole_configuration(KESTREL_CONFIG=name)):
        runtime, server = found.runtime, found.server
        assert (runtime.model, runtime.model_path) == ("moondream2", "/models/md2")
        assert runtime.offline
        assert (runtime.compile, runtime.max_queue) == (False, 7)
        assert runtime.image_limits.max_bytes == 2**20
        assert runtime.kv_cache_gib == 1.5
        assert server.listen == ("127.0.0.1:1", "unix:/run/a")
        assert (server.grace_s, server.orca) == (2, True)
        assert server.log_level == "info,kestrel_engine.steps.loop=debug"
        assert server.security.auth_tokens == "/etc/kestrel/tokens"
        assert server.security.open_services == ("metrics", "reflection")
        assert server.security.calls.rate == 2.5


def test_a_flag_wins_over_a_variable_and_that_over_the_file(file):
    name = file('[requests]\nmax-queue = 3\n[server]\nlisten = ["a:3"]\n[device]\nno-compile=true')
    variables = {"KESTREL_MAX_QUEUE": "2", "KESTREL_LISTEN": "a:2", "KESTREL_NO_COMPILE": "off"}
    assert whole_configuration("--config", name).runtime.max_queue == 3
    found = whole_configuration("--config", name, **variables)
    assert (found.runtime.max_queue, found.server.listen) == (2, ("a:2",))
    assert found.runtime.compile
    found = whole_configuration(
        "--config", name, "--max-queue", "1", "--listen", "a:1", **variables
    )
    assert (found.runtime.max_queue, found.server.listen) == (1, ("a:1",))


def test_a_flag_names_another_file_than_the_variable(file, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text("[requests]\nmax-queue = 4\n")
    name = file("[requests]\nmax-queue = 3\n")
    assert whole_configuration("--config", str(other), KESTREL_CONFIG=name).runtime.max_queue == 4


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[requests]\nmax-queue = 'x'", "kestrel.toml:requests.max-queue='x': must be a whole number"),
        ("[requests]\nmax-queue = 1.5", "kestrel.toml:requests.max-queue=1.5: must be a whole number"),
        ("[requests]\nmax-queue = 0", "kestrel.toml:requests.max-queue=0: must be a whole number of"),
        ("[requests]\nmax-queue = true", "kestrel.toml:requests.max-queue=True: must be a string or"),
        ("[requests]\nmax-queue = [1]", "max-queue=[1]: must be one value, not a list"),
        ("[requests]\nmax-queue = 2020-01-01", "must be a string or a number"),
        ("[model]\nmodel = 3", "kestrel.toml:model.model=3: must be a string"),
        ("[device]\nno-compile = 2", "kestrel.toml:device.no-compile=2: must be on or off"),
        ("[device]\nno-compile = 'maybe'", "kestrel.toml:device.no-compile='maybe': must be on or off"),
        ("[log]\naccess-log = 'xml'", "access-log='xml': must be one of off, text, json"),
        ("[log]\naccess-log = true", "access-log=True: must be one of"),
        ("[server]\nlisten = ['nowhere']", "kestrel.toml:server.listen=['nowhere']: must be HOST:PORT"),
        ("[device]\ndevice = 'tpu'", "kestrel.toml:device.device=tpu: must be"),
        ("[server]\nmax-message-bytes = '4GiB'", "kestrel.toml:server.max-message-bytes=4294967296: must"),
        ("[calls]\nrate = -1", "kestrel.toml:calls.rate=-1.0: must be"),
        ("[telemetry]\nmetrics-listen = 'unix:/a'", "kestrel.toml:telemetry.metrics-listen=unix:/a: must"),
        ("[requests]\nmax-quue = 1", "kestrel.toml:requests.max-quue: unknown key; did you mean max-queue?"),
        ("[requests]\nmax_queue = 1", "did you mean max-queue?"),
        ("[server]\nmax-queu = 1", "did you mean max-queue in [requests]?"),
        ("[server]\nmax-queue = 1", "kestrel.toml:server.max-queue: it belongs in [requests]"),
        ("max-queue = 1", "kestrel.toml:max-queue: a key must stand in a section; it belongs in [requests]"),
        ("[sever]\ngrace = 1", "kestrel.toml: unknown section [sever]; did you mean [server]?"),
        ("[nothing]", "unknown section [nothing]; the sections are model, device"),
        ("[security]\napi-key = 'k'", "a secret cannot stand in the file; set the variable KESTREL_API_KEY"),
        ("[model]\nadapter-api-key = 'k'", "a secret cannot stand in the file; set MOONDREAM_API_KEY"),
        ("[server", "kestrel.toml: is not valid TOML: "),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_file_is_named(text, told, file):
    assert told in refused(text, file)


def test_a_value_that_does_not_count_is_read_all_the_same(file):
    name = file("[requests]\nmax-queue = 'x'")
    with pytest.raises(SettingsError, match=r"kestrel\.toml:requests\.max-queue"):
        whole_configuration("--config", name, "--max-queue", "1", KESTREL_MAX_QUEUE="2")


@pytest.mark.parametrize("variables", [{}, {"KESTREL_CONFIG": "/nowhere.toml"}])
def test_a_file_that_cannot_be_read(variables):
    flags = () if variables else ("--config", "/nowhere.toml")
    with pytest.raises(SettingsError) as caught:
        whole_configuration(*flags, **variables)
    name = "KESTREL_CONFIG" if variables else "--config"
    assert str(caught.value) == f"{name}=/nowhere.toml: cannot be read: No such file or directory"


def test_a_variable_that_names_no_setting_is_told():
    settings, _ = parsed()
    others = ("KESTREL_SERVICE_HOST", "KESTREL_FRONT_PORT_8080_TCP_ADDR", "KESTREL_PORT", "PATH")
    known = ("KESTREL_CONFIG", "KESTREL_API_KEY", "KESTREL_TOKEN", "KESTREL_TOKEN_BUDGET")
    environ = dict.fromkeys((*others, *known, "KESTREL_TOKN_BUDGET"), "1")
    assert without_effect(settings, environ) == [
        "KESTREL_TOKN_BUDGET has no effect: it names no setting; did you mean KESTREL_TOKEN_BUDGET?"
    ]


def test_a_variable_of_a_removed_flag_is_refused():
    removed = {"--tls-client-crl": "; the file of --auth-tokens names the certificates that count"}
    refuse_removed(removed, {"KESTREL_TLS_CLIENT_CA": "ca.pem"})
    with pytest.raises(SettingsError, match=r"^KESTREL_TLS_CLIENT_CRL: there is no such setting"):
        refuse_removed(removed, {"KESTREL_TLS_CLIENT_CRL": "lists.pem"})


def test_an_operator_has_few_settings():
    """A hundred, and those of the ledgers: the audit log, the usage log, and token budgets with their file;
    and the file of batches."""
    assert len(known_settings()) <= 105


def test_an_error_found_late_names_the_variable():
    with pytest.raises(SettingsError, match=r"^KESTREL_MAX_BATCH_SIZE=0: must be a whole number"):
        whole_configuration(KESTREL_MAX_BATCH_SIZE="0")


def test_what_is_printed_gives_the_same_configuration(file, tmp_path):
    given = ("--listen", "127.0.0.1:9,unix:/run/a b", "--grace", "1.5", "--no-compile")
    given += ("--skill", "a.b:C", "--kv-cache-gib", "2", "--auth-tokens", '/a"\\\x7fé')
    text = printed(*given, KESTREL_MAX_QUEUE="9")
    name = tmp_path / "printed.toml"
    name.write_text(text)
    assert whole_configuration("--config", str(name)) == whole_configuration(
        *given, KESTREL_MAX_QUEUE="9"
    )
    again = printed("--config", str(name))
    assert tomllib.loads(again) == tomllib.loads(text)
    assert "max-queue = 9  # variable KESTREL_MAX_QUEUE" in text
    assert "grace = 1.5  # flag --grace" in text
    assert "max-calls = 1024  # default" in text
    assert "# max-batch-size: 16, on CUDA 64  # default" in text
    assert f"max-queue = 9  # file {name}:requests.max-queue" in again


def test_every_setting_is_printed():
    text = printed()
    for known in known_settings():
        assert known.section is not None
        if known.section == "cluster":  # The file may have it, and serve has none of these flags.
            continue
        assert f"\n{known.key} = " in text or f"\n# {known.key}: " in text


def test_secrets_are_not_printed():
    text = printed(
        KESTREL_API_KEY="s3cret-key",
        MOONDREAM_API_KEY="s3cret-key-of-the-api",
        OTEL_EXPORTER_OTLP_HEADERS="authorization=s3cret-header",
        OTEL_EXPORTER_OTLP_ENDPOINT="http://user:s3cret-word@collector:4317",
        OTEL_SERVICE_NAME="door",
        HF_TOKEN="s3cret-token",
    )
    assert "s3cret" not in text
    assert "# KESTREL_API_KEY = (hidden)" in text and "# MOONDREAM_API_KEY = (hidden)" in text
    assert "# OTEL_EXPORTER_OTLP_HEADERS = (hidden)" in text
    assert '# OTEL_EXPORTER_OTLP_ENDPOINT = "http://(hidden)@collector:4317"' in text
    assert '# OTEL_SERVICE_NAME = "door"' in text


def serve(*flags, **environ):
    command = [sys.executable, "-m", "kestrel_grpc", "serve", *flags]
    return run_forked(command, text=True, cwd=ROOT, env={"PATH": "/usr/bin:/bin", **environ})


def test_the_command_prints_and_ends(file):
    name = file("[requests]\nmax-queue = 3\n")
    done = serve("--print-config", KESTREL_CONFIG=name, KESTREL_API_KEY="a-s3cret-of-16-characters")
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(done.stdout)["requests"]["max-queue"] == 3
    assert "s3cret" not in done.stdout + done.stderr


def test_a_field_is_all_that_a_knob_needs(file):
    """Flag, variable, key, check and help come from the field."""

    group = SettingGroup("knobs", "knobs")

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Knobs:
        batch_s: float = group.setting(2.5, "a pause", high=9)
        names: tuple[str, ...] = group.setting(("a",), "names", distinct=False)
        fast: bool = group.setting(True, "plainly", flag="--slow", negated=True)
        room: int | None = group.setting(None, "room", kind="bytes", zero_is_none=True)

        def __post_init__(self):
            check_settings(self)

    def knobs(*flags, **environ):
        parser = Parser(prog="test")
        add_settings(parser, Knobs, environ=environ)
        read_config_file(parser, lambda: parser.sources.settings)
        parser.add_argument("--config")
        return configured(Knobs, parser.parse_args(flags))

    from_file = file("[knobs]\nbatch = 3\nnames = ['x', 'y,x']\nslow = true\nroom = '2KiB'\n")
    assert knobs() == Knobs()
    assert knobs("--batch", "1", "--names", "b", "--slow", "--room", "0") == Knobs(
        batch_s=1, names=("b",), fast=False
    )
    assert knobs("--config", from_file) == Knobs(
        batch_s=3, names=("x", "y", "x"), fast=False, room=2048
    )
    with pytest.raises(SettingsError, match=r"^KESTREL_BATCH=10.0: must be a finite number of sec"):
        knobs(KESTREL_BATCH="10")


@pytest.mark.parametrize(
    "flags",
    [
        ("--skill", "no.module:Skill"),
        ("--device", "cuda:99"),
        ("--random-weights", "--model", "nosuch"),
        ("--adapters-dir", "/no/folder"),
        ("--workers", "2", "--listen", "unix:/tmp/kestrel-test.sock"),
    ],
    ids=" ".join,
)
def test_printing_refuses_what_serving_would(flags):
    address = {"KESTREL_LISTEN": "127.0.0.1:0"}
    printed, served = here("serve", "--print-config", *flags, **address), serve(*flags, **address)
    assert (printed.returncode, served.returncode, printed.stdout) == (2, 2, "")
    assert printed.stderr.splitlines() == served.stderr.splitlines()[-1:]


def test_a_file_that_would_hold_the_server(tmp_path, file):
    os.mkfifo(tmp_path / "fifo")
    for name in (str(tmp_path / "fifo"), "/dev/zero"):
        with pytest.raises(SettingsError) as caught:
            whole_configuration("--config", name)
        words = "cannot be read: is not a regular file; copy its contents to a file"
        assert str(caught.value) == f"--config={name}: {words}"
    with pytest.raises(SettingsError, match=r"is not valid TOML: it is nested too deeply"):
        whole_configuration("--config", file("a = " + "[" * 100_000))
