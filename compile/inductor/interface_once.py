"""Compiles once what is alike in all programs of AOTInductor: the C functions by which a runtime calls a program, and
its constructor. They took two thirds of the C++ compiler's time for each program's wrapper.

A program is left with its own code and tables of its inputs and weights. The rest is an object file that the user's
cache keeps, and that is linked to each program.
"""

import re
import tempfile
from pathlib import Path
from typing import Any

from torch._inductor.codegen import cpp_wrapper_cpu
from torch._inductor.cpp_builder import CppBuilder

from ...user_cache import PROGRAMS, cache_path, locked
from .kept_code import keep_bytes, kept_bytes, text_key

OBJECT = "o"  # the ending of the kept file's name
HERE = Path(__file__).parent
INTERFACE = Path(cpp_wrapper_cpu.__file__).parent / "aoti_runtime" / "interface.cpp"  # which each wrapper repeats
CONSTRUCTOR = re.compile(
    r"^AOTInductorModel::AOTInductorModel\([^{]*: AOTInductorModelBase\(\d+,\s*\d+,\s*\d+,\s*device_str,"
    r"\s*std::move\(cubin_dir\),\s*false\) \{\n(.*?)^\}\n",
    re.M | re.S,
)
PORT = re.compile(r'^    (in|out)puts_info_\[\d+\]\.name = ("\w+");\n', re.M)
CONSTANT = re.compile(
    r"""^    constants_info_\[(\d+)\]\.name = (?P<name>".*");
    constants_info_\[\1\]\.dtype = cached_(?P<dtype>torch_dtype_\w+);
    constants_info_\[\1\]\.device_type = cached_(?P<device_type>torch_device_type_\w+);
    constants_info_\[\1\]\.offset = (?P<offset>\d+);
    constants_info_\[\1\]\.data_size = (?P<data_size>\d+);
    constants_info_\[\1\]\.from_folded = (?P<from_folded>true|false);
    constants_info_\[\1\]\.type = (?P<type>static_cast<int32_t>\([\w:]+\));
    constants_info_\[\1\]\.shape = \{(?P<shape>[\d, ]*)\};
    constants_info_\[\1\]\.stride = \{(?P<stride>[\d, ]*)\};
    constants_info_\[\1\]\.layout = static_cast<int32_t>\(cached_(?P<layout>torch_layout_\w+)\);
    constants_info_\[\1\]\.original_fqn = (?P<original_fqn>".*");
""",
    re.M,
)
ROW = (
    "    {{{name}, {original_fqn}, aoti_{dtype}, aoti_{device_type}, aoti_{layout}, {offset}, {data_size}, "
    "{from_folded}, {type}, {dimensions}}},\n"
)
SPECIFICATION = re.compile(r'^    (in|out)_spec_ =\s+((?:R"\(.*?\)"\s*)+);\n', re.M | re.S)
ALWAYS = (
    "    update_constants_map(std::move(constants_map));\n",
    "    update_constants_array(std::move(constants_array));\n",
    "    this->kernels_ = std::make_unique<AOTInductorModelKernels>();\n",
)
TABLES = """
static const char* const names_of_inputs[] = {{{inputs}}};
static const char* const names_of_outputs[] = {{{outputs}}};
static const int64_t sizes_of_constants[] = {{{sizes}}};
static const ConstantRow rows_of_constants[] = {{
{rows}}};
static std::unique_ptr<AOTInductorModelKernelsBase> make_kernels() {{
    return std::make_unique<AOTInductorModelKernels>();
}}
const Description description = {{
    {inputs_count}, {outputs_count}, {constants_count}, names_of_inputs, names_of_outputs, rows_of_constants,
    sizes_of_constants,
    {in_spec},
    {out_spec},
    make_kernels,
}};
"""


def without_interface(wrapper: str) -> str | None:
    """A wrapper's code without what `interface_object` has; None where it is not of the form that is known here."""
    interface, description = INTERFACE.read_text().strip(), (HERE / "description.h").read_text()
    constructor = CONSTRUCTOR.search(wrapper)
    tables = _tables(constructor[1]) if constructor else None
    if constructor is None or tables is None or wrapper.count(interface) != 1:
        return None
    whole = wrapper[: constructor.start()] + tables + wrapper[constructor.end() :]
    return whole.replace(interface, description)


def _tables(body: str) -> str | None:
    """What a constructor's body says, as tables."""
    constants = list(CONSTANT.finditer(body))
    ports = {way: [name for found, name in PORT.findall(body) if found == way] for way in ("in", "out")}
    specifications = dict(SPECIFICATION.findall(body))
    rest = SPECIFICATION.sub("", PORT.sub("", CONSTANT.sub("", body)))
    for line in ALWAYS:
        rest = rest.replace(line, "", 1)
    if rest.strip() or set(specifications) != {"in", "out"}:
        return None
    sizes = [numbers for found in constants for numbers in (found["shape"], found["stride"]) if numbers]
    rows = [ROW.format(**found.groupdict(), dimensions=len(found["shape"].split())) for found in constants]
    return TABLES.format(
        inputs=", ".join(ports["in"]) or "nullptr",
        outputs=", ".join(ports["out"]) or "nullptr",
        sizes=", ".join(sizes) or "0",
        rows="".join(rows) or "    {},\n",
        inputs_count=len(ports["in"]),
        outputs_count=len(ports["out"]),
        constants_count=len(rows),
        in_spec=specifications["in"],
        out_spec=specifications["out"],
    )


def interface_object(options: Any) -> bytes:
    """The object file that programs are linked to, from the user's cache, or compiled with the options of wrappers."""
    source = "\n".join(
        [
            "#include <torch/csrc/inductor/aoti_include/cpu.h>",
            INTERFACE.read_text(),
            (HERE / "description.h").read_text(),
            (HERE / "interface.cpp").read_text(),
        ]
    )
    command = CppBuilder("o", "i", options).get_command_line()
    key = text_key(f"{command}\n{source}")
    with locked(cache_path(PROGRAMS, f".{key}.lock")):  # two programs are compiled at once
        kept = kept_bytes(key, OBJECT)
        if kept is None:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "interface.cpp"
                file.write_text(source)
                builder = CppBuilder("interface", str(file), options, folder)
                builder.build()
                kept = Path(builder.get_target_file_path()).read_bytes()
            keep_bytes(key, OBJECT, kept)
    return kept
