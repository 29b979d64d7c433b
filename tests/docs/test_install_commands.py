"""Nobody has published the packages of this project, so commands that install them name folders of a clone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACES = ("kestrel_engine", "kestrel_grpc", "clients", "deploy", "docs", "examples", "training")
FILES = [
    *ROOT.glob("*.md"),
    *(
        path
        for place in PLACES
        for path in (ROOT / place).rglob("*")
        if path.suffix in (".py", ".md", ".ipynb", ".yaml", ".toml", ".ts") or "Docker" in path.name
        if "node_modules" not in path.parts and path.is_file()
    ),
]
UNPUBLISHED = re.compile(r"""install\b[^\n#`]*?["' ](kestrel-(grpc|client))\b(?!.*\.whl)""")
"""A command that asks an index for a package of this project."""
ALONE = re.compile(r"""install\b(?![^\n]*clients/python)[^\n]*?["' ]\.(\[[\w,]+\])?["'](?=\W)""")
"""A command that installs the server without the client, which no index has."""


def wrong_commands(text: str) -> list[str]:
    # A literal that continues on the next line is one text.
    joined = re.sub(r'"\n\s*f?"', "", text)
    return [found[0] for pattern in (UNPUBLISHED, ALONE) for found in pattern.finditer(joined)]


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'kestrel-grpc[http]'",
        "install kestrel-grpc[gpu]",
        "pip install -c constraints.txt kestrel-grpc",
        "pip install cvat-cli 'kestrel-client[images]'",
        "RUN pip install 'kestrel-grpc[ray]'",
        "`pip install '.[http]'`",
        'f"install it with pip install "\n            f"\'.[front]\', or"',
    ],
)
def test_wrong_commands_are_found(text: str):
    assert wrong_commands(text)


@pytest.mark.parametrize(
    "text",
    [
        "pip install ./clients/python '.[http]'",
        "pip install -c constraints.txt ./clients/python '.[http]'",
        "pip install './clients/python[images]'",
        'pip install --find-links dist "dist/kestrel_grpc-0.1.0-py3-none-any.whl[all]"',
    ],
)
def test_right_commands_are_not(text: str):
    assert not wrong_commands(text)


def test_no_page_and_no_hint_names_a_package_that_nobody_published():
    assert len(FILES) > 300
    found = {str(path.relative_to(ROOT)): wrong_commands(path.read_text()) for path in FILES}
    assert {path: commands for path, commands in found.items() if commands} == {}
