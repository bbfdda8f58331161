"""The engine: one step is plan, launch, collect."""
