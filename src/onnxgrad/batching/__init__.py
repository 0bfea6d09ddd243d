"""vmap over graphs: the nodes that depend on a direction, written once for a whole batch of directions."""
