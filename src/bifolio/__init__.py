"""bifolio: prefill and decode over one paged KV cache."""

__version__ = "0.1.0"
