"""Studies: what an architecture does, measured on one laptop and held against claims."""
