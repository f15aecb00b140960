"""Forecasts of step time and efficiency on more ranks than were measured."""
