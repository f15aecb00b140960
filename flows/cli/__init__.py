"""The rankwise command line."""
