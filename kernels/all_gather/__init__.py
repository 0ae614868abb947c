"""What every rank has of a tensor, put together."""
