"""Every engine option of vLLM 0.2.7 at both doors, the command line and `LLM(...)`: the same configuration, refusals and
notes, as `native_protocol.md` has them."""
