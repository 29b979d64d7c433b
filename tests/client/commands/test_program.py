"""The program ``kestrel`` runs without the server's packages, and ``kestrel-grpc`` has its commands too."""

import asyncio
import sys

import pytest

from kestrel_client.commands import DEMO_IMAGE, program
from kestrel_client.commands.parser import GROUPS
from kestrel_grpc.cli.program import COMMANDS, PROGRAM
from tests.waiting import outlived

ALONE = """
import sys
sys.modules |= dict.fromkeys(("kestrel_engine", "kestrel_grpc", "torch", "pyvips"))
from kestrel_client.commands.program import main
sys.exit(main(sys.argv[1:]))
"""


def test_kestrel_grpc_runs_the_same_modules():
    assert list(program.COMMANDS) and set(program.COMMANDS) < set(COMMANDS)
    other = [name for name, found in program.COMMANDS.items() if COMMANDS[name] != found]
    # It also lists what this machine has downloaded.
    assert other == ["models"]


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        (["query", DEMO_IMAGE, "How many?", "--max-tokens", "4"], b"\n"),
        pytest.param(["models"], b"requests may wait", marks=pytest.mark.slow),
        pytest.param(["health"], b"SERVING", marks=pytest.mark.slow),
        (
            ["batch", DEMO_IMAGE, "--caption", "--in-process", "--output", "out"],
            b"needs the server's package",
        ),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
async def test_commands_run_without_the_servers_packages(serve, tmp_path, words, printed):
    served = await serve()
    if words[0] != "batch":
        words = [*words, "--server", served.server.addresses[0]]
    status, output = await run_alone(words, tmp_path)
    assert printed in output and status == int(words[0] == "batch"), output


async def run_alone(words, folder) -> tuple[int | None, bytes]:
    """Status and output of a command without the server's packages."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ALONE, *map(str, words),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=folder,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode, output


async def test_bench_runs_without_the_servers_packages(serve, tmp_path):
    """A busy machine may not end a request within a short stage. Then the stage is longer."""
    served = await serve()
    words = [
        "bench", "--made-up", "1", "--unique-images", "1", "--server", served.server.addresses[0],
    ]  # fmt: skip
    ended = await outlived(
        lambda seconds: run_alone([*words, "--seconds", f"{seconds:g}"], tmp_path),
        lambda ended: b"no request ended in time" not in ended[1],
    )
    assert b"requests/s" in ended[1] and ended[0] == 0, ended


def test_the_short_help_of_every_command_is_short(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, parsers, modules = PROGRAM.whole_parser(COMMANDS)
    lengths = {name: parser.short_help().count("\n") for name, parser in parsers.items()}
    assert {name: length for name, length in lengths.items() if length > 55} == {
        "serve": lengths["serve"]
    }
    assert lengths["serve"] < 80 < 300 < parsers["serve"].format_help().count("\n")
    assert len(parsers["serve"].essential) == 25 and "--http-listen" in parsers["serve"].essential
    for name, parser in parsers.items():
        # Commands of one module share the list.
        alike = [parsers[other] for other, module in modules.items() if module is modules[name]]
        known = {
            flag for each in alike for action in each._actions for flag in action.option_strings
        }
        assert known >= set(parser.essential), name


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_the_help_lists_commands_by_group(capsys, flag):
    with pytest.raises(SystemExit) as ended:
        PROGRAM.main([flag])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n{group}:\n" in text for group in GROUPS)
    assert all(f"\n  {name} " in text for name in COMMANDS)
    assert ("examples:" in text) == (flag == "--help")


def test_a_command_of_the_server_is_unknown_here(capsys):
    with pytest.raises(SystemExit) as ended:
        program.main(["serve"])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("kestrel: error: unknown command 'serve'")
