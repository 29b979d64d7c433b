"""For the site that ``make docs-site`` builds: what docs/ does not hold is named, not linked."""

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file outside docs/ becomes its text, and its path in the repository if the text is another."""

    def named(link: re.Match[str]) -> str:
        path = posixpath.normpath(
            posixpath.join("docs", posixpath.dirname(page.file.src_uri), link[3])
        )
        if path.startswith("docs/"):
            return link[0]
        return link[2] if path.endswith(link[2].strip("`")) else f"{link[2]} (`{path}`)"

    return _LINK.sub(named, markdown)
