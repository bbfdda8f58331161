"""The decode machinery of GPUs."""
