"""Building the library of C++ kernels, and where it is kept."""

import subprocess
import sys
from pathlib import Path

import pytest
from specstep.kernels.native import CompilerError, build_library


def test_build_errors_name_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="instruction_set: expected one of avx512_bf16"):
        build_library(instruction_set="sse9")
    with pytest.raises(CompilerError, match=r"expected a C\+\+ compiler, got none of no-such-compiler; install g\+\+"):
        build_library(compiler="no-such-compiler", cache=tmp_path)


COMPILER = """#!/bin/sh
for word; do [ "$before" = -o ] && echo "a library" > "$word"; before=$word; done
"""


def test_the_library_is_kept_in_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library = build_library(compiler=str(compiler))
    assert library.is_relative_to(tmp_path / "cache" / "specstep") and library.read_text() == "a library\n"
    library.write_text("kept")
    assert build_library(compiler=str(compiler)).read_text() == "kept"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert build_library(compiler=str(compiler)).is_relative_to(tmp_path / "home" / ".cache" / "specstep")


OF_ANOTHER_VERSION = """
import sys
from pathlib import Path
from specstep.kernels import native
native.NATIVE_OPS["added_since"] = native.NATIVE_OPS["rank_native"]
native.load_library(Path(sys.argv[1]))
"""


def test_a_library_of_another_version_is_refused() -> None:
    command = [sys.executable, "-c", OF_ANOTHER_VERSION, str(build_library())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "OSError" in done.stderr and "of this version of specstep, got none named added_since" in done.stderr


def test_tests_leave_the_users_cache_alone(shared_folder: Path) -> None:
    assert build_library().is_relative_to(shared_folder)
