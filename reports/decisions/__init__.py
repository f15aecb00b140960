"""What the report says to decide by: cost, objectives, trade-offs, recommendations, savings, nodes."""
