"""A Ray Serve application: the server's API over replicas of one engine.

serve run specstep.serving.ray:app engine=engines/smol max_replicas=4
"""

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig

from ..runtime.engine_file import read_manifest
from ..runtime.load import load
from .app import create_app
from .options import LONGEST_INTERVAL_MS, ServeOptions


class Replicas(BaseModel):
    """What the application is told. `share_prefixes`, `stream_interval_ms` and `tool_format` are those of
    `ServeOptions`."""

    model_config = ConfigDict(extra="forbid")

    engine: str  # a directory, at the same place on every node
    name: str | None = None  # the model's, that of the directory without it
    # Engines that share the calls; between these, as many as keep the calls of each near its rows.
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    # Calls that may wait for a row of a replica; where all replicas have as many, as many more wait in each of Ray's
    # proxies, and then calls get status 503.
    max_queue: int = Field(128, ge=0)
    prefix_cache: int = Field(256, ge=0)  # MiB in which a replica keeps keys and values of what it served
    prefill_per_step: int = Field(64, ge=2)  # most prompt tokens that are prefilled between two steps
    stream_interval_ms: int = Field(40, ge=0, le=LONGEST_INTERVAL_MS)
    cpus: float = Field(1, ge=0)  # what a replica takes of its node
    gpus: float = Field(0, ge=0)
    api_keys: tuple[str, ...] = ()  # or a text with commas between them, as `serve run` has it
    share_prefixes: bool = False
    tool_format: str | None = None

    @field_validator("api_keys", mode="before")
    @classmethod
    def _split(cls, keys: Any) -> Any:
        return [key.strip() for key in keys.split(",")] if isinstance(keys, str) else keys


class _Replica:
    """What Ray asks of a replica. `app` is the application, which Ray adds."""

    app: FastAPI

    def check_health(self) -> None:
        """Raises where the engine is broken: Ray starts another replica in its place."""
        self.app.state.check()


def app(args: Replicas) -> Application:
    """The application, for `serve run` and `serve deploy`. Raises EngineError where there is no engine."""
    directory = Path(args.engine).resolve()
    name = args.name or directory.name
    rows = read_manifest(directory).spec.max_batch
    options = ServeOptions(
        api_keys=args.api_keys,
        max_queue=args.max_queue,
        share_prefixes=args.share_prefixes,
        stream_interval_ms=args.stream_interval_ms,
        tool_format=args.tool_format,
    )

    def made() -> FastAPI:
        """Called in the process of each replica."""
        prefixes = args.prefix_cache * 2**20
        engine = load(directory, prefix_cache_bytes=prefixes, prefill_per_step=args.prefill_per_step)
        return create_app({name: engine}, options)

    deployment = serve.deployment(
        serve.ingress(made)(_Replica),
        name="specstep",
        max_ongoing_requests=rows + args.max_queue,
        max_queued_requests=max(1, args.max_queue),
        autoscaling_config=AutoscalingConfig(
            min_replicas=args.min_replicas,
            max_replicas=max(args.min_replicas, args.max_replicas),
            target_ongoing_requests=rows,
        ),
        ray_actor_options={"num_cpus": args.cpus, "num_gpus": args.gpus},
    )
    return deployment.bind()
