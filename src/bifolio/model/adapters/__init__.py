"""Low-rank adapters (LoRA): their files, and their places in a network."""
