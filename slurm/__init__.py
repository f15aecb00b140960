"""How a job is started, watched and ended."""
