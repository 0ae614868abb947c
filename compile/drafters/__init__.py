"""Which drafter an engine gets, and the files that drafters come in."""
