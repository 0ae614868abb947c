"""Engines whose model several processes of one machine share."""
