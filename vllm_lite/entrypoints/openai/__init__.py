"""What OpenAI's protocol has of its own."""
