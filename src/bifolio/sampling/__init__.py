"""The parts of the sampler: noise, exact weights, edits of logits, filters, and the table of parameters."""
