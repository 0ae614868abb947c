"""A model for the repository of a Triton Inference Server."""

import os
import shutil
from pathlib import Path

from ...runtime.engine_file import check_files, read_manifest
from .model import ENGINE
from .tensors import INPUTS, OUTPUTS, Field

CONFIG, MARK = "config.pbtxt", "# Written by `specstep export-triton`."
MODEL = '''"""Written by `specstep export-triton`: an instance of this model is an engine of the installed specstep."""

import triton_python_backend_utils
from specstep.serving.triton.model import TritonModel


class TritonPythonModel(TritonModel):
    utils = triton_python_backend_utils
'''


def write_model(
    folder: Path, engine: Path, instances: int, max_queue: int, tool_format: str | None, link: bool
) -> None:
    """Fill an empty folder, whose name is to be the model's.

    Args:
        engine: an engine directory.
        instances: engines that share the requests, each in a process of its own; on GPUs, so many on each.
        max_queue: choices that may wait for a row of an instance.
        tool_format: the form in which the model writes calls of tools, None for the engine's.
        link: have a symbolic link to the engine in place of a copy.

    Raises:
        EngineError: `engine` is none.
        OSError: the folder cannot be written.
    """
    manifest = read_manifest(engine)
    check_files(engine, manifest, deep=True)
    version = folder / "1"
    version.mkdir()
    (folder / CONFIG).write_text(config(manifest.spec.device, instances, max_queue, tool_format), encoding="utf-8")
    (version / "model.py").write_text(MODEL, encoding="utf-8")
    if link:
        os.symlink(engine.resolve(), version / ENGINE, target_is_directory=True)
        return
    (version / ENGINE).mkdir()
    for name in ("manifest.json", *manifest.files):
        shutil.copyfile(engine / name, version / ENGINE / name)


def config(device: str, instances: int, max_queue: int, tool_format: str | None) -> str:
    """The text of config.pbtxt."""
    kind = "KIND_CPU" if device == "cpu" else "KIND_GPU"
    return f"""{MARK} Each instance batches in flight: requests join and leave its
# engine between steps, so Triton's own batching is off. Responses are pieces of the answer, as they come.
backend: "python"
max_batch_size: 0
model_transaction_policy {{ decoupled: true }}
instance_group [ {{ count: {instances} kind: {kind} }} ]

# Choices that may wait for a row of an instance; a request past them ends with UNAVAILABLE.
parameters {{ key: "max_queue" value {{ string_value: "{max_queue}" }} }}
# The form in which the model writes calls of tools; without one, as the engine's manifest has it.
parameters {{ key: "tool_format" value {{ string_value: "{tool_format or ""}" }} }}

{"".join(_tensor("input", name, field) for name, field in INPUTS.items())}
{"".join(_tensor("output", name, field) for name, field in OUTPUTS.items())}"""


def _tensor(list_: str, name: str, field: Field) -> str:
    optional = " optional: true" if list_ == "input" else ""
    return (
        f"# {field.meaning}\n"
        f'{list_} [ {{ name: "{name}" data_type: TYPE_{field.type} dims: [ {field.size} ]{optional} }} ]\n'
    )
