"""The sum of what every rank computed of one tensor."""
