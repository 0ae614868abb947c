"""What makes drafters from data."""
