"""A page in Chromium, whose script imports npm packages and tells what it found."""

import functools
import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
_FLAGS = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"


def imports_of(folder: Path) -> dict[str, str]:
    """The import map of the packages of connect-es, which npm has installed in ``folder``."""
    imports = {}
    for package in ("@bufbuild/protobuf", "@connectrpc/connect", "@connectrpc/connect-web"):
        exports = json.loads((folder / "node_modules" / package / "package.json").read_text())
        for name, where in exports["exports"].items():
            while isinstance(where, dict):
                where = where.get("import") or where.get("browser") or where.get("default")
            if where is not None:
                imports[package + name[1:]] = f"/node_modules/{package}/{where[2:]}"
    return imports


def told_by_page(folder: Path, page: str, files: Mapping[str, Path], profile: Path) -> Any:
    """The JSON that a page posts to /found. Its origin has the files of ``folder``, and ``files`` by their paths.
    ``profile``: an empty folder."""
    found: queue.Queue[bytes] = queue.Queue()

    class Files(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/" and self.path not in files:
                return super().do_GET()
            own = page.encode() if self.path == "/" else files[self.path].read_bytes()
            self.send_response(200)
            self.send_header("content-type", "text/html" if self.path == "/" else "image/jpeg")
            self.end_headers()
            self.wfile.write(own)
            return None

        def do_POST(self) -> None:
            found.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Files, directory=str(folder))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    browser = subprocess.Popen(
        [str(CHROMIUM), *_FLAGS.split(), f"--user-data-dir={profile}", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return json.loads(found.get(timeout=120))
    finally:
        os.killpg(browser.pid, signal.SIGKILL)
        browser.wait()
        server.shutdown()
        server.server_close()
