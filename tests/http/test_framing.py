"""RequestFraming: where a request ends, and what is refused before h11 sees it."""

import h11
import pytest
from hypothesis import strategies as st

from kestrel_grpc.http.port.framing import HEAD_BYTES, HEAD_LINES, RefusedRequest, RequestFraming
from kestrel_grpc.http.port.listener import _Turns
from tests.examples import given_examples

POST = b"POST /v1/query HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


def taken(data: bytes, piece: int = 2**20, accepts=lambda host: host == "a") -> list[bytes]:
    """What h11 gets of ``data``, which arrives in pieces."""
    framing, out = RequestFraming(accepts), []
    for at in range(0, len(data), piece):
        framing.feed(data[at : at + piece])
        while part := framing.take():
            out.append(part)
    return out


def bodies(parts: list[bytes]) -> list[bytes]:
    """The bodies that h11 reads, one request after the other."""
    found = []
    for part in parts:
        if part.startswith((b"POST", b"GET")):
            conn = h11.Connection(h11.SERVER)
            found.append(b"")
        conn.receive_data(part)
        while not isinstance(event := conn.next_event(), type(h11.NEED_DATA)):
            if isinstance(event, h11.Data):
                found[-1] += event.data
            if isinstance(event, h11.EndOfMessage):
                break
    return found


REFUSED = [
    (POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    (POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n", 400),
    (POST + b"content-length: 5\r\nContent-Length: 5\r\n\r\n", 400),
    (POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n", 400),
    (POST + b"content-length: 5, 5\r\n\r\n", 400),
    (POST + b"content-length: +5\r\n\r\n", 400),
    (POST + b"content-length: 0x5\r\n\r\n", 400),
    (POST + b"content-length: 5_0\r\n\r\n", 400),
    (POST + b"content-length:\r\n\r\n", 400),
    (POST + b"content-length: 9999999999999999\r\n\r\n", 400),
    (POST + b"transfer-encoding: gzip, chunked\r\n\r\n", 501),
    (POST + b"transfer-encoding: identity\r\n\r\n", 501),
    (POST + b"transfer-encoding: xchunked\r\n\r\n", 501),
    (POST + b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n", 400),
    (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    (POST + b"host: a\r\n\r\n", 400),
    (POST + b"x: 1\r\n 2\r\n\r\n", 400),
    (POST.replace(b"host", b" host") + b"\r\n", 400),
    (POST + b"x: 1\n\r\n", 400),
    (POST + b"x: 1\n\n", 400),
    (POST + b"x: 1\r2\r\n\r\n", 400),
    (POST + b"x: 1\r\r\n\r\n", 400),
    (POST + b"x: \0\r\n\r\n", 400),
    (POST + b"x\x0b: 1\r\n\r\n", 400),
    (POST + b"x: \x7f\r\n\r\n", 400),
    (b"GET / HTTP/9.9\r\nhost: a\r\n\r\n", 505),
    (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", 505),
    (b"GET / HTTP/1.2\r\nhost: a\r\n\r\n", 505),
    (b"GET / HTTP/0.9\r\n\r\n", 505),
    (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    (b"GET /\r\n\r\n", 400),
    (b"GET / http/1.1\r\nhost: a\r\n\r\n", 400),
    (b"GET  / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    (b"\r\nGET / HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    (b"CONNECT a:80 HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    (b"GET http://a/ HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    (b"OPTIONS * HTTP/1.1\r\nhost: a\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nhost: b\r\n\r\n", 421),
    (POST + b"a:b\r\n" * HEAD_LINES + b"\r\n", 431),
    (POST + b"x: " + b"y" * HEAD_BYTES, 431),
    (b"GET /" + b"%ff" * 3000 + b" HTTP/1.1\r\nhost: a\r\n\r\n", 414),
    (b"GET / HTTP/1.1\nhost: a\n" + b"a:b\n" * 15_900 + b"\n", 400),
    (CHUNKED + b"5;x\n\r\nabcde\r\n", 400),
    (CHUNKED + b"5\nabcde\r\n", 400),
    (CHUNKED + b"-5\r\nabcde\r\n", 400),
    (CHUNKED + b"0x5\r\nabcde\r\n", 400),
    (CHUNKED + b" 5\r\nabcde\r\n", 400),
    (CHUNKED + b"\r\n", 400),
    (CHUNKED + b"5;\0\r\nabcde\r\n", 400),
    (CHUNKED + b"5\r\nabcdefg\r\n", 400),
    (CHUNKED + b"5\r\nabcde\n0\r\n\r\n", 400),
    (CHUNKED + b"fffffffffffff\r\n", 400),
    (CHUNKED + b"5;" + b"x" * 300, 400),
    (CHUNKED + b"1\r\nx\r\n" * 3000, 400),
    (CHUNKED + b"0\r\n" + b"a:b\r\n" * 2000, 400),
    (CHUNKED + b"0\r\na: b\n\r\n\r\n", 400),
    (CHUNKED + b"0\r\na: b\r\n c\r\n\r\n", 400),
    (CHUNKED + b"0\r\na: b\r\r\n\r\n", 400),
]


@pytest.mark.parametrize("data, status", REFUSED)
def test_what_is_not_exact_is_refused_however_it_arrives(data, status):
    for piece in (2**20, 7, 1):
        if len(data) > 20_000 and piece == 1:
            continue
        with pytest.raises(RefusedRequest) as refused:
            taken(data, piece)
        assert refused.value.status == status


@given_examples(
    50,
    1000,
    requests=st.lists(st.tuples(st.binary(max_size=300), st.integers(0, 40)), max_size=4),
    piece=st.integers(1, 900),
)
def test_requests_in_a_row_arrive_whole(requests, piece):
    """``requests``: bodies with the size of their chunks, 0 for a declared length."""
    data, expected = b"", []
    for body, size in requests:
        expected.append(body)
        if not size:
            data += POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
            continue
        chunks = (body[at : at + size] for at in range(0, len(body), size))
        framed = b"".join(b"%X ; a=b\r\n%b\r\n" % (len(each), each) for each in chunks)
        data += CHUNKED + framed + b"0;x\r\nx-sum: 1\r\n\r\n"
    parts = taken(data, piece)
    assert bodies(parts) == expected
    assert b"x-sum" not in b"".join(parts) and b"a=b" not in b"".join(parts)


def test_tiny_chunks_that_arrive_together_reach_h11_as_one():
    head, chunk = taken(CHUNKED + b"1\r\nx\r\n" * 1900 + b"0\r\n\r\n")
    assert chunk == b"76c\r\n" + b"x" * 1900 + b"\r\n0\r\n\r\n" and head == CHUNKED


def test_heads_take_turns():
    now = 100.0
    turns = _Turns(lambda: now)
    for longer in (POST + b"a:b\r\n" * 90, POST + b"x" * 20_000):
        now += 100.0
        at = [turns.next_at(POST) for _ in range(200)]
        assert at[50] == now < at[-1] and at == sorted(at), "a burst at once, the others in turn"
        after = [turns.next_at(head) for head in (longer, POST, POST)]
        assert after[1] - after[0] > after[2] - after[1] > 0, "longer after a longer head"
