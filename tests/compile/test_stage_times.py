"""Where the time of a build goes."""

from specstep.compile import stage_times
from specstep.compile.stage_times import StageTimes


def test_messages_pass_and_stages_take_the_time_between_them(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 4.5, 10.0, 12.0])
    monkeypatch.setattr(stage_times.time, "perf_counter", lambda: next(clock))
    said = []
    times = StageTimes(said.append)
    lines = [
        "loading a model",
        "note: nothing",
        "comparing it",
        "tracing step",
        "comparing it again",
        "drafts: 2 tokens",
    ]
    for line in lines:
        times(line)
    assert said == [*lines[:3], "tracing step, about 36 s left", *lines[4:]]  # 4.5 s went before
    assert times.end() == {"loading": 4.0, "comparing": 0.5 + 2.0, "tracing": 5.5}


def test_what_is_left_is_said_once_a_stage_and_only_where_it_is_long(monkeypatch):
    clock = iter([0.0, 0.1, 0.2, 20.0, 22.0, 23.0])
    monkeypatch.setattr(stage_times.time, "perf_counter", lambda: next(clock))
    said = []
    times = StageTimes(said.append)
    for line in ("loading a model", "tracing prefill", "tracing step", "compiling prefill", "writing weights"):
        times(line)
    assert said == [
        "loading a model", "tracing prefill", "tracing step", "compiling prefill, about 31 s left", "writing weights"
    ]  # fmt: skip
