"""Orders of the waiting queue: what each makes of the cache, whom it keeps waiting, and what a pass costs."""
