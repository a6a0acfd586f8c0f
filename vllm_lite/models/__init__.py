"""What each architecture is, and nothing else: no device, no rank, no weight format, no cache layout."""
