"""Comparison of predictions with measurements, and scaling forecasts."""
