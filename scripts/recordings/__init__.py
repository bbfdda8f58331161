"""Recordings of the documentation: a terminal session and the live view as animated SVG files."""
