"""``kestrel-grpc``: serves and operates, and runs the commands of ``kestrel`` too."""

from __future__ import annotations

from kestrel_client.commands import program
from kestrel_client.commands.parser import CommandEntry, Program, entries

from .. import __version__

_HERE = entries(
    __package__,
    """
serve
    serve      serve                    serve a model over gRPC
    cluster    cluster.command          serve on a Ray cluster: start, upgrade, list, end
operate
    doctor     operation.doctor         check whether this machine can serve as configured
    download   weights.download         download a model's files before serving
    compile    weights.compile_kernels  compile kernels ahead, on a machine without a GPU
    verify     weights.verify           check a model's files and its answers
    models     weights.models           list a server's models; list or remove downloaded models
    token      operation.token          create a token and its line for the file of --auth-tokens
teach
    train      weights.train            fit an adapter (LoRA) to labelled images
    calibrate  weights.calibrate        fit the scores of a model to labelled images
""",
)
_DEMO = CommandEntry(
    "kestrel_client.commands.demo",
    "serve",
    "serve the bundled model, call its skills, draw the answers",
)
COMMANDS = {**_HERE, "demo": _DEMO, **program.COMMANDS, **_HERE}

_EXAMPLES = """examples:
  kestrel-grpc serve
  kestrel-grpc serve --model moondream2 --device cuda --listen 127.0.0.1:50051 --listen unix:/run/kestrel.sock
  kestrel-grpc query photo.jpg "How many red circles are there?" --stream
  kestrel-grpc detect photo.jpg "red circle" --save boxes.png
  kestrel-grpc caption holiday/ long --save captioned/
  kestrel-grpc chat photo.jpg
  kestrel-grpc analyze photo.jpg --caption short --query "How many people?" --detect person"""

PROGRAM = Program(
    "kestrel-grpc",
    __version__,
    "A typed, streaming gRPC server for Moondream vision-language models.",
    _EXAMPLES,
    COMMANDS,
)
main, whole_parser = PROGRAM.main, PROGRAM.whole_parser
