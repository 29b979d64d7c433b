"""Three server processes for tests in another language, which kill and restart them over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.abuse.processes.three_servers import FILES, Servers, places


class CommandedServers:
    """A context. ``url``: POST /kill/NAME, /stop/NAME (SIGTERM), /await/NAME (its end) and /restart/NAME; POST /list
    writes the names in its body, a word each, to the file ``directory``. GET /images/N, GET /places (the server of each
    image, as the Python client chooses it) and GET /directory (the same list, as a cluster serves it)."""

    def __init__(self, folder: Path) -> None:
        self.servers = Servers(folder)
        self.directory = folder / "directory"
        self._listed: list[str] = []
        commands = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(lambda: commands.tell(self.path[1:]))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
                self.answer(lambda: commands.do(self.path[1:], body))

            def answer(self, work) -> None:
                try:
                    status, content = 200, work()
                except Exception as error:
                    status, content = 500, repr(error).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,))
        self._thread.start()

    def tell(self, what: str) -> bytes:
        if what.startswith("images/"):
            return FILES[int(what.removeprefix("images/"))]
        if what == "directory":
            addresses = [self.servers.processes[name].address for name in self._listed]
            return json.dumps({"servers": [{"address": each} for each in addresses]}).encode()
        assert what == "places", what
        return json.dumps(asyncio.run(self._places())).encode()

    async def _places(self) -> list[str]:
        async with self.servers.client() as client:
            return await places(client)

    def do(self, command: str, body: str) -> bytes:
        action, _, name = command.partition("/")
        if action == "list":
            self._listed = body.split()
            new = self.directory.with_suffix(".new")
            addresses = [self.servers.processes[each].address for each in self._listed]
            new.write_text("".join(f"{each}\n" for each in addresses))
            os.replace(new, self.directory)
        elif action == "kill":
            self.servers.kill(name)
        elif action == "stop":
            self.servers.processes[name].popen.send_signal(signal.SIGTERM)
        elif action == "await":
            self.servers.processes[name].popen.wait(60)
        else:
            assert action == "restart", action
            self.servers.restart(name)
        return b""

    def __enter__(self) -> CommandedServers:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()
        self.servers.close()
