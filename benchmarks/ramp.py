"""Raises the load of a server until it is overloaded: ``kestrel-grpc bench`` with a server of its own.

python -m benchmarks.ramp --max-concurrency 64 --report out/ramp.html -- --model kestrel-tiny --threads 2
python -m benchmarks.ramp --rate 1 --max-rate 64 --server 127.0.0.1:50051

The flags before ``--`` are those of ``kestrel-grpc bench``, those after it are those of ``kestrel-grpc serve``. With
--server, no server is started.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kestrel_grpc.cli import program

from .traffic.processes import serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status of ``bench``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    divider = given.index("--") if "--" in given else len(given)
    of_bench, of_server = given[:divider], given[divider + 1 :]
    if set(of_bench) & {"-h", "--help"}:
        print(__doc__)
    if set(of_bench) & {"-h", "--help", "--compare"} or any(
        flag.partition("=")[0] == "--server" for flag in of_bench
    ):
        if of_server:
            print("benchmarks.ramp: the flags after -- are for a server that is started here")
            return 2
        return program.main(["bench", *of_bench])
    with serve(["--log-level", "warning", *of_server]) as server:
        print(server.ready_line.strip(), flush=True)
        return program.main(["bench", *of_bench, "--server", server.address])


if __name__ == "__main__":
    sys.exit(main())
