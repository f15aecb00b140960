"""Figures of predictions and forecasts."""
