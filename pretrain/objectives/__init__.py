"""Training objectives: what turns a batch of tokens into loss terms."""
