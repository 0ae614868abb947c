"""Damages a copy of an engine directory at random. All files but the damaged ones are links to those of the engine."""

import copy
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST, LEARNED = "manifest.json", "learned.safetensors"
NUMBERS = [0, -1, 1, 2, 3, 63, 65, 2**31, 2**40, 2**62, 2**63, 2**64, -(2**63), 10**30, 0.5, 1e308, float("nan")]
NAMES = [
    "../x",
    "/etc/hostname",
    "a/b",
    "..",
    ".",
    "",
    "a\nb",
    "\x00",
    "manifest.json",
    "x" * 5000,
    "\ud800",
    "step.pt2",
]
OTHERS = [None, True, False, "", "7", [], {}, [[]], {"a": 1}, [None] * 3]
Rng = random.Random


def copy_of(engine: Path, folder: Path) -> None:
    """A directory with links to the engine's files."""
    folder.mkdir()
    for path in engine.iterdir():
        os.link(path, folder / path.name)


def damage(engine: Path, folder: Path, rng: Rng) -> str:
    """Make `folder` a damaged copy of an engine -> what was done."""
    copy_of(engine, folder)
    acts = [of_bytes, of_bytes, of_files, of_manifest, of_manifest, of_manifest, of_json, of_contents]
    return rng.choice(acts + [of_learned] * (folder / LEARNED).exists())(folder, rng)


def put(path: Path, data: bytes) -> None:
    """Write a file anew: the link's other end stays as it is."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def of_bytes(folder: Path, rng: Rng) -> str:
    """Flip, cut, fill, lengthen: the sums are those of before."""
    path = rng.choice(sorted(folder.iterdir()))
    data = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "empty", "zeros", "longer", "moved"])
    place = rng.randrange(len(data))
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 8, 100])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[place:]
    elif kind == "empty":
        data.clear()
    elif kind == "zeros":
        data[place : place + 512] = bytes(len(data[place : place + 512]))
    elif kind == "longer":
        data += rng.randbytes(rng.choice([1, 100]))
    else:
        data = data[place:] + data[:place]
    put(path, bytes(data))
    return f"{kind} {path.name}"


def of_files(folder: Path, rng: Rng) -> str:
    """Remove, swap and replace whole files."""
    one, other = rng.sample(sorted(folder.iterdir()), 2)
    kind = rng.choice(["gone", "swapped", "folder", "loop", "dangling", "fifo"])
    if kind == "swapped":
        one.rename(folder / "x"), other.rename(one), (folder / "x").rename(other)
        return f"swapped {one.name} {other.name}"
    one.unlink()
    if kind == "folder":
        one.mkdir()
    elif kind == "loop":
        one.symlink_to(one.name)
    elif kind == "dangling":
        one.symlink_to("/nowhere/at/all")
    elif kind == "fifo":
        os.mkfifo(one)
    return f"{kind} {one.name}"


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything in JSON data."""
    inner = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


def of_manifest(folder: Path, rng: Rng) -> str:
    """Alter one place of the manifest, whose sums of files stay right."""
    data = json.loads((folder / MANIFEST).read_text())
    section = rng.choice([(), ("spec",), ("spec",), ("spec", "state"), ("spec", "caches"), ("files",), ("about",)])
    inner = data
    for key in section:
        inner = inner[key]
    path = (*section, *rng.choice(places(inner)[1:]))
    holder = data
    for key in path[:-1]:
        holder = holder[key]
    value = holder[path[-1]]
    kind = rng.choice(["number", "name", "other", "gone", "twice", "further", "near"])
    if kind == "gone":
        del holder[path[-1]]
    elif kind == "twice" and isinstance(holder, list):
        holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(value))
    elif kind == "further" and isinstance(value, dict):
        value[rng.choice(NAMES)] = rng.choice([*OTHERS, {"bytes": 2, "sha256": "0" * 64}])
    elif kind == "near" and type(value) is int:
        holder[path[-1]] = value + rng.choice([-1, 1, value, -2 * value, 64, -64])
    elif kind == "name" and isinstance(holder, dict):
        holder[rng.choice(NAMES)] = holder.pop(path[-1])
    else:
        holder[path[-1]] = rng.choice([*NUMBERS, *NAMES, *OTHERS])
    put(folder / MANIFEST, json.dumps(data).encode())
    return f"manifest {kind} {'.'.join(map(str, path)):.80}"


def of_json(folder: Path, rng: Rng) -> str:
    """A manifest that is no usual JSON."""
    kinds: dict[str, Callable[[], bytes]] = {
        "deep": lambda: b'{"spec":' * 100_000,
        "list": lambda: b"[" * 5000 + b"]" * 5000,
        "digits": lambda: b'{"format_version": ' + b"9" * 10_000 + b"}",
        "latin": lambda: b'{"format_version": "\xff"}',
        "bom": lambda: b"\xef\xbb\xbf" + (folder / MANIFEST).read_bytes(),
        "null": lambda: b"null",
        "text": lambda: b'"manifest"',
        "huge": lambda: b'{"x": "' + b"x" * 2**20 + b'"}',
        "twice": lambda: (folder / MANIFEST).read_bytes() * 2,
    }
    kind = rng.choice(sorted(kinds))
    put(folder / MANIFEST, kinds[kind]())
    return f"json {kind}"


def with_right_sums(folder: Path, name: str, data: bytes) -> None:
    """Replace a file, and have the manifest say so."""
    put(folder / name, data)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["files"][name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    put(folder / MANIFEST, json.dumps(manifest).encode())


def of_learned(folder: Path, rng: Rng) -> str:
    """Damage what was learned: its header, and entries of its table."""
    path = folder / LEARNED
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    kind = rng.choice(["header", "entry", "cut", "length"])
    if kind == "header":
        data[8 + rng.randrange(size)] ^= 1 << rng.randrange(8)
    elif kind == "entry":
        data[8 + size + rng.randrange(len(data) - size - 8)] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del data[rng.randrange(len(data)) :]
    else:
        data[:8] = rng.choice([0, 2**40, 2**63]).to_bytes(8, "little")
    put(path, bytes(data))
    return f"learned {kind}"


def of_json_file(folder: Path, rng: Rng) -> str:
    """Alter one place of a JSON file."""
    path = rng.choice(sorted(folder.glob("*.json")))
    data = json.loads(path.read_text())
    where = rng.choice(places(data)[1:])
    holder = data
    for key in where[:-1]:
        holder = holder[key]
    value = holder[where[-1]]
    if type(value) is int and rng.random() < 0.3:
        holder[where[-1]] = value + rng.choice([-1, 1, value, -2 * value])
    elif rng.random() < 0.2:
        del holder[where[-1]]
    else:
        holder[where[-1]] = rng.choice([*NUMBERS, *OTHERS, "x"])
    put(path, json.dumps(data).encode())
    return f"{path.name} {'.'.join(map(str, where)):.80}"


def of_contents(folder: Path, rng: Rng) -> str:
    """Alter the tokenizer, the chat template or the weights' header, with right sums. Programs are native code: there
    the sums are the guard, and none is altered with right ones."""
    if rng.random() < 0.5 or not (folder / "weights.safetensors").exists():
        data = json.loads((folder / "tokenizer.json").read_text())
        path = rng.choice(places(data)[1:])
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = rng.choice([n for n in (*NUMBERS, *OTHERS, "x", "\n") if n == n])
        with_right_sums(folder, "tokenizer.json", json.dumps(data).encode())
        return f"tokenizer {'.'.join(map(str, path))!r:.80}"
    weights = "weights.safetensors"
    raw = (folder / weights).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    name = rng.choice([name for name in header if name != "__metadata__"])
    kind = rng.choice(["shape", "dtype", "gone", "length", "flip"])
    if kind == "shape":
        header[name]["shape"] = [*header[name]["shape"][::-1], 1]
    elif kind == "dtype":
        header[name]["dtype"] = rng.choice(["I32", "F16", "F64", "X", 3])
    elif kind == "gone":
        del header[name]
    told = json.dumps(header).encode()
    body = bytearray(raw[8 + size :])
    if kind == "flip":
        told = bytearray(raw[8 : 8 + size])
        told[rng.randrange(size)] ^= 1 << rng.randrange(8)
    length = rng.choice([0, 2**40, 2**63]) if kind == "length" else len(told)
    with_right_sums(folder, weights, length.to_bytes(8, "little") + bytes(told) + bytes(body))
    return f"weights {kind} {name:.60}"
