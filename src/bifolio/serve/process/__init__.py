"""The engine process: its service, and clients of it on this host and others."""
