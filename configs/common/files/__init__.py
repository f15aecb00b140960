"""Files that others wrote, read within bounds; and the project's own."""
