"""Three server processes, and clients that say which of them answered."""

import asyncio
import contextlib
import io
import os
import sys

import numpy as np
from PIL import Image

from kestrel_client import AsyncKestrelClient, KestrelClient
from tests.abuse.process import ServerProcess
from tests.threaded import Threaded

HOST = "127.0.0.1"
if sys.platform == "linux":
    # An address of this process alone: while a server is down, no other test's server can get its port.
    HOST = f"127.1.{os.getpid() // 250 % 250 + 1}.{os.getpid() % 250 + 1}"
GREEDY = {"temperature": 0.0, "max_tokens": 2}


def file(seed):
    pixels = np.random.default_rng(seed).integers(0, 256, (24, 32, 3), np.uint8)
    Image.fromarray(pixels).save(written := io.BytesIO(), "PNG")
    return written.getvalue()


FILES = [file(seed) for seed in range(24)]


class Servers:
    """Three servers. Each has a model of another name, so that a result tells which server made it."""

    def __init__(self, folder, **variables):
        self.folder, self.processes, self._variables = folder, {}, variables
        for name in ("a", "b", "c"):
            (folder / name).mkdir()
            self.start(name, f"{HOST}:0")
        self.addresses = [process.address for process in self.processes.values()]

    def start(self, name, listen):
        variables = {**self._variables, "ABUSE_MODEL": name}
        self.processes[name] = ServerProcess(self.folder / name, listen=listen, **variables)

    async def is_busy(self, name):
        async with AsyncKestrelClient(self.processes[name].address, timeout=60) as client:
            load = await client.server_load()
        return load.running_requests + load.waiting_requests > 0

    def kill(self, name):
        self.processes[name].popen.kill()
        self.processes[name].popen.wait()

    def restart(self, name):
        self.processes[name].__exit__(None, None, None)
        self.start(name, self.processes[name].address)

    def close(self):
        for process in self.processes.values():
            process.__exit__(None, None, None)

    @contextlib.asynccontextmanager
    async def client(self, kind="async", target=None, **options):
        """A client of all servers, or of ``target``."""
        options = {"timeout": 60, **options}
        target = target or self.addresses
        if kind == "sync":
            made = Threaded(KestrelClient(target, **options))
        else:
            made = AsyncKestrelClient(target, **options)
        async with made as client:
            yield client


async def places(client, **options):
    """The server of each file."""
    asked = (client.query(each, "?", **GREEDY, **options) for each in FILES)
    return [result.model for result in await asyncio.gather(*asked)]
