"""The likeliest tokens of rows of logits, with their log-probabilities: drafters' candidates, and what users ask
for."""
