"""docs/run/install.md, followed line by line in a machine of its own."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.code_blocks import code_blocks
from tests.deploy.machine import machine
from tests.deploy.test_manifests import DEPLOY, settled
from tests.deploy.test_wheels import ROOT, checkout

PAGE = ROOT / "docs/run/install.md"
UNIT = (DEPLOY / "systemd/kestrel-grpc.service").read_text()


def test_the_unit_gives_the_service_what_the_settings_name():
    """The files of root's folder, as systemd names their copies."""
    folder = re.search(r"^LoadCredential=kestrel:(\S+)$", UNIT, re.MULTILINE)[1]
    security = settled({}, "--config", str(DEPLOY / "systemd/kestrel.toml")).security
    named = [security.auth_tokens, security.tls.certificate, security.tls.private_key]
    copies = "/run/credentials/kestrel-grpc.service/kestrel_"
    assert all(name.startswith(copies) for name in named)
    files = [name.removeprefix(copies) for name in named]
    assert files == ["tokens", "tls.crt", "tls.key"]
    assert all(f"{folder}/{file}" in PAGE.read_text() for file in files)
    listen = settled({}, "--config", str(DEPLOY / "systemd/kestrel.toml")).listen
    assert "RuntimeDirectory=kestrel\n" in UNIT and "unix:/run/kestrel/kestrel.sock" in listen


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_service_has_few_rights(tmp_path: Path):
    path = tmp_path / "kestrel-grpc.service"
    path.write_text(UNIT.replace("/opt/kestrel/bin/kestrel-grpc", "/bin/true"))
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=40", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout[-500:]


def commands_of(begin: str, end: str) -> str:
    """The commands of the page's sections from ``begin`` to ``end``."""
    text = PAGE.read_text()
    first, last = (text[: text.index(f"## {title}\n")].count("\n") for title in (begin, end))
    return "\n".join(block.text for block in code_blocks(PAGE) if first < block.line < last)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_page_makes_a_service(tmp_path: Path):
    program = commands_of("The program", "A certificate, a token and the settings")
    program = program.replace("git clone ADDRESS", "cp -r /source")
    *steps, remote = commands_of("A certificate, a token and the settings", "Later").split("export")
    (token_line,) = re.findall("^.* token camera-7 .*$", steps[0], re.MULTILINE)
    local = steps[0].replace(token_line, f"{token_line} > /root/token")
    remote = f"export{remote}".replace(
        "KESTREL_TOKEN=…", 'KESTREL_TOKEN="$(grep -o "kst_[^ ]*" /root/token)"'
    )
    remote = remote.replace("HOST:", "localhost:").replace(
        "What is this?", "How many green crescents are there?"
    )
    assert "…" not in remote and "HOST" not in remote
    with machine(tmp_path) as made:
        checkout(made.root / "source")
        made.run(program)
        printed = made.boot(f"""
cd /opt/kestrel-source
{local}
: is it as safe as it should be
systemctl show kestrel-grpc --property=User,MainPID
! grep -q '^Uid:.*\\b0\\b' "/proc/$(systemctl show kestrel-grpc --property=MainPID --value)/status"
stat --format='%n %a %U' /etc/kestrel/credentials/*
: as a caller
cd /root; cp /etc/kestrel/credentials/tls.crt .; cp /source/clients/python/kestrel_client/commands/demo.jpg picture.jpg
export PATH="/opt/kestrel/bin:$PATH"
{remote}
: a new token needs a restart
systemctl restart kestrel-grpc
kestrel-grpc health --server localhost:50051 --ca tls.crt
systemctl stop kestrel-grpc
systemctl show kestrel-grpc --property=Result,ExecMainStatus
""")
    lines = printed.splitlines()
    assert lines.count("SERVING") == 3, printed
    assert "2" in lines, "the answer"
    assert '"id":"kestrel-small"' in printed.replace(" ", "")
    assert "/etc/kestrel/credentials/tls.key 600 root" in lines
    assert lines[-2:] == ["Result=success", "ExecMainStatus=0"]
