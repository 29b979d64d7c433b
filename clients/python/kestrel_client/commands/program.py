"""``kestrel``: the program of the commands that need only the SDK."""

from __future__ import annotations

import sys

from ..version import __version__
from .parser import Program, entries

COMMANDS = entries(
    "kestrel_client.commands",
    """
ask
    query       requests.skills         ask a question, about an image or without one
    caption     requests.skills         describe an image
    point       requests.skills         find the centres of objects
    detect      requests.skills         find the bounding boxes of objects
    segment     requests.skills         outline an object
    gaze        requests.skills         find what people look at
    analyze     requests.analyze        run several tasks on an image in one call
    chat        requests.chat           ask questions about one image, as a conversation
    batch       batch.command           run tasks on many images; can continue an interrupted run
    watch       requests.watch          run tasks on the frames of a folder or of a camera's stream
    count       requests.count          count the positions that tasks would take, before they run
    embed       requests.embed          compute embeddings of images, for search and comparison
    run         requests.run_skill      run any skill of the server by its name
    put         requests.stored_images  store an image on the server and print its id
    forget      requests.stored_images  delete a stored image
    mcp         requests.mcp_server     offer a server's skills to agents (Model Context Protocol)
measure
    bench       bench.command           measure a server under load: times, gaps, requests/s
    eval        evaluation.command      measure a model on a data set, or compare two such runs
operate
    models      requests.models         describe the models of a server
    health      operation.health        report whether a server is ready
    admin       operation.admin         manage a running server: drain, cancel, profile and more
    replay      operation.replay        repeat a captured request
    completion  completion              print a script that completes commands and flags in a shell
""",
)

_EXAMPLES = """examples:
  kestrel query photo.jpg "How many red circles are there?" --stream
  kestrel detect photo.jpg "red circle" --save boxes.png
  kestrel caption holiday/ long --save captioned/
  kestrel analyze photo.jpg --caption short --query "How many people?" --detect person --server HOST:50051"""

PROGRAM = Program(
    "kestrel", __version__, "Looks at images with a Kestrel server.", _EXAMPLES, COMMANDS
)
main = PROGRAM.main

if __name__ == "__main__":
    sys.exit(main())
