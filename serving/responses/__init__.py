"""OpenAI's Responses API, the part that needs no memory of earlier calls."""
