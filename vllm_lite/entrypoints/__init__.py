"""The ways into the engine from outside: HTTP servers, and `LLM` from Python."""
