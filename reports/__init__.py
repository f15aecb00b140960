"""Analysis of records and rendering of reports and plots, as pure functions."""
