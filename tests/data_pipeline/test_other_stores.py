"""Google Cloud Storage (an emulator), Multi-Storage-Client (a folder), a stand-in: what S3's tests show, in short."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from data_pipeline.corpora import write_corpus

from moe_trainer.data import object_storage
from moe_trainer.data.indexed import open_token_file
from moe_trainer.data.object_storage import ObjectStore, list_objects
from moe_trainer.errors import UserError

LENGTHS = np.random.default_rng(5).integers(1, 3000, size=60)
BLOCK = 1 << 14


@contextmanager
def google(_folder, monkeypatch):
    """Yield a function that uploads, and the prefix of names in the bucket."""
    server = pytest.importorskip("gcp_storage_emulator.server", reason="needs gcp-storage-emulator and gcsfs")
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # asks by gRPC, which the emulator has not
    gcsfs = pytest.importorskip("gcsfs", reason="needs gcp-storage-emulator and gcsfs")
    started = server.create_server("127.0.0.1", 0, in_memory=True, default_bucket="bucket")
    started.start()
    try:
        address = f"http://127.0.0.1:{started._api._httpd.server_address[1]}"
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        gcsfs.GCSFileSystem.clear_instance_cache()
        files = gcsfs.GCSFileSystem(token="anon", endpoint_url=address, use_listings_cache=False)
        yield lambda name, data: files.pipe_file(f"bucket/{name}", data), "gs://bucket"
    finally:
        started.stop()


@contextmanager
def multi_storage(folder, monkeypatch):
    pytest.importorskip("multistorageclient", reason="needs multi-storage-client")
    profile = {"storage_provider": {"type": "file", "options": {"base_path": str(folder)}}}
    (folder / "msc.json").write_text(json.dumps({"profiles": {"store": profile}}))
    monkeypatch.setenv("MSC_CONFIG", str(folder / "msc.json"))

    def upload(name, data):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(data)

    yield upload, "msc://store"


def test_blocks_of_a_replaced_object_of_the_same_size_are_not_read(tmp_path, monkeypatch):
    def make_object(url):
        return SimpleNamespace(size=4, version=content.decode(), read=lambda begin, end: content[begin:end])

    monkeypatch.setattr(object_storage, "_Object", make_object)
    store = ObjectStore(str(tmp_path), 1 << 20)
    for content in (b"old.", b"new."):
        for _ in range(2):
            assert store.open("s3://bucket/a.bin").read(0, 4) == content


@pytest.mark.parametrize("store", [google, multi_storage])
def test_a_store_has_the_documents_of_local_files_and_replaced_objects_are_errors(store, tmp_path, monkeypatch):
    monkeypatch.setattr(object_storage, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(object_storage, "_FIRST_PAUSE_S", 0.01)
    local = write_corpus(tmp_path / "a", LENGTHS)
    (tmp_path / "objects").mkdir()
    with store(tmp_path / "objects", monkeypatch) as (upload, root):
        for ending in ("idx", "bin"):
            with open(f"{local}.{ending}", "rb") as file:
                upload(f"c/a.{ending}", file.read())
        assert list_objects(f"{root}/c/*.bin") == [f"{root}/c/a.bin"]
        cache = ObjectStore(str(tmp_path / "cache"), 1 << 30)
        remote, expected = open_token_file(f"{root}/c/a", store=cache), open_token_file(local)
        for index in range(len(LENGTHS) // 2):
            np.testing.assert_array_equal(remote[index], expected[index])
        with pytest.raises(UserError, match=f"{root}/c/none.idx: no such object"):
            open_token_file(f"{root}/c/none", store=cache)
        with open(f"{local}.bin", "rb") as file:
            upload("c/a.bin", file.read()[::-1])
        with pytest.raises(UserError, match="c/a.bin: the object was replaced while it is in use"):
            remote[len(LENGTHS) - 1]
