"""Weights of further ranks, as the programs take them that were compiled for the first."""

from collections.abc import Mapping

from torch.export import ExportedProgram

from ...errors import BuildError
from ..assemble import Assembled, FlatProgram
from ..export import Export
from .kept_code import program_key
from .rewrites import rewrite_for_cpu, rewrite_for_gpu
from .stored_program import Packed


def export_like(
    first: Mapping[str, ExportedProgram], programs: Mapping[str, FlatProgram], graphs: Assembled, export: Export
) -> tuple[dict[str, ExportedProgram], list[Packed]]:
    """Trace and rewrite a rank's programs, whose weights are packed then -> them, and what was packed. first: those of
    the first rank, rewritten. Raises BuildError where a program of the first would compute something else."""
    exported = {name: export(program, graphs.spec) for name, program in programs.items()}
    rewrite = rewrite_for_gpu if graphs.spec.device == "cuda" else rewrite_for_cpu
    packed = rewrite(exported.values(), graphs.precision)
    for name, program in exported.items():
        if program_key(program, {}) != program_key(first[name], {}):
            raise BuildError(
                f"ranks: expected one program {name} for all, got another one for a rank: this model has a "
                "weight of one or a few elements, whose value the compiler put into the code; leave --ranks out"
            )
    return exported, packed
