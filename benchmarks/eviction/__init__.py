"""Hit rate of eviction policies at equal memory, beside the clairvoyant optimum."""
