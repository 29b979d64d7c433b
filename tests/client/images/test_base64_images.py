"""The forms of base64 that every interface reads: those of WHATWG's Infra standard, and the alphabet for URLs."""

import base64

import pytest

from clients.tools.label_studio_kestrel.images import TaskImages
from kestrel_client.commands.requests.mcp_server import _source
from kestrel_client.images.base64_images import decoded_image

DATA = bytes(range(256)) + b"\xfb"
TEXT = base64.b64encode(DATA).decode()
FORMS = {
    "plain": TEXT,
    "no padding": TEXT.rstrip("="),
    "lines of 76": base64.encodebytes(DATA).decode(),
    "lines of a mail": base64.encodebytes(DATA).decode().replace("\n", "\r\n"),
    "for URLs": base64.urlsafe_b64encode(DATA).decode(),
    "for URLs, no padding": base64.urlsafe_b64encode(DATA).decode().rstrip("="),
    "blanks around": f" \t\f{TEXT}\n",
    "bits left over": TEXT.rstrip("=")[:-1] + chr(ord(TEXT.rstrip("=")[-1]) + 1),
}
URLS = {
    "plain": "data:image/jpeg;base64,",
    "upper case": "DATA:image/jpeg;BASE64,",
    "a blank": "data:image/jpeg; base64,",
    "parameters": "data:image/jpeg;name=a.jpg;charset=utf-8;base64,",
    "no type": "data:;base64,",
    "blanks around": "\n data:image/jpeg;base64 ,",
}
WRONG = ["A", "A===", "QQ=", "QQ==QQ==", "Q=Q=", "====", "QUI*", "QUI\xa0", "QUJé", "data:,QUI", "data:image/png,QUI",
         "data:image/jpeg;base65,QUI", "data:" + "x" * 2000 + ";base64,QUI"]  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_base64(form: str):
    assert decoded_image(form) == DATA


@pytest.mark.parametrize("head", URLS.values(), ids=URLS)
async def test_data_urls_here_and_for_agents_and_label_studio(head: str):
    tasks = TaskImages((), None, None)
    for form in FORMS.values():
        assert decoded_image(head + form) == DATA
        assert _source(head + form, None) == DATA
        assert await tasks.read(head + form, "image") == DATA


def test_a_data_url_may_be_escaped():
    assert decoded_image("data:image/jpeg;base64,QU%49%3D%0A") == b"AB"


@pytest.mark.parametrize("text", WRONG)
def test_other_texts_are_refused(text: str):
    with pytest.raises(ValueError, match="base64"):
        decoded_image(text)
