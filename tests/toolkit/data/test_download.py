"""Downloading a BEIR archive, from a server on this machine: checked, unpacked safely, and nothing left when it fails."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import http.server
import io
import sys
import threading
import zipfile
from types import SimpleNamespace

import pytest

from maxsim_eval.data.beir_download import by_hand, fetch
from maxsim_eval.data.cards import load_card
from maxsim_eval.data.loading import load_task
from maxsim_eval.errors import DataError

FILES = {
    "scifact/corpus.jsonl": '{"_id": "d1", "text": "x"}\n',
    "scifact/queries.jsonl": '{"_id": "q1", "text": "x"}\n',
    "scifact/qrels/test.tsv": "query-id\tcorpus-id\tscore\nq1\td1\t1\n",
}


def archive(files) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as opened:
        for name, text in files.items():
            opened.writestr(name, text)
    return buffer.getvalue()


@pytest.fixture
def serve(monkeypatch):
    """`serve(content)` -> a card of SciFact whose URL is a local server with that content (None: 404) and whose md5 fits."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    servers = []

    def start(content: bytes | None, announced: int | None = None, **changes):
        class Handler(http.server.BaseHTTPRequestHandler):
            def reply(self):
                self.send_response(404 if content is None else 200)
                self.send_header("Content-Length", str(announced or len(content or b"")))
                self.end_headers()

            def do_HEAD(self):
                self.reply()

            def do_GET(self):
                self.reply()
                self.wfile.write(content or b"")

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/scifact.zip"
        values = {"url": url, "md5": hashlib.md5(content or b"").hexdigest(), **changes}
        return dataclasses.replace(load_card("beir", "scifact"), **values)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_an_archive_becomes_a_folder(tmp_path, serve):
    folder = fetch(serve(archive(FILES)), tmp_path / "data")
    assert folder == tmp_path / "data" / "beir" / "scifact"
    assert sorted(path.name for path in (tmp_path / "data" / "beir").iterdir()) == ["scifact"]
    assert (folder / "qrels" / "test.tsv").read_text() == FILES["scifact/qrels/test.tsv"]
    assert fetch(serve(archive(FILES)), tmp_path / "beir") == tmp_path / "beir" / "scifact"


def test_load_task_downloads_what_is_missing(tmp_path, serve, monkeypatch):
    card = serve(archive(FILES))
    monkeypatch.setattr("maxsim_eval.data.loading.load_card", lambda source, name: card)
    task = load_task("beir", "scifact", data_dir=tmp_path)
    assert task.document_ids == ["d1"]
    assert (tmp_path / "beir" / "scifact" / "corpus.jsonl").is_file()


@pytest.mark.parametrize(
    ("content", "changes", "needed"),
    [
        (None, {}, "HTTP Error 404"),
        (archive(FILES), {"md5": "0" * 32}, "md5 is"),
        (b"<html>not here</html>", {"md5": ""}, "not a whole zip"),
        (archive(FILES)[:-30], {}, "not a whole zip"),
        (archive({"other/corpus.jsonl": ""}), {}, "holds other, need the folder scifact"),
        (archive({**FILES, "../evil": "x"}), {}, "'../evil' points outside"),
        (archive({**FILES, "/evil": "x"}), {}, "'/evil' points outside"),
        (archive({**FILES, "scifact\\evil": "x"}), {}, "points outside"),
        (archive({**FILES, "./C:/evil": "x"}), {}, "'./C:/evil' points outside"),
        (archive(FILES), {"url": "http://127.0.0.1:9/scifact.zip"}, "could not be downloaded"),
    ],
)
def test_a_failed_download_is_one_clear_error_and_leaves_nothing(tmp_path, serve, content, changes, needed):
    with pytest.raises(DataError) as caught:
        fetch(serve(content, **changes), tmp_path / "data")
    assert needed in str(caught.value)
    assert not list(tmp_path.iterdir())


def full(*_) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("lack", "needed"),
    [
        (
            lambda patch: patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9)),
            "9 bytes free, unpacking 'scifact'",
        ),
        (
            lambda patch: patch.setattr("maxsim_eval.data.beir_download.publish_folder", full),
            "stored (No space left on device)",
        ),
        (lambda patch: patch.setitem(sys.modules, "beir", None), "downloading it needs the package 'beir': pip install beir."),
    ],
    ids=["room", "full", "package"],
)
def test_what_this_machine_lacks_is_one_clear_error_and_leaves_nothing(tmp_path, serve, monkeypatch, lack, needed):
    lack(monkeypatch)
    with pytest.raises(DataError) as caught:
        fetch(serve(archive(FILES)), tmp_path / "data")
    assert needed in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_connection_that_breaks_off_leaves_nothing(tmp_path, serve):
    whole = archive(FILES)
    with pytest.raises(DataError, match="could not be downloaded"):
        fetch(serve(whole[: len(whole) // 2], announced=len(whole), md5=""), tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_a_member_for_the_folder_itself_is_harmless(tmp_path, serve):
    folder = fetch(serve(archive({"./": "", **FILES})), tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["corpus.jsonl", "queries.jsonl", "test.tsv"]
    assert (folder / "corpus.jsonl").read_text() == FILES["scifact/corpus.jsonl"]


@pytest.mark.parametrize("part", [0.5, 0.9])
def test_half_an_archive_is_refused_by_checksum_and_by_content(tmp_path, serve, part):
    whole = archive({**FILES, "scifact/corpus.jsonl": FILES["scifact/corpus.jsonl"] * 500})
    half = whole[: int(len(whole) * part)]
    with pytest.raises(DataError, match="md5 is"):
        fetch(serve(half, md5=hashlib.md5(whole).hexdigest()), tmp_path / "data")
    with pytest.raises(DataError, match="not a whole zip"):
        fetch(serve(half, md5=""), tmp_path / "data")
    assert not list(tmp_path.iterdir())


def test_links_in_an_archive_are_refused(tmp_path, serve):
    link = zipfile.ZipInfo("scifact/corpus.jsonl")
    link.external_attr = 0o120777 << 16
    with pytest.raises(DataError, match="symbolic link"):
        fetch(serve(archive({link: "/etc/passwd"})), tmp_path)


def test_without_a_network_the_message_says_where_it_looked_and_what_to_do(tmp_path, monkeypatch):
    card = dataclasses.replace(load_card("beir", "scifact"), url="http://127.0.0.1:9/scifact.zip")
    monkeypatch.setattr("maxsim_eval.data.loading.load_card", lambda source, name: card)
    with pytest.raises(DataError) as caught:
        load_task("beir", "scifact", data_dir=tmp_path / "data")
    text = str(caught.value)
    for part in (str(tmp_path / "data" / "scifact"), str(tmp_path / "data" / "beir" / "scifact"), card.url, "--data-dir"):
        assert part in text
    assert "unzip" in by_hand(card, tmp_path)
    assert not (tmp_path / "data").exists()
