"""ONNX Runtime's sessions, shared by the tests of a process: to open the tiny models' step takes 2.5 seconds."""

import os
from collections import OrderedDict
from typing import Any

import onnxruntime

MOST = 16  # sessions that are kept
_opened: OrderedDict[Any, onnxruntime.InferenceSession] = OrderedDict()
_open = onnxruntime.InferenceSession


def shared_session(model: Any, *given: Any, **named: Any) -> onnxruntime.InferenceSession:
    """A session of a file as the runtime opens one, or of the same files with the same threads one that is open. It has
    no state of its own: that goes in and comes out with each call."""
    options = given[0] if given else None
    if not isinstance(model, str) or options is None:
        return _open(model, *given, **named)
    files = [(entry.path, entry.inode(), entry.stat().st_mtime_ns) for entry in os.scandir(os.path.dirname(model))]
    key = (model, options.intra_op_num_threads, *sorted(files))
    session = _opened.pop(key, None) or _open(model, *given, **named)
    _opened[key] = session
    if len(_opened) > MOST:
        _opened.popitem(last=False)
    return session
