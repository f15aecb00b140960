"""Decision sections of the report: cost, objectives, trade-offs, recommendations, savings, nodes."""
