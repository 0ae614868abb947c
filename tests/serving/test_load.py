"""Many clients at once: random parameters, disconnects and bad bodies. What ends is what the engine says alone."""

import asyncio
import random
import sys
from pathlib import Path

import httpx2 as httpx
from served import PATIENCE, is_idle, running, until
from specstep.serving.app import create_app
from specstep.serving.options import ServeOptions

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

from soak_serve import alone, complaints, visit

CLIENTS, CALLS = 16, 3


def test_every_finished_answer_is_the_engine_s_own_and_no_row_is_lost(tiny):
    finished = []

    async def client_of(url, number):
        choose = random.Random(number)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            finished.extend([await visit(client, choose) for _ in range(CALLS)])

    async def all_of_them(url):
        await asyncio.gather(*(client_of(url, number) for number in range(CLIENTS)))

    with running(create_app({"tiny": tiny}, ServeOptions(max_queue=1000))) as url:
        asyncio.run(all_of_them(url))
        until(lambda: is_idle(tiny))
        page = httpx.get(url + "/metrics").text
    answers = [answer for answer in finished if answer]
    assert len(finished) == CLIENTS * CALLS and len(answers) > CLIENTS
    for asked, texts in answers:
        assert texts == alone(tiny, asked), asked
    assert complaints(page) == [] and 'specstep_running{model="tiny"} 0.0' in page
    assert complaints('specstep_running{model="tiny"} 1.0\nspecstep_http_requests_total{route="/",status="500"} 1.0')
