"""The Ray Serve application without Ray: what its replicas are asked. tests/scale has it for real."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
from fake_session import FakeSession
from specstep.errors import EngineError, InputError
from specstep.runtime.engine import Engine


@pytest.fixture
def ray(monkeypatch):
    """serving/ray.py over a Ray that makes replicas here and now, as Ray makes them."""

    def ingress(build):
        return lambda cls: lambda: SimpleNamespace(made=cls, app=build())

    serve = ModuleType("ray.serve")
    serve.Application, serve.ingress = object, ingress
    serve.deployment = lambda made, **_: SimpleNamespace(bind=made)
    config = ModuleType("ray.serve.config")
    config.AutoscalingConfig = lambda **given: given
    package = ModuleType("ray")
    package.serve = serve
    for name, module in {"ray": package, "ray.serve": serve, "ray.serve.config": config}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "specstep.serving.ray", raising=False)
    yield importlib.import_module("specstep.serving.ray")
    sys.modules.pop("specstep.serving.ray", None)


def test_the_form_of_calls(ray, monkeypatch, tmp_path):
    told = []
    engine = Engine(FakeSession(1), None)
    monkeypatch.setattr(ray, "load", lambda *_, **__: engine)
    monkeypatch.setattr(ray, "create_app", lambda engines, options: told.append(options.tool_format))
    monkeypatch.setattr(ray, "read_manifest", lambda _: SimpleNamespace(spec=engine.spec))
    ray.app(ray.Replicas(engine=str(tmp_path), tool_format="llama3"))
    ray.app(ray.Replicas(engine=str(tmp_path)))
    assert told == ["llama3", None]
    with pytest.raises(InputError, match=r"tool-format: expected one of .*, got x"):
        ray.app(ray.Replicas(engine=str(tmp_path), tool_format="x"))


def test_a_replica_whose_engine_breaks_says_so(ray, monkeypatch, tmp_path):
    engine = Engine(FakeSession(1), None)
    monkeypatch.setattr(ray, "load", lambda *_, **__: engine)
    monkeypatch.setattr(ray, "read_manifest", lambda _: SimpleNamespace(spec=engine.spec))
    replica = ray.app(ray.Replicas(engine=str(tmp_path)))
    check = replica.made.check_health
    check(replica)
    engine._scheduler._break(RuntimeError("the device is gone"))
    with pytest.raises(EngineError, match="expected an engine that runs"):
        check(replica)
