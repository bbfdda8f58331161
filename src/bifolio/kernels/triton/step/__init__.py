"""The passes of a step on a GPU: what each reads, launches and leaves (`graphs` captures them)."""
