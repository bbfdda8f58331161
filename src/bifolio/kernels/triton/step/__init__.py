"""The passes of a step on a GPU: their buffers and launches (`graphs` captures them)."""
