"""Studies whose result is no row of a table: `python -m benchmarks.tools.NAME --help`."""
