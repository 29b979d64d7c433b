"""``kestrel-grpc``: serves and operates, and runs the commands of ``kestrel`` too."""

from __future__ import annotations

from kestrel_client.commands import program
from kestrel_client.commands.parser import Program

from .. import __version__

_SERVING = {
    "serve": ("serve", "serve a model over gRPC"),
    "cluster": (
        "cluster.command",
        "serve on the nodes of a Ray cluster: start, upgrade, list, end",
    ),
    "bridge": (
        "bridge.command",
        "answer a tool that labels images, such as Label Studio, with a server's results",
    ),
    "models": ("weights.models", "list the model of a server; list or remove downloaded models"),
    "doctor": ("operation.doctor", "check whether this machine can serve as configured"),
    "download": ("weights.download", "download a model's files before serving"),
    "compile": (
        "weights.compile_kernels",
        "compile the kernels of models ahead, on a machine without a GPU",
    ),
    "verify": ("weights.verify", "check a model's files and its answers"),
    "calibrate": ("weights.calibrate", "fit the scores of a model to labelled images"),
    "train": ("weights.train", "fit an adapter (LoRA) to labelled images"),
    "token": ("operation.token", "create a token and its line for the file of --auth-tokens"),
    "schedule": ("schedule", "run prompts with an engine in this process, without a server"),
    "replay": (
        "operation.replay",
        "repeat a captured request, with a server or in this process",
    ),
    "demo": ("demo", "serve the bundled model, call every method, and draw the answers"),
}
_HERE = {name: (f"{__package__}.{at}", summary) for name, (at, summary) in _SERVING.items()}
COMMANDS = _HERE | program.COMMANDS | _HERE
"""The module and the line of help of each command."""

_EXAMPLES = """examples:
  kestrel-grpc serve
  kestrel-grpc serve --model moondream2 --device cuda --listen 127.0.0.1:50051 --listen unix:/run/kestrel.sock
  kestrel-grpc query photo.jpg "How many red circles are there?" --stream
  kestrel-grpc detect photo.jpg "red circle" --save boxes.png
  kestrel-grpc caption holiday/ long --save captioned/
  kestrel-grpc chat photo.jpg
  kestrel-grpc analyze photo.jpg --caption short --query "How many people?" --detect person
  kestrel-grpc schedule "How many squares?" "What is left of the star?" --image photo.jpg

'kestrel-grpc COMMAND --help' shows the help of a command."""

PROGRAM = Program(
    "kestrel-grpc",
    __version__,
    "A typed, streaming gRPC server for Moondream vision-language models.",
    _EXAMPLES,
    COMMANDS,
)
main, whole_parser = PROGRAM.main, PROGRAM.whole_parser
