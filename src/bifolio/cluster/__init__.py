"""More than one engine: replicas on Ray Serve, and the routing of requests to the replica that has their prefix."""
