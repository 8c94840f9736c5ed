"""Other people's engines and servers, with our caches and our routing."""
