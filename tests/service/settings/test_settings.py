"""Flags and variables become configurations; what is invalid is named in one line."""

import re

import pytest

from kestrel_engine import ConfigError
from kestrel_grpc.settings.addresses import parse_address, unix_path, with_port
from kestrel_grpc.settings.configuration import add_server_flags
from kestrel_grpc.settings.flags import Parser, SettingsError, size
from kestrel_grpc.settings.model import add_model_flags, config_error, runtime_configs
from kestrel_grpc.settings.server import MIB, ServerConfig, server_config


def parsed(*flags, **environ):
    parser = Parser(prog="test")
    add_model_flags(parser, environ)
    add_server_flags(parser, environ)
    return parser.parse_args(flags)


def configs(*flags, **environ):
    args = parsed(*flags, **environ)
    return server_config(args), *runtime_configs(args)


def test_without_flags_the_defaults_hold(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    server, runtime = configs()
    assert server == ServerConfig() and server.leaving_s == 5.0
    assert server.listen == ("127.0.0.1:50051",)
    assert server.max_message_bytes == 33 * MIB
    assert runtime.model == "kestrel-small"
    assert runtime.max_batch_size is None, "the device decides"
    assert runtime.compile and runtime.cuda_graphs and not runtime.random_weights


def test_the_delay_before_draining_fits_the_grace_and_is_left_to_kubernetes(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert configs("--grace", "1")[0].leaving_s == 1.0
    assert configs("--grace", "1", "--drain-delay", "7")[0].leaving_s == 7.0
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    assert configs()[0].leaving_s == 0.0
    assert configs("--drain-delay", "2")[0].leaving_s == 2.0


def test_the_sources_of_adapters():
    flags = ("--adapter-hub", "team/a,team/b*", "--adapter-hub", "org/*")
    flags += ("--adapter-disk-bytes", "2GiB")
    environ = {"MOONDREAM_API_KEY": "key", "KESTREL_ADAPTER_API": "https://api.example"}
    found = configs(*flags, **environ)[1].adapter_sources
    assert found.hub == ("team/a", "team/b*", "org/*") and found.disk_bytes == 2 << 30
    assert (found.api, found.api_key, found.downloads) == ("https://api.example", "key", True)
    assert not configs()[1].adapter_sources.downloads and not configs()[1].has_adapters
    for flags, words in (
        (("--adapter-hub", "team"), "ORG/REPO, ORG/PREFIX"),
        (("--adapter-api", "http://api.example"), "--adapter-api=http://api.example: must begin"),
    ):
        with pytest.raises((SettingsError, SystemExit)) as told:
            configs(*flags)
        assert words in str(told.value) or isinstance(told.value, SystemExit)


def test_a_switch_has_a_variable_of_on_and_off():
    assert configs(KESTREL_NO_COMPILE="on")[1].compile is False
    assert configs(KESTREL_NO_COMPILE="0", KESTREL_OFFLINE="")[1].compile is True
    assert configs("--no-compile", KESTREL_NO_COMPILE="off")[1].compile is False
    assert configs(KESTREL_GRACE="")[0].grace_s == ServerConfig().grace_s, (
        "an empty variable is none"
    )


def test_flags_reach_their_fields():
    server, runtime = configs(
        *("--model", "moondream2", "--weights", "w", "--tokenizer", "t", "--device", "cpu"),
        *("--precision", "fp8-vision", "--threads", "2", "--seed", "7", "--max-batch-size", "9"),
        *("--max-seq-length", "900", "--max-queue", "11", "--default-max-new-tokens", "12"),
        *("--max-image-bytes", "1MiB", "--max-image-pixels", "1000"),
        *("--max-queue-wait", "2.5", "--kv-cache-gib", "13"),
        *("--image-cache-bytes", "0", "--step-crops", "15"),
        *("--step-timeout", "16", "--drain-delay", "2"),
        *("--listen", "0.0.0.0:1", "--listen", "unix:/a,[::1]:2", "--max-message-bytes", "5M"),
        *("--grace", "1.5", "--access-log", "json", "--log-level", "debug"),
        *("--attention", "triton", "--random-weights", "--preprocess-threads", "3"),
    )
    assert (runtime.model, runtime.model_path, runtime.tokenizer_path) == ("moondream2", "w", "t")
    assert (runtime.device, runtime.dtype, runtime.fp8_gemms) == ("cpu", "bfloat16", "vision")
    assert (runtime.attention, runtime.random_weights) == ("triton", True)
    assert runtime.preprocess_threads == 3
    assert (runtime.cpu_threads, runtime.seed, runtime.max_batch_size) == (2, 7, 9)
    assert (runtime.max_seq_length, runtime.max_queue, runtime.default_max_tokens) == (900, 11, 12)
    assert (runtime.max_queue_wait_s, runtime.kv_cache_gib) == (2.5, 13)
    assert (runtime.image_cache_bytes, runtime.step_crops) == (0, 15)
    assert (runtime.step_timeout_s, server.drain_delay_s) == (16, 2)
    limits = runtime.image_limits
    assert (limits.max_bytes, limits.max_pixels) == (MIB, 1000)
    assert server.listen == ("0.0.0.0:1", "unix:/a", "[::1]:2")
    assert (server.max_message_bytes, server.grace_s) == (5_000_000, 1.5)
    assert (server.access_log, server.log_level) == ("json", "debug")


def test_images_kept_and_skills_plugged_in():
    server, _ = configs("--image-store-bytes", "0", KESTREL_SKILL="a.b:C, d:E")
    assert server.image_store_bytes == 0
    assert server.skills == ("a.b:C", "d:E")
    server, _ = configs("--skill", "f:G", "--skill", "h:I", KESTREL_IMAGE_STORE_BYTES="2KiB")
    assert server.image_store_bytes == 2048
    assert server.skills == ("f:G", "h:I")


def test_access_log_without_a_format_is_text():
    assert configs("--access-log")[0].access_log == "text"


@pytest.mark.parametrize(
    ("flags", "environ", "words"),
    [
        (["--max-batch-size", "0"], {}, "--max-batch-size=0: must be a whole number from 1 to 4096"),
        (["--device", "tpu"], {}, "--device=tpu"),
        (["--kv-cache-gib", "0"], {}, "--kv-cache-gib=0.0: must be a finite number above 0"),
        (["--log-buffer-bytes", "4095"], {}, "--log-buffer-bytes=4095: must be a whole number of bytes of at"),
        (["--grace", "-1"], {}, "--grace=-1.0: must be a finite number of seconds from 0 to 1000000"),
        (["--max-message-bytes", "4GiB"], {}, "--max-message-bytes"),
        ([], {"KESTREL_ATTENTION": "none"}, "KESTREL_ATTENTION='none': must be one of auto, fl"),
        ([], {"KESTREL_NO_COMPILE": "maybe"}, "KESTREL_NO_COMPILE='maybe': must be on or off"),
        ([], {"KESTREL_KV_CACHE_GIB": "8G"}, "KESTREL_KV_CACHE_GIB='8G': must be a number"),
        ([], {"KESTREL_MAX_QUEUE": "many"}, "KESTREL_MAX_QUEUE='many': must be a whole number"),
        ([], {"KESTREL_LISTEN": "nowhere"}, "KESTREL_LISTEN='nowhere'"),
        ([], {"KESTREL_SKILL": "os.path"}, "KESTREL_SKILL='os.path': must be PACKAGE.MODULE:CLASS"),
    ],
)  # fmt: skip
def test_what_is_invalid_is_named(flags, environ, words):
    with pytest.raises(SettingsError) as caught:
        configs(*flags, **environ)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "flags",
    [["--max-queue", "x"], ["--grace", "nan"], ["--listen", "x"], ["--max-message-bytes", "64 apples"],
     ["--nonsense"], ["--attention", "none"], ["--log-level", "loud"]],
)  # fmt: skip
def test_a_flag_that_cannot_be_read_ends_with_one_line_and_status_2(flags, capsys):
    with pytest.raises(SystemExit) as caught:
        configs(*flags)
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert flags[0] in told


@pytest.mark.parametrize(
    ("flags", "variables", "words"),
    [
        (["--precision", "fp8"], {}, "--precision=fp8: sets kv_cache_dtype to fp8: flashinfer can't"),
        ([], {"KESTREL_PRECISION": "fp8"}, "KESTREL_PRECISION=fp8: sets kv_cache_dtype to fp8"),
        (["--model", "kestrel-small,precision=fp8-kv"], {}, "--precision=fp8-kv: sets kv_cache_dtype"),
    ],
)  # fmt: skip
def test_an_error_names_the_setting_that_was_given(flags, variables, words):
    with pytest.raises(SettingsError, match=re.escape(words)):
        configs("--attention", "flashinfer", *flags, **variables)


def test_an_error_of_the_engine_about_weights_names_the_precision():
    error = config_error(ConfigError("weights", "int8", "no"), parsed("--precision", "int8"))
    assert str(error) == "--precision=int8: sets weights to int8: no"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("10B", 10), ("2k", 2000), ("2KiB", 2048), ("64 MiB", 64 * MIB), ("1GB", 10**9)],
)
def test_sizes(text, value):
    assert size(text) == value


@pytest.mark.parametrize("text", ["", "-1", "1.5M", "MiB", "1TB", "1 2"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="must be"):
        size(text)


@pytest.mark.parametrize(
    "text", ["127.0.0.1:0", "localhost:50051", "[::]:65535", "unix:/run/x", "unix:x", "my-host:1"]
)
def test_addresses(text):
    assert parse_address(text) == text


@pytest.mark.parametrize(
    "text",
    ["", "50051", "host:", ":1", "host:65536", "::1:5", "http://x:1", "unix:", "unix:" + 200 * "x"],
)
def test_what_is_no_address(text):
    with pytest.raises(ValueError, match=r"must be|bytes"):
        parse_address(text)


def test_ports_and_paths_of_addresses():
    assert with_port("[::1]:0", 7) == "[::1]:7"
    assert with_port("unix:/a:0", 1) == "unix:/a:0"
    assert parse_address("unix:///a/b") == "unix:/a/b"
    assert unix_path("unix:///a/b") == unix_path("unix:/a/b") == "/a/b"
    assert unix_path("a:1") is None
