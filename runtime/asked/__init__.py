"""What a request asks: its prompt, how its tokens are chosen, what its answer may repeat."""
