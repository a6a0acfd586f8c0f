"""The ways into the engine from outside: HTTP servers."""
