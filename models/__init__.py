"""Model components: flat and pure (torch, the standard library and relative imports only)."""
