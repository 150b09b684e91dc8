"""Ways to damage HDF5 files, manifests and arrays that only someone who knows the format would find."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np

from attacks import mutations

VALUES = ("values", "codes")  # where embeddings lie
OF_VALUES = (*VALUES, "scales", "offset")


def values_range(path: Path) -> tuple[int, int]:
    """Where in the file embeddings lie."""
    with h5py.File(path, "r") as file:
        (name,) = (name for name in VALUES if name in file)
        start = file[name].id.get_offset()
        return start, start + file[name].id.get_storage_size()


def shard_bytes(rng: Random, path: Path) -> str:
    """Bytes of a file changed: as often what describes the embeddings as the embeddings, which are most of it."""
    data, (start, stop) = path.read_bytes(), values_range(path)
    change = rng.choice(mutations.BYTES)
    part = rng.choice(("head", "values", "all"))
    if part == "all":
        changed = change(rng, data)
    elif part == "head":
        changed = change(rng, data[:start]) + data[start:]
    else:
        changed = data[:start] + change(rng, data[start:stop]) + data[stop:]
    path.write_bytes(changed)
    return f"{change.__name__} of {part}"


def only_values_differ(path: Path, undamaged: Path) -> bool:
    """Whether two HDF5 files say the same of different embeddings."""
    try:
        with h5py.File(path, "r") as mine, h5py.File(undamaged, "r") as theirs:
            return _description(mine) == _description(theirs)
    except (OSError, KeyError, RuntimeError):
        return False


def _description(file: h5py.File) -> dict[str, Any]:
    found: dict[str, Any] = {name: str(value) for name, value in file.attrs.items()}
    for name, value in file.items():
        found[f"/{name}"] = (value.shape, str(value.dtype), None if name in OF_VALUES else value[()].tobytes())
    return found


def _dataset(rng: Random, file: h5py.File) -> str:
    return str(rng.choice(sorted(file)))


def _odd_array(rng: Random, value: np.ndarray) -> np.ndarray:
    kind = rng.randrange(8)
    if kind == 0:
        return value[:-1] if value.ndim else value.reshape(1)
    if kind == 1:
        return np.concatenate([value, value]) if value.ndim else np.stack([value, value])
    if kind == 2:
        return value[..., None]
    if kind == 3:
        return value[:0] if value.ndim else value.reshape(1)[:0]
    if kind == 4:
        return value.astype(rng.choice([np.float64, np.int16, np.uint8, np.complex64])) if value.dtype.kind in "iuf" else value
    if kind == 5:
        return value[::-1] if value.ndim else value + 1
    if kind == 6:
        return value.reshape(-1)
    return np.zeros_like(value)


def shard_structure(rng: Random, path: Path) -> str:
    """One thing in an HDF5 file that is no longer what it must be."""
    with h5py.File(path, "r+") as file:
        kind = rng.choice(
            ("group", "gone", "link", "self", "outside", "array", "array", "array", "attribute", "attribute", "packed")
        )
        name = _dataset(rng, file)
        if kind == "attribute":
            holder = rng.choice((file, *(file[name] for name in sorted(file) if file[name].attrs)))
            names = sorted(holder.attrs)
            name = rng.choice(names)
            odd = rng.choice((None, 0, -1, 2**62, 1.5, "", "x", b"\xff", [1, 2], np.float32("nan"), "y" * 5000, True))
            before = holder.attrs[name]
            del holder.attrs[name]
            if odd is not None:
                holder.attrs[name] = odd
            else:
                holder.attrs[name + rng.choice(("x", "é"))] = before
            return f"attribute {name} {str(odd)[:10]!r}"
        value, attributes = file[name][()], dict(file[name].attrs)
        del file[name]
        if kind == "group":
            file.create_group(name)
        elif kind == "link":
            file[name] = h5py.SoftLink("/nowhere")
        elif kind == "self":
            file[name] = h5py.SoftLink(f"/{name}")
        elif kind == "outside":
            file[name] = h5py.ExternalLink("nowhere.h5", "/values")
        elif kind == "array":
            file.create_dataset(name, data=_odd_array(rng, value))
            file[name].attrs.update(attributes)
            return f"array {name}"
        elif kind == "packed" and value.ndim:
            file.create_dataset(name, data=value, chunks=True, compression="gzip")
            file[name].attrs.update(attributes)
        return f"{kind} {name}"


def shard_values(rng: Random, path: Path) -> str:
    """Embeddings that nobody wrote: not a number, too large, zero, in another order, of another shard."""
    start, stop = values_range(path)
    data = bytearray(path.read_bytes())
    width = 4
    place = start + width * rng.randrange((stop - start) // width)
    kind = rng.choice(("nan", "inf", "huge", "zeros", "rows", "sign"))
    if kind in ("nan", "inf", "huge"):
        data[place : place + 4] = struct.pack("<f", {"nan": np.nan, "inf": np.inf, "huge": 3e38}[kind])
    elif kind == "zeros":
        data[place : min(place + 512, stop)] = bytes(min(place + 512, stop) - place)
    elif kind == "rows":
        half = (stop - start) // 1024 * 512
        data[start : start + 2 * half] = data[start + half : start + 2 * half] + data[start : start + half]
    else:
        data[place + 3] ^= 0x80
    path.write_bytes(bytes(data))
    return kind


def other_file(rng: Random, path: Path) -> str:
    """Another file of the entry, or of the other entry, where this one must be."""
    others = [found for found in sorted(path.parent.parent.rglob("*.h5")) if found != path]
    chosen = rng.choice(others)
    data = chosen.read_bytes()
    path.unlink()
    path.write_bytes(data)
    return f"{chosen.name} of {chosen.parent.name}"


def manifest_entry(rng: Random, path: Path) -> str:
    """An entry of the manifest changed, whose checksum may fit."""
    value = json.loads(path.read_text())
    signed = rng.random() < 0.6
    if signed:
        del value["checksum"]
    text = mutations.json_value(rng, value)
    if signed:
        try:
            changed = json.loads(text)
            canonical = json.dumps(changed, sort_keys=True, separators=(",", ":"), allow_nan=False)
            changed["checksum"] = hashlib.sha256(canonical.encode()).hexdigest()
            text = json.dumps(changed)
        except (ValueError, AttributeError, TypeError):
            signed = False
    path.write_text(text)
    return "entry" + (" with its checksum" if signed else "")


def kept_file(rng: Random, path: Path) -> str:
    """Any file of an entry in any of the ways above."""
    if path.suffix == ".json":
        return manifest_entry(rng, path)
    return str(rng.choice((shard_bytes, shard_structure, shard_values, other_file))(rng, path))


def npz_entry(rng: Random, path: Path) -> str:
    """An array of an archive of another shape, dtype or name, or with values that are none."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    said = _array(rng, arrays)
    np.savez(path, **arrays)
    return said


def safetensors_entry(rng: Random, path: Path) -> str:
    """The header's own words changed, its length kept true or not; or an array changed."""
    import safetensors.numpy

    if rng.random() < 0.5:
        arrays = safetensors.numpy.load_file(path)
        said = _array(rng, arrays)
        safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
        return said
    data = path.read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    head = mutations.json_value(rng, json.loads(data[8 : 8 + size])).encode("utf-8", "surrogatepass")
    new = rng.choice((len(head), len(head), len(head), size, 2**63, 0, len(head) + 1))
    path.write_bytes(struct.pack("<Q", new) + head + data[8 + size :])
    return "header"


def torch_entry(rng: Random, path: Path) -> str:
    """What a torch file holds changed."""
    import torch

    content = torch.load(path, weights_only=True)
    key = rng.choice(sorted(content))
    value = content[key]
    if key == "meta":
        value[rng.choice(sorted(value))] = rng.choice(
            (None, [], ["q1"] * 24, "x", 5, [1, 2], ["\ud800"], {"a": 1}, [None] * 24)
        )
    elif isinstance(value, list):
        place = rng.randrange(len(value))
        odd = (
            torch.zeros(0, 8),
            torch.zeros(3),
            torch.zeros(2, 9),
            torch.tensor(1.0),
            None,
            "x",
            torch.full((1, 8), torch.nan),
        )
        value[place] = rng.choice((*odd, value[place].double(), value[place].half(), value[place].to(torch.int8)))
    else:
        held = {key: value.numpy()}
        _array(rng, held)
        (name,) = list(held) or ["gone"]
        del content[key]
        if held:
            content[name] = torch.from_numpy(np.ascontiguousarray(held[name]))
    torch.save(content, path)
    return f"entry {key}"


def _array(rng: Random, arrays: dict[str, Any]) -> str:
    name = rng.choice(sorted(arrays))
    kind = rng.randrange(6)
    value = arrays[name].copy()
    if kind == 0:
        del arrays[name]
        if rng.random() < 0.5:
            arrays[name + "x"] = value
        return f"without {name}"
    if kind == 1 and value.size:
        value.reshape(-1)[rng.randrange(value.size)] = (
            rng.choice((0, 1, 2, 7)) if value.dtype.kind in "iu" else rng.choice((np.nan, np.inf, 1e30, 0.0))
        )
        arrays[name] = value
        return f"a value of {name}"
    if kind == 2 and value.size and value.dtype.kind == "i":
        value.reshape(-1)[rng.randrange(value.size)] = rng.choice((-1, 10**6, 2**62, -(2**63)))
        arrays[name] = value
        return f"a count of {name}"
    arrays[name] = _odd_array(rng, value)
    return f"another {name}"
