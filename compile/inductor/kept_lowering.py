"""What lowering made of an engine's modules, in the user's cache: the same modules with other weights need no trace.

A lowering is known by its origin, see `origin`, by the layout of the engine, and by all that the compiler depends on.
What is kept are the programs' keys in the cache and, for each weight that they are lent, how it is made.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from ...progress import OnProgress, silent
from ..assemble import Assembled, FlatProgram
from ..export import has_foreign_scorer
from ..precision import Precision
from ..traced_once.alike import Opaque
from ..writer import identity
from .compiled import Compiled
from .kept_code import find_program, keep_bytes, kept_bytes, surroundings
from .origin import describe_origin
from .stored_program import Packed, PackedTensors, Recipe

SUFFIX = "lowering"
WORDS = {"drafter", "adapter", "tool_format"}  # options that name what the modules then are
MOST_HELD = 2**22  # bytes of constants that code made
STORED, PACKED, HELD = "stored", "packed", "held"  # where a constant is from: the modules, their weights packed, code


class _Changed(Exception):
    """These weights become something else than those that a lowering was made with."""


def lowering_key(graphs: Assembled, settings: Mapping[str, Any]) -> str | None:
    """A digest of all that lowering these graphs depends on, their weights left out. None where that is not known."""
    if graphs.others or any(map(has_foreign_scorer, graphs.programs.values())):
        return None
    known = surroundings(settings)
    spec = dataclasses.asdict(graphs.spec)
    spec["config"] = {name: value for name, value in spec["config"].items() if name not in WORDS}
    known.update(json.dumps(spec).encode())
    try:
        known.update(describe_origin(graphs.programs.values()).encode())
    except Opaque:
        return None
    return known.hexdigest()


def find_lowering(key: str, graphs: Assembled, directory: Path, progress: OnProgress = silent) -> Compiled | None:
    """The kept lowering of graphs, its packages in `directory`; None where there is none for these weights."""
    data = kept_bytes(key, SUFFIX)
    if data is None:
        return None
    text, _, tensors = data.partition(b"\0")
    record = json.loads(text)
    if not all(find_program(record["keys"][name], directory / f"{name}.pt2") for name in graphs.programs):
        return None
    progress("packing weights")
    stored = _stored(graphs.programs)
    try:
        packed = _pack(record[PACKED], stored, graphs.precision)
        for name, kind in record["kinds"].items():
            _expect(kind, graphs.precision(stored[name]).kind)
    except _Changed:
        return None
    held, tensors_packed = safetensors.torch.load(tensors), [weight.tensor for weight in packed]
    places: dict[str, Any] = {STORED: stored, PACKED: tensors_packed, HELD: held}
    constants = {
        program: {name: places[where][place] for name, (where, place) in given.items()}
        for program, given in record["constants"].items()
    }
    return Compiled(constants, packed, *(record[field] for field in ("stages", "inexact", "operators", "keys")))


def keep_lowering(key: str, graphs: Assembled, compiled: Compiled) -> None:
    """Keep what lowering gave. Nothing is kept where a weight came from somewhere else than it is known here."""
    stored = _stored(graphs.programs)
    names = {identity(tensor): name for name, tensor in stored.items() if tensor.numel()}
    packed = {weight.tensor.data_ptr(): number for number, weight in enumerate(compiled.packed)}
    held: dict[str, Tensor] = {}

    def place(tensor: Tensor) -> tuple[str, Any]:
        if tensor.data_ptr() in packed:
            return PACKED, packed[tensor.data_ptr()]
        if identity(tensor) in names:
            return STORED, names[identity(tensor)]
        name = str(len(held))
        held[name] = tensor.detach().cpu().clone().contiguous()
        return HELD, name

    constants = {
        program: {name: place(tensor) for name, tensor in given.items()}
        for program, given in compiled.constants.items()
    }
    whole = {name: stored[name] for given in constants.values() for where, name in given.values() if where == STORED}
    if sum(tensor.nbytes for tensor in held.values()) > MOST_HELD or any(
        name not in stored for weight in compiled.packed for name in weight.recipe.names
    ):
        return
    record = {
        "keys": compiled.keys,
        PACKED: [(weight.recipe, weight.kind) for weight in compiled.packed],
        "kinds": {name: graphs.precision(tensor).kind for name, tensor in whole.items() if tensor.dim() > 1},
        "constants": constants,
        "stages": compiled.stages,
        "inexact": compiled.inexact,
        "operators": compiled.operators,
    }
    keep_bytes(key, SUFFIX, json.dumps(record).encode() + b"\0" + safetensors.torch.save(held))


def _stored(programs: Mapping[str, FlatProgram]) -> dict[str, Tensor]:
    """The parameters and buffers of all programs by name, but for names that stand for several."""
    stored: dict[str, Tensor] = {}
    several = set()
    for program in programs.values():
        for named in (program.named_parameters, program.named_buffers):
            for name, tensor in named(remove_duplicate=False):
                if identity(stored.setdefault(name, tensor)) != identity(tensor):
                    several.add(name)
    return {name: tensor.detach() for name, tensor in stored.items() if name not in several}


def _pack(recipes: list[Any], stored: Mapping[str, Tensor], precision: Precision) -> list[Packed]:
    """Raises _Changed."""
    packed, made = PackedTensors(precision), []
    for (names, *way), kind in recipes:
        recipe, held = Recipe(tuple(names), *way), [stored[name] for name in names]
        for tensor in held:
            _expect(kind, packed.form(tensor, recipe).kind)
        made.append(packed.of(recipe, held))
    return made


def _expect(kind: str, got: str) -> None:
    if kind != got:
        raise _Changed
