"""Bodies that are too large, of the wrong kind, or made to break a parser: 4xx, and nothing in vain."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import socket
import time
from collections.abc import Iterator

import httpx2
import pytest
from fake_memory import FakeMemory
from live_server import LiveServer

JSON = {"Content-Type": "application/json"}
PATH = "/v1/collections/c/documents"


@pytest.fixture(autouse=True)
def _collection(fake_http: httpx2.Client) -> None:
    fake_http.put("/v1/collections/c", json={})


def text_of(length: int) -> bytes:
    """A JSON body of exactly `length` bytes."""
    frame = b'{"text":""}'
    return b'{"text":"' + b"a" * (length - len(frame)) + b'"}'


class TestSize:
    def test_at_the_limit(self, fake_http: httpx2.Client) -> None:
        assert fake_http.post(PATH, content=text_of(100_000), headers=JSON).status_code == 200

    def test_past_it(self, fake_http: httpx2.Client, fake: FakeMemory) -> None:
        refused = fake_http.post(PATH, content=text_of(100_001), headers=JSON)
        assert (refused.status_code, refused.json()["code"]) == (413, "payload_too_large")
        assert "100,000" in refused.json()["detail"]
        assert "ingest" not in fake.calls

    def test_past_it_without_a_length(self, fake_http: httpx2.Client, fake: FakeMemory) -> None:
        sent = 0

        def chunks() -> Iterator[bytes]:
            nonlocal sent
            for _ in range(50):
                sent += 10_000
                yield b"a" * 10_000

        refused = fake_http.post(PATH, content=chunks(), headers=JSON)
        assert refused.status_code == 413
        assert "ingest" not in fake.calls

    def test_a_form_past_it(self, fake_http: httpx2.Client) -> None:
        refused = fake_http.post(PATH, files=[("file", ("a.txt", b"a" * 100_000))])
        assert refused.status_code == 413

    def test_refused_by_its_length_before_it_comes(self, server: LiveServer) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f"{head}Content-Length: 99999999999999999999\r\n\r\n".encode())
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")

    @pytest.mark.parametrize("connection", ["close", "keep-alive"])
    @pytest.mark.parametrize("size", [200_000, 30_000_000])
    def test_a_client_that_sends_all_before_it_reads(
        self, server: LiveServer, connection: str, size: int
    ) -> None:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)) as client:
            client.request("POST", PATH, b"a" * size, {**JSON, "Connection": connection})
            answer = client.getresponse()
            assert (answer.status, json.loads(answer.read())["code"]) == (413, "payload_too_large")

    @pytest.mark.parametrize("kind", ["application/json", "text/plain"])
    @pytest.mark.parametrize("version", ["1.0", "1.1"])
    def test_a_socket_that_sends_all_before_it_reads(
        self, server: LiveServer, version: str, kind: str
    ) -> None:
        size = 30_000_000
        head = f"POST {PATH} HTTP/{version}\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(f"{head}Connection: close\r\nContent-Length: {size}\r\n\r\n".encode())
            sock.sendall(b"a" * size)
            time.sleep(0.2)
            received = b"".join(iter(lambda: sock.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 413")
        assert received.endswith(b"}")

    def test_a_refused_form_whose_rest_nobody_reads(self, server: LiveServer) -> None:
        size = 90_000
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=20) as sock:
            sock.sendall(f"{head}Connection: close\r\nContent-Length: {size}\r\n\r\n".encode())
            time.sleep(0.2)
            sock.sendall(b"a" * size)
            received = b"".join(iter(lambda: sock.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 415")

    def test_one_that_waits_for_leave_to_send_is_not_waited_for(self, server: LiveServer) -> None:
        head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as sock:
            sock.sendall(
                f"{head}Connection: close\r\nExpect: 100-continue\r\nContent-Length: 200000\r\n\r\n".encode()
            )
            received = b"".join(iter(lambda: sock.recv(65536), b""))
        assert received.startswith(b"HTTP/1.1 413")

    def test_a_body_that_ends_early(self, server: LiveServer, fake: FakeMemory) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            sock.sendall(f'{head}Content-Length: 50\r\n\r\n{{"text":'.encode())
        assert httpx2.get(f"{server.url}/healthz").status_code == 200
        assert "ingest" not in fake.calls


class TestKind:
    def test_compressed(self, fake_http: httpx2.Client) -> None:
        headers = {**JSON, "Content-Encoding": "gzip"}
        refused = fake_http.post(PATH, content=gzip.compress(b'{"text":"a"}'), headers=headers)
        assert (refused.status_code, refused.json()["code"]) == (415, "unsupported_media_type")

    @pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "x"])
    @pytest.mark.parametrize("path", [PATH, "/v1/search", "/v1/collections"])
    def test_not_json(self, fake_http: httpx2.Client, path: str, kind: str) -> None:
        refused = fake_http.post(path, content=b'{"text":"a"}', headers={"Content-Type": kind})
        assert refused.status_code == 415
        assert refused.json()["hint"]

    def test_json_of_a_vendor(self, fake_http: httpx2.Client) -> None:
        headers = {"Content-Type": "application/vnd.memkv+json; charset=utf-8"}
        assert fake_http.post(PATH, content=b'{"text":"a"}', headers=headers).status_code == 200

    def test_not_http(self, server: LiveServer) -> None:
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(b"\x16\x03\x01 this is no HTTP\r\n\r\n")
            answer = sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 400")
        assert b"application/problem+json" in answer


DEEP = b'{"query":"q","collection":"c","filter":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}"
BROKEN = {
    "empty": b"",
    "not JSON": b"text",
    "cut": b'{"query":"q"',
    "two values": b'{"query":"q","collection":"c"} {}',
    "NaN": b'{"query":"q","collection":"c","min_score":NaN}',
    "infinite": b'{"query":"q","collection":"c","min_score":1e999}',
    "deep": DEEP,
    "deep, unclosed": b"[" * 90_000,
    "65 levels": b'{"query":"q","collection":"c","filter":' + b'{"a":' * 65 + b"1" + b"}" * 65 + b"}",
    "2^53 + 1": b'{"query":"q","collection":"c","filter":{"a":9007199254740993}}',
    "2^63": b'{"query":"q","collection":"c","filter":{"a":9223372036854775808}}',
    "2^63 as a count": b'{"query":"q","collection":"c","top_k":9223372036854775808}',
    "long integer": b'{"query":"q","collection":"c","top_k":' + b"9" * 5000 + b"}",
    "NUL": b'{"query":"a\\u0000b","collection":"c"}',
    "NUL in a key": b'{"query":"q","collection":"c","filter":{"a\\u0000":1}}',
    "lone surrogate": b'{"query":"\\ud800","collection":"c"}',
    "encoded surrogate": b'{"query":"\xed\xa0\x80","collection":"c"}',
    "not UTF-8": b'{"query":"\xff","collection":"c"}',
    "BOM": b'\xef\xbb\xbf{"query":"q","collection":"c"}',
    "UTF-16": '{"query":"q","collection":"c"}'.encode("utf-16"),
    "wrong type": b'{"query":5,"collection":"c"}',
    "text for a number": b'{"query":"q","collection":"c","top_k":"3"}',
    "unknown field": b'{"query":"q","collection":"c","topk":3}',
    "array": b"[]",
    "null": b"null",
}


@pytest.mark.parametrize("route", ["/v1/search", "/v1/query"])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_json(fake_http: httpx2.Client, route: str, name: str) -> None:
    refused = fake_http.post(route, content=BROKEN[name], headers=JSON)
    assert refused.status_code == 400, refused.text
    found = refused.json()
    assert found["code"] == "bad_request"
    assert found["errors"][0]["message"]
    assert len(refused.content) < 2000  # does not echo what was sent


def test_what_stands_just_inside(fake_http: httpx2.Client) -> None:
    body = b'{"query":"q","collection":"c","filter":' + b'{"a":' * 60 + b"9007199254740992" + b"}" * 60 + b"}"
    assert fake_http.post("/v1/search", content=body, headers=JSON).status_code == 200


@pytest.mark.parametrize(
    "metadata", [{"a": [1]}, {"a": {}}, {"a": 2**53 + 1}, {"a": "\0"}, {"\0": 1}, ["a"], "a", 5]
)
def test_metadata_is_flat(fake_http: httpx2.Client, metadata: object) -> None:
    assert fake_http.post(PATH, json={"text": "t", "metadata": metadata}).status_code == 400
    form = {"metadata": json.dumps(metadata)}
    assert fake_http.post(PATH, files=[("file", ("a.txt", b"t"))], data=form).status_code == 400


def form_of(*parts: tuple[str, bytes]) -> bytes:
    """A multipart body with boundary `b` of (headers after `form-data`, content)."""
    body = b"".join(
        b"--b\r\nContent-Disposition: form-data" + head.encode("latin-1") + b"\r\n\r\n" + content + b"\r\n"
        for head, content in parts
    )
    return body + b"--b--\r\n"


FORM = {"Content-Type": "multipart/form-data; boundary=b"}
FORMS = {
    "no file": form_of(('; name="title"', b"t")),
    "nothing": b"--b--\r\n",
    "empty": b"",
    "unknown field": form_of(('; name="file"; filename="a.txt"', b"t"), ('; name="extra"', b"t")),
    "file without a name": form_of(('; name="file"', b"t")),
    "metadata is a file": form_of(
        ('; name="file"; filename="a.txt"', b"t"), ('; name="metadata"; filename="m"', b"{}")
    ),
    "one title, two files": form_of(
        ('; name="file"; filename="a.txt"', b"t"),
        ('; name="file"; filename="b.txt"', b"t"),
        ('; name="title"', b"t"),
    ),
    "field is not UTF-8": form_of(('; name="file"; filename="a.txt"', b"t"), ('; name="title"', b"\xff")),
    "unknown charset": form_of(
        ('; name="file"; filename="a.txt"', b"t"),
        ('; name="title"\r\nContent-Type: text/plain; charset=klingon', b"t"),
    ),
    "NUL in a title": form_of(('; name="file"; filename="a.txt"', b"t"), ('; name="title"', b"a\0b")),
    "long title": form_of(('; name="file"; filename="a.txt"', b"t"), ('; name="title"', b"a" * 513)),
    "cut": form_of(('; name="file"; filename="a.txt"', b"t"))[:-20],
    "field without a name": form_of(("", b"t")),
    "too many parts": form_of(*[('; name="title"', b"")] * 1100),
}


@pytest.mark.parametrize("name", FORMS)
def test_broken_forms(fake_http: httpx2.Client, fake: FakeMemory, name: str) -> None:
    refused = fake_http.post(PATH, content=FORMS[name], headers=FORM)
    assert refused.status_code == 400, refused.text
    assert "ingest" not in fake.calls


@pytest.mark.parametrize(
    "kind",
    ["multipart/form-data", "multipart/form-data; boundary=", "multipart/form-data; boundary=" + "b" * 300],
)
def test_forms_without_a_usable_boundary(fake_http: httpx2.Client, kind: str) -> None:
    assert fake_http.post(PATH, content=FORMS["no file"], headers={"Content-Type": kind}).status_code == 400


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("../../etc/passwd.txt", "passwd.txt"),
        ("C:\\dir\\a.txt", "a.txt"),
        ("a.txt", "a.txt"),
        ("ü 1.md", "ü 1.md"),
    ],
)
def test_a_file_name_is_never_a_path(fake_http: httpx2.Client, sent: str, kept: str) -> None:
    accepted = fake_http.post(PATH, files=[("file", (sent, b"text"))])
    assert accepted.json()["documents"][0]["external_id"] == kept


@pytest.mark.parametrize("key", ["..", ".", "a/../b", "a//b", "/a/", "a b", "ü", "a?b#c", "%", "a" * 512])
def test_any_key_names_its_document(fake_http: httpx2.Client, key: str) -> None:
    quoted = "".join(f"%{byte:02X}" for byte in key.encode())
    assert fake_http.put(f"{PATH}/{quoted}", json={"text": "t"}).status_code == 200
    assert fake_http.get(f"{PATH}/{quoted}").json()["external_id"] == key
    assert fake_http.delete(f"{PATH}/{quoted}").status_code == 204


@pytest.mark.parametrize("raw", ["%00", "a%FFb", "%ED%A0%80", "a" * 513])
def test_keys_that_name_nothing(fake_http: httpx2.Client, raw: str) -> None:
    assert fake_http.get(f"{PATH}/{raw}").status_code == 400
