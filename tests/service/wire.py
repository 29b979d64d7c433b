"""A wire between a client and a server, which a test can cut and watch."""

import asyncio

PING = b"\0\0\x08\x06\0" + bytes(4)
"""The head of HTTP/2's frame that asks for a sign of life."""


class Wire:
    """A TCP proxy that can be cut: from then on nothing comes through, and nobody is told. Counts the pings of
    either side."""

    def __init__(self, address):
        self._to, self._cut = address, asyncio.Event()
        self._copies, self._ends = set(), []
        self.client_pings = self.server_pings = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *exc_info):
        self._server.close()
        for task in self._copies:
            task.cancel()
        for writer in self._ends:
            writer.close()
        await asyncio.gather(*self._copies, return_exceptions=True)

    def cut(self):
        self._cut.set()

    async def _accept(self, reader, writer):
        host, port = self._to.split(":")
        there = await asyncio.open_connection(host, int(port))
        self._ends += [writer, there[1]]
        for pair in ((reader, there[1]), (there[0], writer)):
            self._copies.add(asyncio.ensure_future(self._copy(*pair, pair[1] is writer)))

    async def _copy(self, reader, writer, is_from_server):
        while data := await reader.read(65536):
            if is_from_server:
                self.server_pings += data.count(PING)
            else:
                self.client_pings += data.count(PING)
            if not self._cut.is_set():
                writer.write(data)
