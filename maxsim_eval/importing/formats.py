"""Opening embedding files: torch, npz, npy and safetensors become one `FileTable` of tensors, lists and strings.

No format may run code: torch files are read with `weights_only=True`, numpy files with `allow_pickle=False`. Large
files are mapped (torch zip files, npy, safetensors), so opening one costs its index, not its size.
"""

from __future__ import annotations

import json
import lzma
import math
import pickle
import re
import shlex
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from maxsim_eval.errors import DataError
from maxsim_eval.files import read_text
from maxsim_eval.parsing import json_of
from maxsim_eval.processes.free_memory import available_memory
from maxsim_eval.quantities import size_text

OFFSETS = ".offsets.npy"  # what follows the stem of a npy file in the name of its offsets
PICKLES = (".pkl", ".pickle", ".joblib")
ID_LISTS = ("ids", "query_ids", "document_ids", "doc_ids", "corpus_ids", "passage_ids")
# What readers of damaged files raise, over torch's, numpy's and zipfile's parsers.
DAMAGE = (
    RuntimeError,
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    AttributeError,
    AssertionError,
    EOFError,
    OSError,
    OverflowError,
    MemoryError,
    struct.error,
    lzma.LZMAError,
    SyntaxError,  # numpy parses its headers as Python literals
    tokenize.TokenError,
    zlib.error,
    zipfile.BadZipFile,
    pickle.UnpicklingError,
)
# How torch files begin that are no zip archives: written before torch 1.6, or with its old format asked for.
OLD_TORCH = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
NO_CODE = (
    "loading pickled objects can run code from the file, so only tensors, numbers, strings, lists and dicts are read. "
    "Save it again with those (docs/import.md shows how)"
)
# Code by which the owner of a pickled list of arrays loads it. Names are quoted as in JSON: the shell's quotes are single ones.
UNPICKLE = {
    "pickle": "import pathlib, pickle, torch; rows = pickle.loads(pathlib.Path({name}).read_bytes())",
    "joblib": "import joblib, torch; rows = joblib.load({name})",
    "numpy": "import numpy, torch; rows = numpy.load({name}, allow_pickle=True)",
    "torch": "import torch; rows = torch.load({name}, map_location={device}, weights_only=False)",
}


@dataclass
class FileTable:
    """What one embedding file holds, whatever its format.

    entries: key -> tensor, list or string; meta: the file's own `meta` (torch) or text metadata (safetensors);
    files: the file and the siblings read with it; notes: what must be said about the reading.
    """

    path: Path
    entries: dict[str, Any]
    meta: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    notes: list[str] = field(default_factory=list)


def open_table(path: Path) -> FileTable:
    """Open an embedding file by its extension; `DataError` when it is missing, damaged, unsafe or of another kind.

    A bare list or tensor, without a dict around it, becomes the entry `embeddings`.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        hint = ""
        if path.suffix.lower() in PICKLES:
            kind = "joblib" if path.suffix.lower() == ".joblib" else "pickle"
            hint = f" Pickle files are not read: {NO_CODE}{_own_conversion(path, kind)}"
        raise DataError(
            f"{path}: extension {path.suffix or 'missing'!r} is not an embedding format; supported: {', '.join(READERS)}.{hint}"
        )
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "no such file"
        raise DataError(f"{path}: {what}, need an embedding file ({', '.join(READERS)})")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty (0 bytes)")
    return reader(path)


def _own_conversion(path: Path, kind: str) -> str:
    """The command, for a message, by which the owner of a pickled list of arrays converts it to a list of tensors."""
    target = path.with_suffix(".pt" if path.suffix != ".pt" else ".tensors.pt").name
    names = {"name": json.dumps(path.name), "device": '"cpu"'}
    code = f"{UNPICKLE[kind].format(**names)}; torch.save([torch.as_tensor(row).cpu() for row in rows], {json.dumps(target)})"
    return f". A list of arrays that you saved yourself is converted where it was made, by: python -c {shlex.quote(code)}"


def _read_torch(path: Path) -> FileTable:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=_can_map(path))
    except pickle.UnpicklingError as error:
        raise _refused_pickle(path, str(error)) from error
    except DAMAGE as error:
        raise DataError(
            f"{path}: cannot be read as a torch file (damaged, truncated or another format): {_first_line(error)}"
        ) from error
    if isinstance(loaded, (list, tuple, torch.Tensor)):
        loaded = {"embeddings": loaded}
    if not isinstance(loaded, dict):
        found = type(loaded).__name__
        raise DataError(f"{path}: holds a {found}, need a list of tensors or a dict (docs/import.md shows the layouts)")
    for key in loaded:
        if not isinstance(key, str):
            raise DataError(f"{path}: key {key!r} is a {type(key).__name__}, need text keys such as 'doc_embeddings'")
    meta = loaded.pop("meta", None)
    if meta is not None and not isinstance(meta, dict):
        raise DataError(f"{path}: meta: got {type(meta).__name__}, need a dict (qrels, query_ids, doc_ids)")
    table = FileTable(path, loaded, dict(meta or {}), (path,))
    _add_id_files(table)
    return table


def _can_map(path: Path) -> bool:
    """Whether the tensors can be mapped: torch's zip format, nothing compressed (a re-zipped file maps to garbage)."""
    with open(path, "rb") as handle:
        head = handle.read(len(OLD_TORCH))
    if head == OLD_TORCH:
        return False
    if not head.startswith(b"PK"):
        if head.startswith(b"\x80"):
            own = _own_conversion(path, "pickle")
            raise DataError(f"{path}: refused, it holds a pickled object, not a torch file: {NO_CODE}{own}")
        raise DataError(f"{path}: cannot be read as a torch file (it begins with {head[:8]!r})")
    try:
        with zipfile.ZipFile(path) as archive:
            held = archive.infolist()
            changed = archive.testzip()  # torch does not check CRC-32s
    except DAMAGE as error:
        raise DataError(f"{path}: cannot be read as a torch file (damaged or truncated): {_first_line(error)}") from error
    if changed is not None:
        raise DataError(
            f"{path}: damaged: {changed} does not have the CRC-32 it was written with. Get the file again (or, where it was saved with "
            "torch.serialization.set_crc32_options(False), save it without that)"
        )
    mapped = all(info.compress_type == zipfile.ZIP_STORED for info in held)
    if not mapped:
        _require_memory(path, ((info.filename, info.file_size) for info in held))
    return mapped


def _refused_pickle(path: Path, message: str) -> DataError:
    name = re.search(r"GLOBAL (\S+) (?:was not|whose module)", message)
    if name is not None:
        own = _own_conversion(path, "torch") if name.group(1).startswith("numpy.") else ""
        return DataError(f"{path}: refused, it holds the pickled object {name.group(1)!r}: {NO_CODE}{own}")
    if "Can only build" in message or "Can only create" in message or "Trying to call reduce" in message:
        return DataError(f"{path}: refused, it holds pickled objects: {NO_CODE}")
    detail = message.rsplit("WeightsUnpickler error: ", maxsplit=1)[-1].strip().splitlines()
    return DataError(
        f"{path}: cannot be read as a torch file (damaged, truncated or another format): {detail[0] if detail else ''}"
    )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{lines[0] if lines else ''} ({type(error).__name__})".strip()


def _read_npz(path: Path) -> FileTable:
    entries: dict[str, Any] = {}
    name = ""
    with open(path, "rb") as handle:  # numpy does not close a file that it opened and could not read
        head = handle.read(len(np.lib.format.MAGIC_PREFIX))
        handle.seek(0)
        if not head.startswith((b"PK", b"\x80", np.lib.format.MAGIC_PREFIX)):  # numpy calls whatever is left a pickle
            raise DataError(f"{path}: cannot be read as a numpy file, need an npz archive: it begins with {head!r}")
        try:
            archive = np.load(handle, allow_pickle=False)
            if not isinstance(archive, np.lib.npyio.NpzFile):
                raise DataError(f"{path}: holds a single array, need an npz archive (or name it .npy)")
            with archive:
                _require_memory(path, _unpacked_sizes(archive))
                for name in archive.files:
                    array = archive[name]
                    if not isinstance(array, np.ndarray):
                        raise DataError(f"{path}: {name}: the archive holds another file, not a numpy array")
                    entries[name] = _from_numpy(path, name, array)
        except DAMAGE as error:
            raise _numpy_error(path, f"{name}: " if name else "", error) from error
    return FileTable(path, entries, {}, (path,))


def _unpacked_sizes(archive: Any) -> Iterator[tuple[str, int]]:
    """Name and bytes of every array of an npz archive, as their headers say; a header that says more than there is, is damage."""
    for info in archive.zip.infolist():
        with archive.zip.open(info) as member:
            if member.peek(len(np.lib.format.MAGIC_PREFIX)).startswith(np.lib.format.MAGIC_PREFIX):
                version = np.lib.format.read_magic(member)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(member)
                size = math.prod(shape) * dtype.itemsize
                if not dtype.hasobject and size > info.file_size:
                    raise ValueError(f"{info.filename}: its header says {size:,} bytes, the archive holds {info.file_size:,}")
        yield info.filename.removesuffix(".npy"), info.file_size


def _require_memory(path: Path, sizes: Iterable[tuple[str, int]]) -> None:
    """Refuse what must be unpacked as a whole and does not fit: a small archive may hold any number of zeros."""
    held, free = dict(sizes), available_memory()
    need = sum(held.values())
    if free is not None and need > free:
        largest = max(held, key=lambda name: held[name])
        raise DataError(
            f"{path}: unpacks to {size_text(need)} ({largest} alone to {size_text(held[largest])}), and {size_text(free)} of memory "
            "are free. Save it as .npy, .safetensors or an uncompressed torch file, which are mapped"
        )


def _read_npy(path: Path) -> FileTable:
    """`<name>.npy` with `<name>.offsets.npy` or alone and, when there is one, `<name>.ids.txt`."""
    beside = path.with_name(f"{path.stem}{OFFSETS}")
    parts = {"values": path, "offsets": beside} if beside.is_file() else {"embeddings": path}
    table = FileTable(path, {}, {}, tuple(parts.values()))
    for name, file in parts.items():
        try:
            array = np.lib.format.open_memmap(file, mode="c")  # never pickled; writes would never reach the file
        except DAMAGE as error:
            raise _numpy_error(file, f"{name}: ", error) from error
        table.entries[name] = _from_numpy(file, name, array)
    _add_id_files(table)
    return table


def _numpy_error(path: Path, key: str, error: BaseException) -> DataError:
    if isinstance(error, MemoryError):
        return DataError(f"{path}: {key}needs more memory than there is: {_first_line(error)}")
    if "pickle" in str(error).lower() or "Python objects" in str(error):
        own = _own_conversion(path, "numpy") if path.suffix.lower() == ".npy" else ""
        return DataError(f"{path}: {key}refused, it holds pickled Python objects (dtype object): {NO_CODE}{own}")
    return DataError(
        f"{path}: {key}cannot be read as a numpy file (damaged, truncated or another format): {_first_line(error)}"
    )


def _from_numpy(path: Path, name: str, array: np.ndarray) -> Any:
    """A tensor (numbers), a list of str (text) or a str (one text); other dtypes are refused."""
    if array.dtype.kind in "US":
        try:
            text = array if array.dtype.kind == "U" else np.char.decode(array, "utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: {name}: bytes that are not UTF-8: {error}") from error
        return text.tolist()
    if array.dtype.kind == "V":
        raise DataError(
            f"{path}: {name}: got dtype {array.dtype}; numpy has no bfloat16, save that as safetensors or a torch file"
        )
    if array.dtype.kind not in "fiub" or array.dtype.itemsize > 8:
        raise DataError(f"{path}: {name}: got dtype {array.dtype}, need float16 or float32 embeddings and integer offsets")
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    if native.dtype.kind == "u" and native.dtype.itemsize > 1:
        if native.size and int(native.max()) > np.iinfo(np.int64).max:
            raise DataError(f"{path}: {name}: holds integers beyond 64 bits signed")
        native = native.astype(np.int64)
    if any(stride < 0 for stride in native.strides):
        native = np.ascontiguousarray(native)
    return torch.from_numpy(native)


def _read_safetensors(path: Path) -> FileTable:
    from safetensors import SafetensorError, safe_open

    entries: dict[str, Any] = {}
    try:
        with safe_open(path, framework="pt") as handle:
            text = handle.metadata() or {}
            for name in handle.keys():  # noqa: SIM118 - no mapping: the handle cannot be iterated
                entries[name] = handle.get_tensor(name)
    except (SafetensorError, *DAMAGE) as error:
        raise DataError(
            f"{path}: cannot be read as safetensors (damaged, truncated or another format): {_first_line(error)}"
        ) from error
    meta: dict[str, Any] = dict(text)
    for key in (*ID_LISTS, "qrels"):
        if key in meta:
            try:
                meta[key] = json_of(meta[key])
            except ValueError as error:
                raise DataError(f"{path}: metadata {key}: not JSON: {error}") from error
    table = FileTable(path, entries, meta, (path,))
    _add_id_files(table)
    return table


def _add_id_files(table: FileTable) -> None:
    """Ids from `<name>.ids.txt`, `<name>.query_ids.txt`, `<name>.document_ids.txt`: UTF-8, one a line."""
    for key in ("ids", "query_ids", "document_ids"):
        beside = table.path.with_name(f"{table.path.stem}.{key}.txt")
        if key in table.entries or key in table.meta or not beside.is_file():
            continue
        table.entries[key] = read_id_file(beside)
        table.files = (*table.files, beside)


def read_id_file(path: Path) -> list[str]:
    """Ids from a file, UTF-8, one a line; `DataError` where it cannot be read."""
    try:
        text = read_text(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: the file of ids cannot be read: {error.strerror or error}") from error
    # Only the line feed separates: str.splitlines would also cut at characters that ids may hold.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []


READERS: dict[str, Callable[[Path], FileTable]] = {
    ".pt": _read_torch,
    ".pth": _read_torch,
    ".bin": _read_torch,
    ".npz": _read_npz,
    ".npy": _read_npy,
    ".safetensors": _read_safetensors,
}
