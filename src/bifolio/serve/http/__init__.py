"""The HTTP front end: from connections to calls of an engine client."""
