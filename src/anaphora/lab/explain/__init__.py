"""Explain: from the best that a log's prompts allow down to what was reported, and what each loss is due to."""
