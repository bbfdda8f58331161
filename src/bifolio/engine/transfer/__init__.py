"""Prefill and decode on separate engines: one computes the blocks of a prompt, the other takes them into its cache."""
