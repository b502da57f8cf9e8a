"""A real S3 server (moto's) behind a proxy that disturbs connections, for tests of data in object storage."""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress

import pytest


class Proxy:
    """Forwards TCP connections. Each of the next `cuts` answers ends after `cut_after` bytes; each chunk of `chunk` bytes waits for `delay_s`."""

    def __init__(self, port: int):
        self._target = port
        self.cuts, self.cut_after, self.delay_s, self.chunk = 0, 0, 0.0, 1 << 14
        self.calls: dict[int, Callable[[], None]] = {}  # by the number of the chunk of answers before which they come
        self.num_chunks = 0
        self._lock = threading.Lock()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            server = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._forward, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._forward, args=(server, client, True), daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        sent = 0
        with suppress(OSError):
            while data := source.recv(self.chunk):
                if is_answer:
                    with self._lock:
                        self.num_chunks += 1
                        self.calls.pop(self.num_chunks, bool)()
                    time.sleep(self.delay_s)
                if is_answer and self.cuts and sent + len(data) > self.cut_after:
                    with self._lock:
                        self.cuts -= 1
                    target.sendall(data[: max(self.cut_after - sent, 0)])
                    break
                target.sendall(data)
                sent += len(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


class Bucket:
    """An empty bucket, and the proxy in front of its server."""

    def __init__(self, client, name: str, proxy: Proxy):
        self._client, self.name, self.proxy = client, name, proxy
        client.create_bucket(Bucket=name)

    def upload(self, prefix: str, key: str) -> str:
        """Upload a pair of token files; returns their prefix."""
        for ending in ("idx", "bin"):
            with open(f"{prefix}.{ending}", "rb") as file:
                self.put(f"{key}.{ending}", file.read())
        return f"s3://{self.name}/{key}"

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=data)


@contextmanager
def s3_server():
    """Yield (client, proxy) of a running server; the environment names the proxy."""
    server = pytest.importorskip("moto.server", reason="needs moto[server]").ThreadedMotoServer(port=0, verbose=False)
    pytest.importorskip("s3fs", reason="needs s3fs").S3FileSystem.clear_instance_cache()  # of an earlier server
    import boto3

    variables = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1"}
    server.start()
    _, port = server.get_host_and_port()
    proxy = Proxy(port)
    before = dict(os.environ)
    os.environ.update(variables, AWS_ENDPOINT_URL=f"http://127.0.0.1:{proxy.port}")
    try:
        yield boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}"), proxy
    finally:
        server.stop()
        os.environ.clear()
        os.environ.update(before)
