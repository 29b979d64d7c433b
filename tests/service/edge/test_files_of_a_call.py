"""How many files one must read to follow a call: those whose functions run between its arrival and the engine."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, FunctionType

import kestrel_grpc
from kestrel_client._pb.kestrel.v1 import vision_service_pb2 as pb
from kestrel_engine import InferenceEngine
from tests.service.conftest import Serve, raw_image

SERVER = Path(kestrel_grpc.__file__).parent
MOST_FILES, MOST_LINES = 18, 400


@contextmanager
def files_of_new_tasks(until: FunctionType) -> Iterator[dict[str, None]]:
    """Notes the server's files whose functions run in tasks that begin in the block, until ``until`` is called."""
    before, found = asyncio.all_tasks(), dict[str, None]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if code is until.__code__:
            sys.setprofile(None)
        elif event == "call" and code.co_name != "<module>":
            file = code.co_filename
            if file.startswith(f"{SERVER}/") and asyncio.current_task() not in {None, *before}:
                found.setdefault(str(Path(file).relative_to(SERVER)))

    sys.setprofile(note)
    try:
        yield found
        assert sys.getprofile() is None, "the call did not reach the engine"
    finally:
        sys.setprofile(None)


async def test_few_files_see_a_streamed_query_before_the_engine(serve: Serve) -> None:
    served = await serve()
    query = pb.QueryTask(question="what?", max_tokens=3)
    request = pb.QueryRequest(images=[raw_image()], query=query)
    with files_of_new_tasks(InferenceEngine.start) as files:
        events = [event async for event in served.vision.StreamQuery(request)]
    assert events[-1].HasField("final")
    assert "services/vision.py" in files and len(files) <= MOST_FILES, files
    long = {each: len((SERVER / each).read_text().splitlines()) for each in files}
    assert max(long.values()) <= MOST_LINES, long
