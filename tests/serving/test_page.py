"""The page in a headless Chromium, over the protocol of its developer tools."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from served import PATIENCE, until
from specstep.serving import app

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

RENUMBER = """
import os, sys
read, write, *program = sys.argv[1:]
os.dup2(int(read), 3)
os.dup2(int(write), 4)
os.execv(program[0], program)
"""


class Browser:
    """A page of a Chromium that listens on two pipes: JSON, each message ended by a zero byte."""

    def __init__(self, profile):
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--window-size=900,640"]
        program = [CHROMIUM, *options, f"--user-data-dir={profile}", "about:blank"]
        shell = [sys.executable, "-c", RENUMBER, str(to_child), str(from_child), *program]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(shell, pass_fds=(to_child, from_child), **quiet)
        os.close(to_child)
        os.close(from_child)
        self._count, self._held, self._session = 0, b"", None
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        found = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = found["sessionId"]

    def call(self, method, **given):
        """Call a method of the protocol -> its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": given}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                read = os.read(self._in, 2**16)
                assert read, "the browser has ended"
                self._held += read
            one, _, self._held = self._held.partition(b"\0")
            answer = json.loads(one)
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                return answer["result"]

    def value(self, script):
        """What a script in the page evaluates to."""
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def close(self):
        os.close(self._out)
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._in)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs Chromium, as Debian's package `chromium`")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


def test_the_page_is_one_file():
    page = app.PAGE.read_text()
    assert not re.search(r"""(src|href)=|@import|url\(|https?://""", page)
    assert "innerHTML" not in page


def wait_for_answers(browser, count):
    until(lambda: browser.value("document.getElementById('turns').dataset.done") == str(count))


def test_a_conversation(browser, address, tiny, tmp_path):
    browser.call("Page.navigate", url=address + "/")
    until(lambda: browser.value("document.getElementById('model').value") == "tiny")
    messages = []
    for number, text in enumerate(("abcabcabcabc <b>not bold</b>", "and you?"), 1):
        browser.value("document.getElementById('most').value = 30")
        browser.value(f"document.getElementById('text').value = {json.dumps(text)}; send(); 0")
        wait_for_answers(browser, number)
        messages.append({"role": "user", "content": text})
        expected = tiny.generate(messages, 30)
        said = browser.value("[...document.querySelectorAll('.assistant')].at(-1).textContent")
        assert said == expected.text
        messages.append({"role": "assistant", "content": said})
        assert browser.value("[...document.querySelectorAll('.user')].at(-1).textContent") == text
        figures = browser.value("document.getElementById('figures').textContent")
        steps = f"{len(expected.token_ids) / expected.stats['steps']:.2f} tokens per step"
        assert f"{len(expected.token_ids)} tokens · " in figures and steps in figures
    assert browser.value("document.querySelectorAll('#turns b, .error').length") == 0
    shot = base64.b64decode(browser.call("Page.captureScreenshot", format="png")["data"])
    assert shot.startswith(b"\x89PNG") and len(shot) > 5000
    Path(os.environ.get("SPECSTEP_SCREENSHOT", tmp_path / "page.png")).write_bytes(shot)


def test_accepted_drafts_are_tinted(browser):
    """Steps of our own making: the tiny model's drafts are hardly ever right."""
    browser.value("""
        const turn = add("assistant", "");
        show(turn, {tokens: ["The", " sky", " is"], accepted: 2});
        show(turn, {tokens: [" blue", ""], accepted: 1}); 0""")
    tinted = (
        "[...[...document.querySelectorAll('.assistant')].at(-1).querySelectorAll('.draft')].map(e => e.textContent)"
    )
    assert browser.value(tinted) == ["The", " sky", " blue"]
    colour = "getComputedStyle(document.querySelector('.assistant .draft')).backgroundColor"
    assert browser.value(colour) not in ("rgba(0, 0, 0, 0)", "transparent")


def test_calls_are_shown_and_answered(browser):
    """Deltas of our own making: the tiny model makes no call."""
    arguments = '{"utc": true, "at": "<b>"}'
    deltas = [
        [{"index": 0, "id": "a", "type": "function", "function": {"name": "now", "arguments": ""}}],
        [{"index": 0, "function": {"arguments": arguments}}],
        [{"index": 1, "id": "b", "type": "custom", "custom": {"name": "run", "input": "x = "}}],
        [{"index": 1, "custom": {"input": "1"}}],
    ]
    browser.value(f"""
        window.kept = messages;
        messages = [{{role: "user", content: "u"}}];
        window.said = {{content: "So:", reasoning: "", calls: [], reason: "tool_calls"}};
        for (const each of {json.dumps(deltas)}) grow(said.calls, each);
        keep(messages, said); 0""")
    shown = "[...document.querySelectorAll('.call')].map(e => e.textContent)"
    assert browser.value(shown) == ['now{\n  "utc": true,\n  "at": "<b>"\n}', "runx = 1"]
    placeholder = "document.getElementById('text').placeholder"
    assert browser.value(placeholder) == "What does now give?"
    calls = browser.value("messages[1].tool_calls")
    assert calls[0] == {"id": "a", "type": "function", "function": {"name": "now", "arguments": arguments}}
    assert calls[1] == {"id": "b", "type": "custom", "custom": {"name": "run", "input": "x = 1"}}
    browser.value("document.getElementById('text').value = 'noon'; send(); 0")
    assert browser.value("messages[2]") == {"role": "tool", "tool_call_id": "a", "content": "noon"}
    assert browser.value(placeholder) == "What does run give?"
    browser.value("messages = kept; open = []; ask(); 0")
    assert browser.value(placeholder).startswith("Say something")


def test_tools_go_with_the_question(browser):
    done = int(browser.value("document.getElementById('turns').dataset.done"))
    tools = json.dumps([{"type": "web_search"}])
    browser.value(f"document.getElementById('tools').value = {json.dumps(tools)}; 0")
    browser.value("document.getElementById('text').value = 'hi'; send(); 0")
    wait_for_answers(browser, done + 1)
    error = "document.querySelector('.error')"
    assert "tools[0].type: expected function" in browser.value(f"{error}.textContent")
    browser.value(f"document.getElementById('tools').value = ''; {error}.remove(); 0")
    assert browser.value("messages.length") == 4


def test_errors_are_shown_and_the_conversation_goes_on(browser):
    done = int(browser.value("document.getElementById('turns').dataset.done"))
    browser.value(f"document.getElementById('text').value = {json.dumps('x' * 400)}; send(); 0")
    wait_for_answers(browser, done + 1)
    assert "expected at most 191 tokens" in browser.value("document.querySelector('.error').textContent")
    assert browser.value("messages.length") == 4
