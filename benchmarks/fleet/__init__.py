"""A trace on a simulated fleet: the product's queue, planner, block manager and router, without computation."""
