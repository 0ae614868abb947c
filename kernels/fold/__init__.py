"""Commits the accepted path of linear attention: writes its tokens to the state, in their order."""
