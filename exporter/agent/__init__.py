"""The agent: samples source and scheduler at a fixed interval, and advances the ledger."""
