"""Shared base of all models: frozen values, content hashes, atomic files, intervals."""
