"""Hugging Face-layout folders."""
