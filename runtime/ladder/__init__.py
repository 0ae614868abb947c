"""How many nodes a step verifies, and who drafts."""
