"""Asks a Kestrel server about an image file, for Home Assistant's shell_command. It needs Python only.

    python3 kestrel_ask.py https://HOST:2020 query FILE TEXT

prints the server's answer as JSON, or ``{"error": …}`` with status 1. The skills are query, caption, point, detect and
segment. TEXT is the question, the length of the caption, or the object. A file ``kestrel_token`` beside this one may
hold the token, and ``kestrel_ca.pem`` the authority of the server's certificate.
"""

import base64
import json
import pathlib
import ssl
import sys
import urllib.error
import urllib.request

FIELDS = {
    "query": "question",
    "caption": "length",
    "point": "object",
    "detect": "object",
    "segment": "object",
}
LARGEST = 20 * 1024 * 1024
TIMEOUT_S = 50  # Home Assistant ends a command after 60 s.
HERE = pathlib.Path(__file__).parent


def asked(url: str, skill: str, file: str, text: str) -> object:
    """Raises OSError, ValueError."""
    if skill not in FIELDS:
        raise ValueError(f"the skill must be one of {', '.join(FIELDS)}, not {skill!r}")
    if not url.startswith(("http://", "https://")):
        raise ValueError("the address must begin with http:// or https://")
    path = pathlib.Path(file)
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{file} has more than {LARGEST} bytes")
    image = base64.b64encode(path.read_bytes()).decode()
    body = json.dumps({"image_url": image, FIELDS[skill]: text}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/v1/{skill}", body)
    request.add_header("Content-Type", "application/json")
    token = HERE / "kestrel_token"
    if token.exists():
        request.add_header("Authorization", f"Bearer {token.read_text().strip()}")
    authority = HERE / "kestrel_ca.pem"
    trust = ssl.create_default_context(cafile=str(authority) if authority.exists() else None)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=trust) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"status {error.code}: {error.read(1000).decode(errors='replace')}"
        ) from None


def main() -> int:
    try:
        print(json.dumps(asked(*sys.argv[1:])))
    except (OSError, TypeError, ValueError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
