"""Tools, as OpenAI's API has them: what a model is shown, what it may call, and what it called."""
