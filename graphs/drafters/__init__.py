"""Drafting methods: one file each, all returning a `DraftTree`."""
