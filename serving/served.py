"""A model that is served: its engine, and the places in its queue."""

import math
import time
from functools import cached_property

from ..errors import EngineError
from ..runtime.calls.template import TemplateTools
from ..runtime.engine import Engine
from ..runtime.text.token_text import TokenText
from ..runtime.text.tokenizer import EngineTokenizer
from .api_error import BUSY, ApiError
from .places import Places, Queue, QueueFullError, TooManyError
from .tools.conversation import shown_text

MOST_WAIT = 60  # seconds that Retry-After says at most


class Served:
    """One engine under its name, and its queue."""

    def __init__(self, name: str, engine: Engine, max_queue: int, learning: bool, tool_format: str | None = None):
        """learning: whether answers may be counted for the drafts of later ones. tool_format: the form of calls,
        None for the engine's. Raises InputError for one that the engine's model cannot have."""
        self._tools = None if tool_format is None else engine.tools.over(tool_format)
        self.name, self.engine, self.learning = name, engine, learning
        self.rows, self.created = engine.spec.max_batch, int(time.time())
        self.queue = Queue(self.rows, max_queue)
        self._seconds = 1.0  # that a call took, a running mean

    @cached_property
    def token_text(self) -> TokenText | None:
        """None for an engine without a tokenizer."""
        return None if self.engine.text is None else TokenText(self.engine.text)

    @property
    def tools(self) -> TemplateTools:
        """How the model is told of tools, and writes calls. Raises InputError where nobody knows."""
        return self._tools or self.engine.tools

    @property
    def tokenizer(self) -> EngineTokenizer:
        """The engine's. Raises InputError for one that was built without."""
        return self.engine.tokenizer

    @cached_property
    def shown_text(self) -> EngineTokenizer:
        """The tokenizer of answers that are read."""
        return shown_text(self.tokenizer)

    @property
    def most_tokens(self) -> int:
        """The longest prompt."""
        return self.engine.spec.max_seq_len - 1

    @property
    def most_characters(self) -> int:
        """The longest text that can be a prompt, whatever its tokens are."""
        return self.most_tokens * (self.token_text.longest if self.token_text else 1)

    def check_alive(self) -> None:
        """Raises EngineError where the engine has failed for good."""
        if self.engine.broken is not None:
            raise EngineError(f"{self.name}: expected an engine that runs, got one that failed; load it again")

    def check(self) -> None:
        """Raises EngineError where no request can run any more, now or later."""
        self.check_alive()
        _ = self.engine.session  # which a closed engine refuses

    def take(self, count: int) -> Places:
        """Places for so many choices of one call. Raises ApiError where there are not as many."""
        try:
            return self.queue.take(count)
        except TooManyError as error:
            raise ApiError(400, str(error), param="n") from None
        except QueueFullError as error:
            wait = math.ceil(self._seconds * (max(0, self.queue.taken - self.rows) + 1) / self.rows)
            headers = {"Retry-After": str(max(1, min(wait, MOST_WAIT)))}
            raise ApiError(429, str(error), BUSY, None, "queue_full", headers) from None

    def took(self, seconds: float) -> None:
        """Learn how long a call lasted."""
        self._seconds += 0.1 * (seconds - self._seconds)
