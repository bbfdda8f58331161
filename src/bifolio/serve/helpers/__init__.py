"""Helper processes and further front ends."""
