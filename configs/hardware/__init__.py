"""Targets, accelerators, links, prices and calibrations."""
