"""Scaling laws: fitting, model selection and text."""
