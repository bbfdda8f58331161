"""Views of a running server: metrics, logs, the live map, and the descriptions of its API."""
