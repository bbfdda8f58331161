"""Recovery from failing steps."""
