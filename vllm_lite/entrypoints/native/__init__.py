"""What the native protocol has of its own."""
