"""Image.background through the service: per request, for encoded, raw and stored images, in Analyze and the CLI."""

import io

import grpc
import numpy as np
import pytest
from PIL import Image

from kestrel_client import AsyncKestrelClient, CaptionTask, InvalidArgumentError
from tests.client.commands.test_stored_images import kestrel as kestrel
from tests.engine.inside import inside


def logo():
    """Transparent but for a dot; its hidden colour is black."""
    image = Image.new("RGBA", (60, 40))
    image.putpixel((30, 20), (255, 0, 0, 255))
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


async def test_a_background_holds_for_one_request(serve, monkeypatch):
    served = await serve()
    shown = []
    prepare = inside(served.engine).submitter.images.pool.prepare

    async def spy(source, *args, **options):
        done = await prepare(source, *args, **options)
        shown.append(done.image.crops[0].reshape(-1, 3)[0].tolist())
        return done

    monkeypatch.setattr(inside(served.engine).submitter.images.pool, "prepare", spy)
    white, options = "#ffffff", {"max_tokens": 2}
    async with AsyncKestrelClient(served.server.addresses[0]) as client:
        plain = await client.caption(logo(), **options)
        await client.caption(logo(), background=white, **options)
        await client.caption(
            np.asarray(Image.open(io.BytesIO(logo()))), background=white, **options
        )
        handle = await client.put_image(logo())
        await client.caption(handle, background="#00Ff00", **options)
        await client.analyze(handle, [CaptionTask(max_tokens=2)], background=white)
        await client.caption(handle, **options)
        assert handle.image_id == plain.image_id
        with pytest.raises(InvalidArgumentError) as refused:
            await client.caption(logo(), background="white")
        assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "#ffffff" in str(refused.value) and "image.background" in str(refused.value)
    black, white_pixel, green = [0, 0, 0], [255] * 3, [0, 255, 0]
    assert [each for each in shown if each != black] == [
        white_pixel,
        white_pixel,
        green,
        white_pixel,
    ]
    assert shown[0] == shown[-1] == black


async def test_the_command_line_takes_names_and_digits(kestrel, tmp_path):
    file = tmp_path / "logo.png"
    file.write_bytes(logo())
    for colour in ("white", "FFeedd"):
        status, _, errors = await kestrel(
            "caption", file, "--background", colour, "--max-tokens", 2
        )
        assert status == 0, errors
    status, _, errors = await kestrel("caption", file, "--background", "whitish")
    assert status == 2 and "must be white, black or RRGGBB" in errors
