"""Several models behind one address: engines start on demand and are evicted under a budget of bytes."""
