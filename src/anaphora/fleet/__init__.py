"""What is known of many caches at once, and which of them a request should go to."""
