"""The examples of the client's README run as they are, except for the server's address."""

import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

README = Path(__file__).parents[2] / "clients/python/README.md"
EXAMPLES = re.findall(r"^```python\n(.*?)^```", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize(
    "example", EXAMPLES, ids=["ask", "map", "tasks", "stream", "async", "admin", "errors"]
)
def test_example(
    example: str,
    peer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (8, 4)).save("picture.jpg")
    exec(compile(example.replace("127.0.0.1:50051", peer.target), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    if "save(" in example:
        assert "Two red circles" in printed and (tmp_path / "found.png").exists()
    elif ".map(" in example:
        assert printed.endswith("picture.jpg 2\nmissing.jpg failed\npicture.jpg 2\n")
    elif "analyze" in example:
        answer = "Two red circles — één is größer. 👍\n"
        assert printed == f"{answer.strip()} 2\n{answer}{answer}"
    elif "stream" in example:
        assert "Two red circles" in printed
    elif "Admin" in example:
        assert printed == "3\n"
    else:
        assert not printed  # the canned peer refuses no top_p
