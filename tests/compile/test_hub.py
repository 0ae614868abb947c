"""Models of the hub: names, which files are read, what comes from a server, and what is left when it is gone."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
import specstep
from specstep.compile.hub import HubName, hub_name, wanted

COMMIT = "c0" * 20
MODEL = {"config.json": b"{}", "model-1.safetensors": b"12", "model-2.safetensors": b"345", "tokenizer.json": b"{}"}
OTHERS = {"README.md": b"", "pytorch_model.bin": b"", "consolidated.safetensors": b"", "onnx/model.onnx": b""}
GGUF = {"a-Q4_K_M.gguf": b"4", "a-Q8_0-00001-of-00002.gguf": b"81", "a-Q8_0-00002-of-00002.gguf": b"82"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("owner/a-model.1", ("owner/a-model.1", None, None, None)),
        ("owner/model@v1.0", ("owner/model", "v1.0", None, None)),
        ("owner/model@refs/pr/3", ("owner/model", "refs/pr/3", None, None)),
        ("owner/model:Q4_K_M", ("owner/model", None, "Q4_K_M", None)),
        ("owner/model@main:IQ4_XS", ("owner/model", "main", "IQ4_XS", None)),
        ("owner/model/some/file-00001-of-00002.gguf", ("owner/model", None, None, "some/file-00001-of-00002.gguf")),
        *((odd, None) for odd in ("model", "./a/b", "/a/b", "~/a", "a/b/c", "a/b:", "a/b@", "../b/c.gguf", "a b/c")),
    ],
)
def test_names(name, expected):
    assert hub_name(name) == (expected and HubName(*expected))


def asked(name: str, files) -> list[str]:
    return sorted(wanted(hub_name(name), sorted(files)))


def test_which_files_are_read():
    assert asked("o/n", MODEL | OTHERS) == sorted(MODEL)
    named = ["additional_chat_templates/tool_use.jinja", "chat_template.jinja", "config.json", "model.safetensors"]
    assert asked("o/n", dict.fromkeys(named, b"")) == named
    assert asked("o/n", {"config.json": b"", **OTHERS}) == ["config.json", "pytorch_model.bin"]
    assert asked("o/n", {"adapter_config.json": b"", "adapter_model.safetensors": b""} | GGUF) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    for name in ("o/n:q8_0", "o/n/a-Q8_0-00001-of-00002.gguf"):
        assert asked(name, MODEL | GGUF) == ["a-Q8_0-00001-of-00002.gguf", "a-Q8_0-00002-of-00002.gguf"]
    assert asked("o/n", ["a.gguf", "mmproj-a.gguf", "README.md"]) == ["a.gguf"]


@pytest.mark.parametrize("name", ["o/n", "o/n:Q4", "o/n:Q5_K_M", "o/n/b.gguf"])
def test_a_gguf_file_that_is_not_told_is_asked_for(name):
    with pytest.raises(specstep.BuildError, match=r"one GGUF file .*there are a-Q4_K_M.gguf, a-Q8_0.gguf; say"):
        asked(name, GGUF)


class Hub(http.server.BaseHTTPRequestHandler):
    """The part of the hub that its client asks for files."""

    files: ClassVar[dict[str, bytes]] = {}

    def do_GET(self) -> None:
        place = self.path.partition("?")[0]
        if not place.removeprefix("/api/models").startswith("/owner/model"):
            self.answer(b'{"error": "Repository not found"}', 404, {"X-Error-Code": "RepoNotFound"})
        elif "/tree/" in place:
            found = [{"type": "file", "path": n, "size": len(b), "oid": "1"} for n, b in self.files.items()]
            self.answer(json.dumps(found).encode())
        elif place.startswith("/api/"):
            siblings = [{"rfilename": name} for name in self.files]
            self.answer(json.dumps({"id": "owner/model", "sha": COMMIT, "siblings": siblings}).encode())
        else:
            content = self.files[place.split(f"/resolve/{COMMIT}/")[1]]
            self.answer(content, 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT})

    do_HEAD = do_GET

    def answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


BRING = """
import sys
from specstep.compile.hub import download
from specstep.compile.locate import local
download(sys.argv[1:], lambda line: print(line, file=sys.stderr))
for name in sys.argv[1:]:
    print(local(name))
"""


def bring(home: Path, port: int, *names: str) -> subprocess.CompletedProcess[str]:
    """What `local` says of names in a process of its own, whose hub is at a port of this machine."""
    unset = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE"}
    others = {name: value for name, value in os.environ.items() if name not in unset and "proxy" not in name.lower()}
    env = others | {"HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run([sys.executable, "-c", BRING, *names], env=env, capture_output=True, text=True, cwd=home)


def test_files_come_once_and_stay(tmp_path):
    hub = type("Full", (Hub,), {"files": MODEL | OTHERS | GGUF})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), hub) as server:
        threading.Thread(target=server.serve_forever).start()
        port = server.server_port
        done = bring(tmp_path, port, "owner/model", "owner/model:Q8_0")
        missing = bring(tmp_path, port, "owner/other")
        server.shutdown()
    assert done.returncode == 0, done.stderr
    folder, file = map(Path, done.stdout.split())
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == MODEL | {
        name: content for name, content in GGUF.items() if "Q8" in name
    }
    assert file.name == "a-Q8_0-00001-of-00002.gguf" and "\r" not in done.stderr
    assert "owner/other is not a path here and could not be found on the hub" in missing.stderr.splitlines()[-1]
    again = bring(tmp_path, port, "owner/model", "owner/model:Q8_0")  # the server is gone
    assert again.stdout == done.stdout, again.stderr
    gone = bring(tmp_path / "hub", port, "owner/model")
    assert "could not be found on the hub" in gone.stderr.splitlines()[-1]
