"""Fetching a public BEIR archive: download through `beir.util`, checksum, safe extraction, one rename into place."""

from __future__ import annotations

import hashlib
import lzma
import shutil
import stat
import struct
import urllib.error
import urllib.request
import zipfile
import zlib
from contextlib import suppress
from pathlib import Path, PurePosixPath
from types import ModuleType

from maxsim_eval.data.beir import LAYOUT, publish_folder
from maxsim_eval.data.cards import Card
from maxsim_eval.errors import DataError
from maxsim_eval.files import delete, hidden, remove_leftovers

CONNECT_SECONDS = 20.0
# What unpacking raises: for damage, encryption (RuntimeError), methods and versions it does not know (NotImplementedError).
_BAD_ZIP = (zipfile.BadZipFile, RuntimeError, ValueError, EOFError, OverflowError, struct.error, zlib.error, lzma.LZMAError)


def by_hand(card: Card, data_dir: Path) -> str:
    """How to get the set without this program, as the error messages and the README say it."""
    archive = card.name.split("/")[0]
    target = data_dir if data_dir.name == "beir" else data_dir / "beir"
    check = f" (md5 {card.md5})" if card.md5 else ""
    return (
        f"To get it by hand: download {card.url}{check} on a machine with network access and unzip it so that "
        f"{target / archive} holds {LAYOUT}; or name the folder that already has it with --data-dir."
    )


def fetch(card: Card, data_dir: Path) -> Path:
    """Download and unpack the card's archive; return the dataset's folder, complete.

    The archive goes to `data_dir/beir/<name>` (`data_dir/<name>` where `data_dir` itself is called `beir`). Everything
    happens in a hidden folder beside it; folders made for nothing are removed again.

    Raises:
        DataError: no network, no such file on the server, a wrong checksum, a damaged archive or one with unsafe
            members, too little disk; the message says how to get the data by hand. Nothing is left behind.
    """
    archive_name = card.name.split("/")[0]
    parent = data_dir if data_dir.name == "beir" else data_dir / "beir"
    target = parent / archive_name
    made = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    temporary = hidden(target, "download")
    remove_leftovers(target)
    try:
        temporary.mkdir(parents=True)
        archive = temporary / f"{archive_name}.zip"
        _download(card, archive, data_dir)
        _check_md5(card, archive, data_dir)
        unpacked = _unpack(card, archive, temporary / "unpacked", data_dir)
        publish_folder(unpacked, target)
    except OSError as error:
        raise DataError(
            f"{target}: the dataset {card.name!r} could not be stored ({error.strerror or error}). {by_hand(card, data_dir)}"
        ) from error
    finally:
        with suppress(OSError):  # what stays is removed by `cache gc`
            delete(temporary)
        for folder in made:  # innermost first
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    return parent / card.name


def _beir_util(card: Card, data_dir: Path) -> ModuleType:
    try:
        from beir import util
    except ImportError as error:  # beir 2.2 imports requests without declaring it
        raise DataError(
            f"dataset {card.name!r} is not on this machine, and downloading it needs the package {error.name!r}: "
            f"pip install {error.name}. {by_hand(card, data_dir)}"
        ) from error
    return util


def _download(card: Card, archive: Path, data_dir: Path) -> None:
    # beir.util.download_url neither checks the status nor sets a timeout: ask first, so that an unreachable or wrong
    # address is known within seconds and an error page is never saved as an archive.
    try:
        request = urllib.request.Request(card.url, method="HEAD")
        with urllib.request.urlopen(request, timeout=CONNECT_SECONDS):
            pass
        _beir_util(card, data_dir).download_url(card.url, str(archive))
    except OSError as error:  # urllib's URLError and HTTPError, requests' exceptions and timeouts are all OSErrors
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # it is also the response
        raise DataError(
            f"dataset {card.name!r} is not on this machine and could not be downloaded from {card.url} "
            f"({error.__class__.__name__}: {error}). {by_hand(card, data_dir)}"
        ) from error


def _check_md5(card: Card, archive: Path, data_dir: Path) -> None:
    if not card.md5:
        return
    with open(archive, "rb") as handle:
        found = hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != card.md5:
        raise DataError(
            f"{card.url}: the archive's md5 is {found}, need {card.md5}: the download is damaged or the archive was "
            f"replaced by another version. Nothing was kept; try again. {by_hand(card, data_dir)}"
        )


def check_members(archive: zipfile.ZipFile, origin: str) -> None:
    """Refuse an archive that would write outside its folder or hold links.

    Raises:
        DataError: an absolute name, `..`, a drive or backslash, or a symbolic link; the message names the member.
    """
    for member in archive.infolist():
        path = PurePosixPath(member.filename)
        if path.is_absolute() or ".." in path.parts or "\\" in member.filename or any(":" in part for part in path.parts[:1]):
            raise DataError(f"{origin}: member {member.filename!r} points outside the archive; nothing was unpacked")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DataError(f"{origin}: member {member.filename!r} is a symbolic link; nothing was unpacked")


def _unpack(card: Card, archive: Path, folder: Path, data_dir: Path) -> Path:
    try:
        with zipfile.ZipFile(archive) as opened:
            check_members(opened, card.url)
            need, free = sum(member.file_size for member in opened.infolist()), shutil.disk_usage(archive.parent).free
        if need > free:
            raise DataError(f"{archive.parent.parent}: {free} bytes free, unpacking {card.name!r} needs {need}")
        _beir_util(card, data_dir).unzip(str(archive), str(folder))
    except _BAD_ZIP as error:
        raise DataError(
            f"{card.url}: not a whole zip archive that can be read ({type(error).__name__}: {error}). {by_hand(card, data_dir)}"
        ) from None
    inner = folder / card.name.split("/")[0]
    if not (folder / card.name / "corpus.jsonl").is_file():
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:5]) or "nothing"
        raise DataError(f"{card.url}: holds {held}, need the folder {card.name} with {LAYOUT}")
    return inner
